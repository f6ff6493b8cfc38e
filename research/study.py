"""The commands of a study one after the other, each a process; the same command resumes it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from research.study_file import Study, StudyStep, check_words, filled, method_names, size_of
from seqreg.errors import BadInput, Interrupted, Stopped
from seqreg.studies.common.processes import end_with_parent
from seqreg.studies.common.seeds import write_seeds
from seqreg.workbench.config import overlay
from seqreg.workbench.config.overlay import assigned
from seqreg.workbench.scores.results import METRICS
from seqreg.workbench.text.atomic_files import inside, writable, write_text
from seqreg.workbench.text.terminal import say

WORDS = "command.json"
"""Beside the finding of a measurement: the words of the command that made it."""
STUDY = "study.json"
"""In the folder of a study: what is run there."""


@dataclass(frozen=True)
class StudyCommand:
    """One process of a study.

    Args:
        step: that it belongs to
        words: after `seqreg`
        runs: how many models it trains
        folder: where its finding will be, if it only measures; None for one that knows itself what is finished
        models: folders of runs among its words; those without a model, because the run failed, are left out
    """

    step: StudyStep
    words: list[str]
    runs: int = 0
    folder: Path | None = None
    models: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        return shlex.join(["seqreg", *self.words])


@dataclass(frozen=True)
class StudyRun:
    """A study, and how it is run here.

    Args:
        name: of the study
        size: one of its sizes
        places: the folders that stand for {models}, {data} and {output}
        seeds: instead of those of the size
        settings: `key=value` for all runs, after all others
        extend: allow primary comparisons, seeds or methods to be added to what is there
    """

    name: str
    study: Study
    size: str
    places: dict[str, Path | None]
    seeds: list[int] | None = None
    settings: tuple[str, ...] = ()
    extend: bool = False

    @property
    def output(self) -> Path:
        output = self.places["output"]
        assert output is not None
        return output

    def steps(self) -> list[StudyStep]:
        """The steps that are run in this size."""
        return [step for step in self.study.steps if self.study.left_out(step, self.size) is None]

    def seeds_of(self, step: StudyStep) -> list[int]:
        planned = self.study.seeds(step, self.size)
        return planned if self.seeds is None else self.seeds[: len(planned)] if step.of is not None else self.seeds

    def settings_of(self, step: StudyStep) -> list[str]:
        """Those of the step, the size, the step in the size, and the command line: the last one wins."""
        own = step.sizes[self.size].settings if self.size in step.sizes else []
        general = self.study.sizes[self.size].settings if step.of is None else []
        given = self.settings if step.of is None or step.command == "shift" else ()
        return [filled(word, self.places) for word in (*step.settings, *general, *own, *given)]

    def variants_of(self, step: StudyStep) -> list[str]:
        own = step.sizes[self.size].variants if self.size in step.sizes else []
        return [*step.variants, *self.study.sizes[self.size].variants, *own]

    def options_of(self, step: StudyStep) -> list[str]:
        own = step.sizes[self.size].options if self.size in step.sizes else []
        return [filled(word, self.places) for word in (*step.options, *own)]

    def commands(self) -> list[StudyCommand]:
        """All processes, in their order."""
        return [command for step in self.steps() for command in self._commands(step)]

    def _commands(self, step: StudyStep) -> Iterable[StudyCommand]:
        if step.command == "train":
            return [self._train(step)]
        if step.command == "compare":
            return [self._compare(step)]
        if step.command == "chain":
            return [self._chain(step)]
        return self._measure(step)

    def _train(self, step: StudyStep) -> StudyCommand:
        words = ["train", str(step.recipe), *_each("-v", self.variants_of(step)), *_each("-t", step.methods)]
        return StudyCommand(step, [*words, *self.settings_of(step), assigned("output", self.output / step.name)], 1)

    def _compare(self, step: StudyStep) -> StudyCommand:
        seeds, methods, study = self.seeds_of(step), self.study.methods(step), self.study
        words = ["compare", str(step.recipe), *_each("-v", self.variants_of(step)), *_each("-t", methods)]
        words += [*self.settings_of(step), "--seeds", write_seeds(seeds), "--keep-models", step.keep_models]
        words += ["--baseline", step.baseline] if step.baseline != "baseline" else []
        primary = study.primary_of(step)
        words += ["--primary", ",".join(primary)] if primary else []
        words += [*_each("--arm", step.arms), *(["--search", str(step.search)] if step.search else [])]
        words += _each("--grid", step.grid)
        words += [*(["--extend"] if self.extend else []), *self.options_of(step), "-o", str(self.output / step.name)]
        return StudyCommand(step, words, (len(methods) + 1) * (len(seeds) + step.search))

    def _chain(self, step: StudyStep) -> StudyCommand:
        methods, plan = self.study.methods(step), self.output / f"{step.name}.yaml"
        seeds = self.seeds_of(step)
        words = ["chain", str(plan), *_each("-t", methods), "--cycles", str(step.cycles), "--seeds", write_seeds(seeds)]
        words += [*self.options_of(step), "--output", str(self.output / step.name)]
        return StudyCommand(step, words, (len(methods) + 1) * len(seeds) * len(step.chain) * step.cycles)

    def _measure(self, step: StudyStep) -> Iterable[StudyCommand]:
        """One process per seed with the models of all methods; of `calibrate`, one per model."""
        assert step.of is not None
        methods, root = method_names(self.study, step), self.output / step.of
        words = [*self.settings_of(step), *self.options_of(step)]
        words += ["--tasks", str(self.output / f"{step.name}.yaml")] if step.tasks else []
        words += ["--to", filled(step.to, self.places)] if step.to else []
        words += _each("--share", [f"{share:g}" for share in step.shares]) if step.command == "shift" else []
        for seed in self.seeds_of(step):
            groups = [[name] for name in methods] if step.command == "calibrate" else [methods]
            for group in groups:
                folder = self.output / step.name / (group[0] if step.command == "calibrate" else "") / f"seed-{seed}"
                runs = [str(root / name / f"seed-{seed}") for name in group]
                trained = len(group) * sum(share > 0 for share in step.shares) if step.command == "shift" else 0
                line = [step.command, *runs, *words, "--output", str(folder)]
                yield StudyCommand(step, line, trained, folder, runs)

    def write_files(self) -> None:
        """Write the files that the steps read: lines of others, plans of chains, tasks to probe."""
        for file in self.study.files:
            sources = [filled(source, self.places) for source in file.sources]
            lines = _lines(sources[0], (0, 1)) if file.header else []
            lines += [line for source in sources for line in _lines(source, file.lines)]
            if file.replace is not None:
                pattern, by = file.replace
                lines = [re.sub(pattern, by, line, count=1) for line in lines]
            write(inside(self.output / "data", file.to), "".join(lines))
        for step in self.steps():
            if step.command == "chain":
                plan = {
                    "settings": self.settings_of(step),
                    "steps": [
                        {**part.model_dump(exclude_none=True), "variants": [*part.variants, *self.variants_of(step)],
                         "settings": [filled(word, self.places) for word in part.settings]}
                        for part in step.chain
                    ],
                }  # fmt: skip
                write(self.output / f"{step.name}.yaml", overlay.dump(plan))
            elif step.tasks:
                tasks = json.loads(json.dumps(step.tasks), object_hook=self._filled)
                write(self.output / f"{step.name}.yaml", overlay.dump({"tasks": tasks}))

    def _filled(self, values: dict[str, object]) -> dict[str, object]:
        return {key: filled(value, self.places) if isinstance(value, str) else value for key, value in values.items()}

    def minutes(self, step: StudyStep, given: float | None = None) -> float | None:
        """Minutes of one run on one core: those given, else those that the file says were measured."""
        own = step.sizes[self.size].minutes if self.size in step.sizes else None
        return given if given is not None else own if own is not None else self.study.sizes[self.size].minutes


def _each(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _lines(path: str, part: Sequence[int] | None) -> list[str]:
    try:
        lines = Path(path).read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from None
    lines = lines[:-1] if lines[-1] == "" else lines
    first, last = part or (0, len(lines))
    if last > len(lines) or first >= last:
        raise BadInput(f"{path}: lines {first} to {last} are asked for, and it has {len(lines)}")
    return [f"{line}\n" for line in lines[first:last]]


def write(path: Path, text: str) -> None:
    """Write a file unless it is there as it should be."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)


