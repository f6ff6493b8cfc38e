"""Random and nearly right input for the command: no traceback, no file written on refusal, no hang.

    python -m tests.fuzz --cases 20000

The command runs in this process, from its arguments to its exit code; only what comes after the input has been read
and checked (models, training) is left out, but for the kind "model". A fault is shrunk to a small one and printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import transformers
from rich.console import Console
from rich.progress import Progress

from seqreg.workbench import check, data
from tests import fuzz_inputs as inputs
from tests.bad_input.table import Said, run, tree
from tests.workbench import samples

LIMIT = 20
"""Seconds of a case; a slow machine is not a hang."""
SHARES = {"recipe": 30, "raw recipe": 10, "card": 20, "setting": 20, "data": 14, "text": 4, "model": 2}


class TooLong(BaseException):
    """A case that does not end; nothing catches it."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong(f"more than {LIMIT} s")

    kept = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)


class Fuzz:
    """Cases of one kind in a folder that holds their files alone."""

    def __init__(self, folder: Path, done: Callable[[], None] = lambda: None) -> None:
        self.folder, self.done, self.seen = folder, done, Counter[str]()
        samples.write(folder / "good.jsonl", [{"source": f"text {n}", "target": f"t {n}"} for n in range(5)])

    def attempt(self, *words: str, notes: bool = False) -> Said:
        """Run the command once, and look at what it did; `notes` about the data may come before a refusal."""
        before = tree(self.folder)
        with limited():
            said = run(self.folder, *words)
        assert said.code in (0, 2), said
        assert "Traceback" not in said.err, said.err
        assert tree(self.folder) == before, "a file was written"
        if said.code == 2:
            lines = said.err.strip().splitlines()
            assert lines[-1].startswith("seqreg: "), said.err
            assert notes or len(lines) == 1, said.err
            assert "\x1b" not in said.err, said.err
        self.seen["refused" if said.code else "accepted"] += 1
        self.done()
        return said

    def checked(self, *words: str, look: Callable[[Any], str] = lambda _: "ok") -> None:
        """`seqreg check`, with `look` in place of the model."""
        with mock.patch.object(check, "check", look):
            self.attempt("check", *words)

    def file(self, name: str, content: bytes) -> str:
        (self.folder / name).write_bytes(content)
        return name

    def recipe(self, case: tuple[bytes, list[str]]) -> None:
        self.checked(self.file("recipe.yaml", case[0]), *case[1])

    def raw_recipe(self, content: bytes) -> None:
        self.checked(self.file("recipe.yaml", content))

    def card(self, content: bytes) -> None:
        self.checked("quickstart", f"task={self.file('card.yaml', content)}")

    def setting(self, words: list[str]) -> None:
        self.checked("quickstart", *words)

    def data(self, case: tuple[str, str, bytes]) -> None:
        task, name, content = case
        path = self.file(name, content)
        chosen = ["gigaword"] if task == "text_pairs" else ["glue"]
        words = [*chosen, f"task={task}", "model.name=x", f"data.path={path}"]
        self.checked(*words, look=lambda made: f"{len(data.load(made.card, made.config.data).sets)}")
        (self.folder / name).unlink()

    def text(self, case: tuple[bytes, bytes, bytes]) -> None:
        self.attempt("rouge", self.file("a.txt", case[0]), self.file("b.jsonl", case[1]))
        (self.folder / "run").mkdir(exist_ok=True)
        (self.folder / "run" / "metrics.json").write_bytes(case[2])
        self.attempt("show", "run")

    def model(self, words: list[str]) -> None:
        small = samples.tiny("bart", self.folder / "good.jsonl")
        self.attempt("check", "gigaword", "task=text_pairs", *small, *words, notes=True)


STRATEGIES: dict[str, Any] = {
    "recipe": inputs.recipes, "raw recipe": inputs.raw_recipes, "card": inputs.card_files, "setting": inputs.settings,
    "data": inputs.data_files, "text": inputs.texts, "model": inputs.model_settings,
}  # fmt: skip


def fuzz(kind: str, cases: int, seed: int, folder: Path, done: Callable[[], None] = lambda: None) -> Counter[str]:
    """So many cases of a kind; how many were accepted and refused. The first fault is shrunk and raised."""
    one = Fuzz(folder, done)
    try_it = getattr(one, kind.replace(" ", "_"))
    chosen = hypothesis.settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink], print_blob=False,
    )  # fmt: skip

    @hypothesis.seed(seed)
    @chosen
    @hypothesis.given(STRATEGIES[kind])
    def test(case: Any) -> None:
        try_it(case)

    test()
    return one.seen


def main() -> int:
    """Run all kinds and print the counts; 1 after a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=1000, help="how many, of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(SHARES), help="this kind alone")
    chosen = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    shares = {chosen.kind: 100} if chosen.kind else SHARES
    seen, begin = dict[str, Counter[str]](), time.perf_counter()
    out = Console(highlight=False, markup=False)
    with Progress(console=Console(stderr=True)) as progress:
        for kind, share in shares.items():
            cases = max(1, chosen.cases * share // 100)
            bar = progress.add_task(kind, total=cases)
            with tempfile.TemporaryDirectory() as folder:
                seen[kind] = fuzz(kind, cases, chosen.seed, Path(folder), lambda bar=bar: progress.advance(bar))
            out.print(f"{kind}: {json.dumps(seen[kind])}")
    total = sum(seen.values(), Counter[str]())
    spent = time.perf_counter() - begin
    out.print(f"{total.total()} cases in {spent:.0f} s: {dict(total)}; no traceback, no file written, no hang")
    return 0


if __name__ == "__main__":
    sys.exit(main())
