"""Kill every command that writes at each of its file operations, and run the same command again.

    python -m tests.nightly.kills               # all commands; prints a line for each, and the sum
    python -m tests.nightly.kills soup export   # some of them
    python -m tests.nightly.kills --most 3      # at most three operations of every command

A process that has imported everything makes a fork of itself for every command. An audit hook of Python counts what the
command opens to write, makes, renames, deletes and syncs below its working folder, and sends SIGKILL to the process at
operation k: before it, and where a file is opened also when it is there and empty. The command is then run again. In
the end every file must be there that an undisturbed command leaves, with the same bytes where two undisturbed commands
have the same, nothing else, and every file of the user (`notes.txt`, in all folders) as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from seqreg.cli import main as cli
from seqreg.cli import quickstart
from seqreg.studies.compare import jobs
from tests.helpers import tiny_tasks

NOTES = "notes.txt"
RUN = [*tiny_tasks.SHORT, "task=colour.yaml", "data.path=colour", "model.name=./bert", "evaluation.drift_examples=0"]
SAVES = ["checkpoints.save_steps=2", "optimisation.ema_decay=0.9"]


@dataclass(frozen=True)
class Case:
    """A command, and those that are run before it and not killed."""

    name: str
    words: Sequence[str]
    before: Sequence[Sequence[str]] = ()


def _train(output: str, *further: str) -> list[str]:
    return ["train", "glue", *RUN, *SAVES, *further, f"output={output}"]


COMPARE = ["compare", "glue", *RUN, "-t", "r3f", "--seeds", "2", "--output", "compare"]
ONE, TWO = _train("one", "seed=1"), _train("two", "seed=2")
SOUP = ["soup", "one", "two", "-o", "mean"]
CASES = [
    Case("quickstart", ["quickstart", "r3f", "--output", "toy"]),
    Case("report", ["report", "compare"], [COMPARE]),
    Case("report --markdown", ["report", "compare", "--markdown", "--output", "pages/page.md"], [COMPARE]),
    Case("train", _train("new")),
    Case("train --overwrite", [*_train("one", "seed=3"), "--overwrite"], [ONE]),
    Case("evaluate", ["evaluate", "one", "generation.num_beams=1"], [ONE]),
    Case("evaluate --output", ["evaluate", "one", "--output", "scores"], [ONE]),
    Case("predict", ["predict", "one", "lines.txt", "-o", "said/lines.out"], [ONE]),
    Case("soup", [*SOUP, "--evaluate"], [ONE, TWO]),
    Case("soup, one that is there scored too", [*SOUP, "--evaluate"], [ONE, TWO, SOUP]),
    Case("soup --overwrite", [*SOUP, "--evaluate", "--overwrite"], [ONE, TWO, SOUP]),
    Case("export", ["export", "one", "-o", "model"], [ONE]),
    Case("export to an empty folder", ["export", "one", "-o", "bare"], [ONE]),
    Case("compare", COMPARE),
    Case("compare, runs that go", [*COMPARE, "--keep-models", "none"], [[*COMPARE, "--keep-models", "all"]]),
    Case("chain", ["chain", "plan.yaml", "--output", "links", "--seeds", "1", "--examples", "40"]),
    Case("calibrate", ["calibrate", "one", "--limit", "40"], [ONE]),
    Case("robustness", ["robustness", "one", "--noise", "embeddings", "--scales", "0.1", "--limit", "20"], [ONE]),
    Case("probe", ["probe", "one", "--examples", "40"], [ONE]),
    Case("shift", ["shift", "one", "--to", "colour.yaml", "data.path=colour", "--share", "0"], [ONE]),
    Case("new-task", ["new-task", "colour/train.jsonl", "--output", "cards.yaml"]),
]


def workspace(folder: Path) -> Path:
    """Data, a model and plans for all commands, with names that are relative to the folder."""
    for name in ("colour", "size"):
        tiny_tasks.task(folder, name, train=32, test=16)
    tiny_tasks.bert(folder / "bert")
    steps = [
        {"recipe": "glue", "name": name, "settings": [f"task={name}.yaml", f"data.path={name}", *tiny_tasks.SHORT]}
        for name in ("colour", "size")
    ]
    (folder / "plan.yaml").write_text(json.dumps({"settings": ["model.name=./bert"], "steps": steps}))
    (folder / "lines.txt").write_text("the red one\nthe blue one\n")
    (folder / "bare").mkdir()
    recipe = {
        "task": "synthetic_news", "model": {"architecture": "bart", "vocab_size": 320, "settings": BART},
        "data": {"limit": {"train": 24, "validation": 4, "test": 4}}, "generation": {"max_length": 8, "num_beams": 1},
        "optimisation": {"max_steps": 2, "warmup_steps": 0, "per_device_train_batch_size": 4},
        "evaluation": {"resamples": 10, "drift_examples": 0, "per_device_eval_batch_size": 4},
        "logging": {"tensorboard": False, "diagnostics_steps": 0},
        "variants": {"people": {"task": "synthetic_news_people"}},
    }  # fmt: skip
    (folder / "quickstart.yaml").write_text(json.dumps(recipe))
    (folder / NOTES).write_text("mine")
    return folder


BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip


@dataclass
class Hook:
    """What an audit hook counts in this process, and where it strikes.

    Args:
        root: operations below this folder count
        strike: the number of the operation to be killed at, from 0; none by default
        torn: at a file that is opened to be written: when it is there
    """

    root: str
    strike: int = -1
    torn: bool = False
    seen: list[str] = field(default_factory=list)
    process: int = 0
    busy: bool = False

    def install(self) -> None:
        self.process = os.getpid()
        sys.addaudithook(self)
        sync = os.fsync
        os.fsync = lambda handle: (self.at("fsync", f"/proc/self/fd/{handle}", ""), sync(handle))[1]  # type: ignore

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if self.busy or os.getpid() != self.process:
            return
        if event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.at(event, given[0], given[2])
        elif event in ("os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.chmod", "os.symlink", "os.link"):
            self.at(event, given[0], given[-1])
        elif event == "os.rename":
            self.at(event, given[1], given[-1])

    def at(self, event: str, path: Any, more: Any) -> None:
        """Count an operation, and end the process if this is the one."""
        if isinstance(path, int):
            return
        self.busy = True
        place, name = os.getcwd(), os.fsdecode(path)
        if event in ("os.rmdir", "os.remove") and isinstance(more, int) and more >= 0:
            place = os.readlink(f"/proc/self/fd/{more}")
        full = os.path.realpath(name) if event == "fsync" else os.path.normpath(os.path.join(place, name))
        if full.startswith(f"{self.root}/") or full == self.root:
            if len(self.seen) == self.strike:
                if self.torn and event == "open":
                    os.close(os.open(full, more, 0o666))
                os.kill(self.process, signal.SIGKILL)
            self.seen.append(f"{event} {os.path.relpath(full, self.root)}")
        self.busy = False


class Fork:
    """A command in a fork of this process; what it prints goes to a file."""

    def __init__(
        self, words: Sequence[str], log: Path, begin: Callable[[], Callable[[], None]] = lambda: lambda: None
    ) -> None:
        self.code: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _child(words, log, begin)

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


def _child(words: Sequence[str], log: Path, begin: Callable[[], Callable[[], None]]) -> None:
    """The command; `begin` is called before it, and what that returns after it."""
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.truncate(log, 0)
        os.dup2(handle, 1), os.dup2(handle, 2)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the process that has forked it
        sys.argv, end = ["seqreg", *words], begin()
        try:
            cli.main()
        finally:
            end()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


@dataclass
class Tally:
    """What became of the commands that were killed."""

    kills: int = 0
    stuck: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills: {len(self.stuck)} stuck, {len(self.lost)} lost, "
            f"{len(self.foreign)} foreign files touched"
        )

    def add(self, other: Tally) -> None:
        self.kills += other.kills
        self.stuck += other.stuck
        self.lost += other.lost
        self.foreign += other.foreign


@dataclass
class Harness:
    """Workspaces, and commands in them."""

    scratch: Path
    imported: set[str] = field(default_factory=set)
    made: dict[str, Path] = field(default_factory=dict)

    def command(self, words: Sequence[str], place: Path, hook: Hook | None = None) -> int:
        """Run a command in a workspace; its exit code. What it imports and does is written down at its end."""

        def begin() -> Callable[[], None]:
            os.chdir(place)
            jobs.ForkedCommand = Fork  # type: ignore[assignment, misc]
            quickstart.RECIPE = "quickstart.yaml"
            if hook is not None:
                hook.install()
            return end

        def end() -> None:
            seen = [] if hook is None else hook.seen
            (self.scratch / "done").write_text(json.dumps({"modules": list(sys.modules), "seen": seen}))

        return Fork(words, self.log, begin).wait()

    @property
    def log(self) -> Path:
        return self.scratch / "log.txt"

    def warm(self) -> None:
        """Import what the last command has imported, so that no further one does."""
        for name in json.loads((self.scratch / "done").read_text())["modules"]:
            if name not in sys.modules and name.split(".")[0] not in ("tests", "__main__"):
                with contextlib.suppress(Exception):  # some are made by others as they are imported
                    importlib.import_module(name)

    def ready(self, before: Sequence[Sequence[str]]) -> Path:
        """A workspace in which some commands have been run; made once."""
        key = json.dumps(before)
        if key not in self.made:
            earlier = self.ready(before[:-1]) if before else None
            place = self.scratch / f"ready-{len(self.made)}"
            if earlier is not None:
                shutil.copytree(earlier, place)
                code = self.command(before[-1], place)
                assert code == 0, self.log.read_text()[-3000:]
                self.warm()
            else:
                place.mkdir()
                pid = os.fork()
                if pid == 0:
                    workspace(place)
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            self.made[key] = place
        return self.made[key]

    @contextlib.contextmanager
    def copied(self, case: Case) -> Iterator[Path]:
        """A copy of the workspace of a case, with notes of the user in its folders."""
        place = self.scratch / "place" / "work"
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(self.ready(case.before), place)
        (place.parent / NOTES).write_text("mine")
        for folder in [path for path in place.rglob("*") if path.is_dir() and path.name != "bare"]:
            if not folder.name.startswith(("checkpoint-", "tensorboard")):
                (folder / NOTES).write_text("mine")
        yield place

    def run(self, case: Case, most: int, tell: Callable[[str], None]) -> Tally:
        """Kill a case at its operations, at most so many, evenly spaced."""
        tally, ends = Tally(), list[dict[str, bytes]]()
        for _ in range(2):
            with self.copied(case) as place:
                hook = Hook(str(place))
                code = self.command(case.words, place, hook)
                if code != 0:
                    tell(f"{case.name}: exit code {code}, undisturbed: {self.log.read_text()[-3000:]}")
                    return Tally(stuck=[case.name])
                self.warm()
                seen = json.loads((self.scratch / "done").read_text())["seen"]
                ends.append(tree(place))
        points = [(number, torn) for number, what in enumerate(seen) for torn in (False, True)[: 1 + ("open " in what)]]
        for place in range(min(most or len(points), len(points))):
            number, torn = points[len(points) * place // min(most or len(points), len(points))]
            self.strike(case, ends, number, torn, f"{case.name}: {seen[number]}{' (empty)' * torn}", tally, tell)
        return tally

    def strike(
        self, case: Case, ends: Sequence[dict[str, bytes]], number: int, torn: bool, title: str, tally: Tally,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Kill a case at one operation, run it again, and count what became of it."""
        with self.copied(case) as place:
            mine = notes(place.parent)
            if self.command(case.words, place, Hook(str(place), number, torn)) != -signal.SIGKILL:
                tell(f"{title}: ended before it")
                return
            tally.kills += 1
            code = self.command(case.words, place)
            if code:
                tally.stuck.append(title)
                tell(f"{title}: exit code {code}: {self.log.read_text()[-600:]}")
            elif problems := difference(ends, tree(place)):
                tally.lost.append(title)
                tell(f"{title}: {problems}")
            if notes(place.parent) != mine:
                tally.foreign.append(title)
                tell(f"{title}: files of the user have changed")