def make(
    name: str, study: Study, *, models: Path | None, data: Path | None, output: Path, size: str | None = None,
    seeds: list[int] | None = None, settings: Sequence[str] = (), extend: bool = False,
) -> StudyRun:  # fmt: skip
    """A study as it is run here; all that can be wrong with it is found in the first command."""
    check_words(settings)
    for option, folder in (("models", models), ("data", data)):
        if folder is not None and not folder.is_dir():
            raise BadInput(f"--{option} {folder}: no such folder")
    places = {"models": models and models.absolute(), "data": data and data.absolute(), "output": output}
    return StudyRun(name, study, size_of(study, name, size), places, seeds, tuple(settings), extend)


def run(study_run: StudyRun, only: Sequence[str] = ()) -> None:
    """Run all commands that are not finished; a command that fails ends it with its exit code."""
    writable(study_run.output, "--output ")
    commands = [command for command in study_run.commands() if not only or command.step.name in only]
    study_run.write_files()
    _write_record(study_run, sum(command.runs for command in commands))
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        for place, command in enumerate(commands, start=1):
            _run_one(command, f"{study_run.name}: {place} of {len(commands)}, {command.step.name}")
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, "stopped; the same command resumes it") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _write_record(study_run: StudyRun, planned: int) -> None:
    """Remember how the study is run, and the commit that runs it if there are runs left to train."""
    path = study_run.output / STUDY
    commits = list(json.loads(path.read_text(encoding="utf-8"))["commits"]) if path.is_file() else []
    trained = sum(1 for _ in study_run.output.rglob(METRICS))
    record = {
        "name": study_run.name, "size": study_run.size, "seeds": study_run.seeds,
        "settings": list(study_run.settings),
        "commits": list(dict.fromkeys([*commits, *([commit()] if trained < planned else [])])),
    }  # fmt: skip
    write(path, json.dumps(record, indent=1) + "\n")


