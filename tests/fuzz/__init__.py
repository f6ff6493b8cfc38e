"""Random and nearly right input for the command: no traceback, no file written on refusal, no hang.

    python -m tests.fuzz --cases 20000

The command runs in this process, from its arguments to its exit code; only what comes after the input has been read
and checked (models, training) is left out, but for the kind "model". What these kinds find is shrunk to a small one and
printed. The kinds of `WHOLE` run all of it, training included, in a process of their own with a limit on time and
memory, in a folder with a trained run; they continue after a fault, and print all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
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
import torch.distributed.run
import transformers
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from seqreg.cli import check, serve
from seqreg.errors import BadInput
from seqreg.studies.collapse import chain, probe
from seqreg.workbench.config import cards
from seqreg.workbench.data import loading
from tests.bad_input.table import Said, run, tree
from tests.fuzz import inputs, walks
from tests.helpers import forked_process, sample_files

LIMIT = 20
"""Seconds of a case; a slow machine is not a hang."""
WHOLE_LIMIT, MEMORY = 300, 4 * 2**30
"""Seconds and further bytes of a case that is run as a whole; of its processor, 60 seconds."""
SHARES = {
    "recipe": 24, "raw recipe": 10, "card": 16, "setting": 16, "data": 12, "text": 4, "misspelt key": 4, "plan": 6,
    "own term": 3, "model": 1, "typed setting": 1, "term setting": 1, "model folder": 0.5, "run folder": 0.5,
    "option": 0.5,
    "environment": 0.5, "endless": 2,
}  # fmt: skip
QUICK = [*forked_process.TINY, "optimisation.warmup_steps=0", "optimisation.max_steps=1"]
"""A run of one step."""
STAGED = ("endless",)
"""Kinds that need a trained run, in this process."""
WHOLE = ("typed setting", "term setting", "model folder", "run folder", "option", "environment")


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
        sample_files.write(folder / "good.jsonl", [{"source": f"text {n}", "target": f"t {n}"} for n in range(5)])

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

    def checked(self, *words: str, look: Callable[..., str] = lambda *_: "ok") -> None:
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
        self.checked(*words, look=lambda made, *_: f"{len(loading.load(made.card, made.config.data).sets)}")
        (self.folder / name).unlink()

    def text(self, case: tuple[bytes, bytes, bytes]) -> None:
        self.attempt("rouge", self.file("a.txt", case[0]), self.file("b.jsonl", case[1]))
        (self.folder / "run").mkdir(exist_ok=True)
        (self.folder / "run" / "metrics.json").write_bytes(case[2])
        self.attempt("show", "run")

    def model(self, words: list[str]) -> None:
        small = sample_files.tiny("bart", self.folder / "good.jsonl")
        self.attempt("check", "gigaword", "task=text_pairs", *small, *words, notes=True)

    def misspelt_key(self, key: str) -> None:
        self.checked("quickstart", f"{key}=1")

    def own_term(self, case: tuple[str, str]) -> None:
        name, text = case
        self.file("own.py", text.encode())
        sys.modules.pop("own", None)
        words = ["check", "quickstart", *QUICK, f'terms.mine={{term: "{name}"}}']
        with mock.patch.object(sys, "path", [str(self.folder), *sys.path]):
            with mock.patch.object(sys, "dont_write_bytecode", True):
                self.attempt(*words, notes=True)

    def plan(self, case: tuple[str, bytes]) -> None:
        command, content = case
        card, _ = cards.load("glue/rte")
        if not (self.folder / "rte").exists():
            sample_files.folder(self.folder / "rte", card)
        path = self.file("plan.yaml", content)
        done = BadInput("all of it is right")
        with (
            mock.patch.object(chain, "_train_and_probe", side_effect=done),
            mock.patch.object(probe, "load_all", side_effect=done),
        ):
            self.attempt("chain", path) if command == "chain" else self.attempt("probe", ".", "--tasks", path)

    def stage(self) -> None:
        """A folder with a trained run and odd files, whatever a case has done to it."""
        kept = self.folder.with_name(f"{self.folder.name}-kept")
        if not kept.exists():
            words = [*QUICK, "output=run", "checkpoints.save_steps=1"]
            command = forked_process.Command("train", "quickstart", *words, log=self.log, folder=str(self.folder))
            assert command.wait() == 0, command.text()
            shutil.copytree(self.folder, kept)
        shutil.rmtree(self.folder)
        shutil.copytree(kept, self.folder, symlinks=True)
        (self.folder / "loop").symlink_to("loop")
        (self.folder / "gone").symlink_to("nothing")
        os.mkfifo(self.folder / "pipe")
        (self.folder / "bom.txt").write_bytes("text".encode("utf-16"))
        (self.folder / "bits.bin").write_bytes(bytes(range(256)) * 9)

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def whole(self, *words: str, names: dict[str, str] | None = None, long: bool = False) -> None:
        """Run a command to its end in a process of its own; `long` ones may be stopped."""
        self.log.unlink(missing_ok=True)
        before = tree(self.folder)
        around = {"folder": str(self.folder), "memory": MEMORY, "names": {"COLUMNS": "200", **(names or {})}}
        command = forked_process.Command(*words, log=self.log, **around)
        try:
            code = command.wait(20 if long else WHOLE_LIMIT)
        except TimeoutError:
            assert long, f"still running: {command.text()[-500:]}"
            code = 0
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        same = tree(self.folder) == before
        shown = f"exit code {code}: {text[-1500:]}"
        assert "Traceback" not in text, shown
        assert code in (0, 2, 3, 4), shown
        if code in (2, 4):
            assert text.strip().splitlines()[-1].startswith("seqreg: "), shown
            assert same or code == 4, f"a file was written: {sorted(set(tree(self.folder)) - set(before))}; {shown}"
        if not same:
            self.stage()
        self.seen["refused" if code else "accepted"] += 1
        self.done()

    def typed_setting(self, case: tuple[str, Any]) -> None:
        word = walks.assigned(*case)
        with mock.patch.object(check, "check", return_value="ok"):
            said = self.attempt("check", "quickstart", *QUICK, word)
        if not said.code and case[0] not in ("output", "data.path"):
            long = case[0].rpartition(".")[2] in walks.LONGER
            self.whole("train", "quickstart", *QUICK, "output=out", word, long=long)

    def term_setting(self, case: tuple[str, str, Any]) -> None:
        name, field, value = case
        words = [*QUICK, "-t", name, walks.assigned(f"terms.{name}.{field}", value)]
        with mock.patch.object(check, "check", return_value="ok"):
            said = self.attempt("check", "quickstart", *words)
        if not said.code:
            self.whole("train", "quickstart", *words, "output=out")

    def model_folder(self, damage: tuple[str, str, Any]) -> None:
        walks.spoil(self.folder / "run" / damage[0], *damage[1:])
        words = [word for word in QUICK if not word.startswith("model.")]
        words += [
            "model.architecture=null",
            "model.name=run",
            "model.settings={}",
            "optimisation.max_steps=1",
            "output=out",
        ]
        try:
            self.whole("train", "quickstart", *words)
        finally:
            self.stage()

    def run_folder(self, case: tuple[str, tuple[str, str, Any]]) -> None:
        command, damage = case
        walks.spoil(self.folder / "run" / damage[0], *damage[1:])
        self.file("in.txt", b"a b c\n")
        further = {"predict": ["in.txt"], "calibrate": ["--limit", "4"], "robustness": ["--limit", "4", "--draws", "1"]}
        further |= {"shift": ["--to", "synthetic_news", "--share", "0"], "replay": ["crash/step-1"]}
        try:
            self.whole(command, "run", *further.get(command, []))
        finally:
            self.stage()

    def option(self, case: tuple[str, str, str]) -> None:
        command, name, value = case
        self.file("in.txt", b"a b c\n")
        self.file("plan.yaml", inputs.dumped(walks.PLAN))
        try:
            self.whole(command, *walks.words(command, name, value, QUICK))
        finally:
            self.stage()

    def endless(self, case: tuple[str, str, str]) -> None:
        """A command that serves or launches; a right one is stopped where its server, or torchrun, would begin."""
        command, name, value = case
        words = walks.words(command, name, value, QUICK)
        if command == "serve" and name != "--port":
            words += ["--port", "0"]
        if name == "--rdzv-endpoint":
            words = ["--nnodes", "2", *words]
        with (
            mock.patch.object(serve, "serve", lambda server, announce: server.server_close()),
            mock.patch.object(torch.distributed.run, "run"),
            mock.patch.dict(os.environ),
        ):
            self.attempt(command, *words, notes=True)

    def environment(self, names: dict[str, str]) -> None:
        self.whole("train", "quickstart", *QUICK, "output=out", names=names)


STRATEGIES: dict[str, Any] = {
    "misspelt key": walks.misspelt_keys(), "plan": walks.plans(), "own term": walks.own_terms(),
    "typed setting": walks.typed_settings(), "term setting": walks.term_settings(),
    "model folder": walks.damage(tuple(walks.FILES[2:7])), "option": walks.command_lines(),
    "run folder": st.tuples(
        st.sampled_from(["evaluate", "predict", "calibrate", "robustness", "probe", "show", "report", "shift",
        "replay"]),
        walks.damage(),
    ), "environment": walks.environments(), "endless": walks.command_lines(endless=True),
    "recipe": inputs.recipes, "raw recipe": inputs.raw_recipes, "card": inputs.card_files, "setting": inputs.settings,
    "data": inputs.data_files, "text": inputs.texts, "model": inputs.model_settings,
}  # fmt: skip


def fuzz(kind: str, cases: int, seed: int, folder: Path, done: Callable[[], None] = lambda: None) -> Counter[str]:
    """So many cases of a kind; how many were accepted and refused. The first fault is shrunk and raised."""
    one = Fuzz(folder, done)
    try_it = getattr(one, kind.replace(" ", "_"))
    if kind in (*WHOLE, *STAGED):
        one.stage()
    faults: list[str] = []
    chosen = hypothesis.settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink], print_blob=False,
    )  # fmt: skip

    @hypothesis.seed(seed)
    @chosen
    @hypothesis.given(STRATEGIES[kind])
    def test(case: Any) -> None:
        if kind not in WHOLE:
            return try_it(case)
        try:
            try_it(case)
        except AssertionError as fault:
            faults.append(f"{case!r}: {fault}")

    test()
    assert not faults, "\n\n".join(faults)
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
            cases = max(1, int(chosen.cases * share // 100))
            bar = progress.add_task(kind, total=cases)
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder) / "here"
                place.mkdir()
                seen[kind] = fuzz(kind, cases, chosen.seed, place, lambda bar=bar: progress.advance(bar))
            out.print(f"{kind}: {json.dumps(seen[kind])}")
    total = sum(seen.values(), Counter[str]())
    spent = time.perf_counter() - begin
    out.print(f"{total.total()} cases in {spent:.0f} s: {dict(total)}; no traceback, no file written, no hang")
    return 0