def notes(folder: Path) -> dict[str, bytes]:
    """The files of the user."""
    return {name: text for name, text in tree(folder).items() if name.endswith(NOTES)}


def tree(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below a folder; folders have none."""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): b"" if path.is_dir() else path.read_bytes() for path in paths}


def difference(ends: Sequence[dict[str, bytes]], now: dict[str, bytes]) -> str:
    """How a folder differs from what two undisturbed commands left, apart from what differs between these two.

    Figures must be complete: the last digit of a place in them may be another.
    """
    one, two = ends
    always = one.keys() & two.keys()
    missing, more = sorted(always - now.keys()), sorted(now.keys() - (one.keys() | two.keys()))
    always = {name for name in always if not name.endswith((".log", ".code"))}  # of runs that outlive a comparison
    other = [name for name in always & now.keys() if one[name] == two[name] != now[name]]
    other = [name for name in other if not name.endswith((".svg", ".png")) or one[name][-8:] != now[name][-8:]]
    parts = {"missing": missing, "left": more, "other bytes": sorted(other)}
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts.items() if names)


def run(names: Sequence[str], most: int, tell: Callable[[str], None] = print) -> Tally:
    """Kill the commands of these names, or all; what each came to is told."""
    total = Tally()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        harness = Harness(Path(os.path.realpath(scratch)))
        for case in CASES:
            if not names or case.name.split()[0].rstrip(",") in names or case.name in names:
                tally = harness.run(case, most, tell)
                tell(f"{case.name}: {tally}")
                total.add(tally)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="commands; all by default")
    parser.add_argument("--most", type=int, default=0, help="operations of every command; 0 for all")
    chosen = parser.parse_args()
    total = run(chosen.names, chosen.most)
    print(total)
    sys.exit(bool(total.stuck or total.lost or total.foreign))


if __name__ == "__main__":
    main()