def _run_one(command: StudyCommand, title: str) -> None:
    words, models = command.words, command.models
    if models:
        there = [folder for folder in models if (Path(folder) / "config.json").is_file()]
        if missing := [folder for folder in models if folder not in there]:
            say(f"{title}: no model in {', '.join(missing)}: left out")
        if not there:
            return
        words = [word for word in words if word not in missing]
    if command.folder is not None and _finished(command.folder, command.step.command, words):
        say(f"{title}: finished", "dim")
        return
    say(f"{title}: {shlex.join(['seqreg', *words])}", "bold")
    code = execute(words)
    if code:
        raise StepFailed(code, title)
    if command.folder is not None:
        write(command.folder / WORDS, json.dumps(words) + "\n")


def execute(words: Sequence[str]) -> int:
    """Run one command of seqreg in a process that ends with this one; its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "seqreg", *words], stdin=subprocess.DEVNULL, preexec_fn=end_with_parent(),
        stdout=2,  # results are for the page
    )  # fmt: skip
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


class StepFailed(Stopped):
    """A command of a study has failed, and said why."""

    def __init__(self, code: int, title: str) -> None:
        super().__init__(f"{title}: ended with exit code {code}; the same command resumes the study")
        self.code = code if code > 0 else 1


def _finished(folder: Path, kind: str, words: list[str]) -> bool:
    """Whether a measurement is there, made by the same words."""
    path = folder / WORDS
    if not (folder / f"{kind}.json").is_file() or not path.is_file():
        return False
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")) == words)
    except ValueError:
        return False


def _stop(number: int, _: object) -> None:
    raise Interrupted(number, "stopped; the same command resumes it")


def commit() -> str:
    """The commit of the checkout that runs; "" if it is none, "+" at its end where files were changed."""
    root = Path(__file__).parents[3]
    try:
        name = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{name}+" if changed else name
