"""The small numbers behind a study in one compressed JSON file: enough to judge and to draw it again, and no text."""

from __future__ import annotations

import json
import lzma
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from research.study import STUDY, StudyRun
from research.study_file import Study, StudyStep, parse
from seqreg.errors import BadInput
from seqreg.version import __version__
from seqreg.workbench.text import readers
from seqreg.workbench.text.atomic_files import finite, inside, write_text

FORMAT = 1
ENDING = ".json.xz"
CLASSES = 36
"""Different texts in a column of predictions up to which they are names of classes; above, a number stands for each."""
_FILES = ("comparison", "run", "metrics", "compare", "chain", "probe", "shift", "calibrate", "robustness")
_LEFT_OUT = {"run.json": ("files", "outline"), "compare.json": ("tables",)}
"""Keys of files that are large, and are not needed to judge or to draw."""
_LARGEST = 64 * 2**20
"""Bytes of an archive once it is unpacked."""
_LIBRARIES = ("torch", "transformers", "numpy", "scipy", "scikit-learn")


@dataclass(frozen=True)
class ArchivedStep:
    """What is kept of one step.

    Args:
        files: JSON files by their paths below the folder of the step
        predictions: of every run, by its folder: columns of places in `values`
        values: the different values of every column, over all runs
        codes: exit codes of runs that are not finished, with the last lines of their logs
    """

    files: dict[str, Any] = field(default_factory=dict)
    predictions: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    values: dict[str, list[Any]] = field(default_factory=dict)
    codes: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Archive:
    """A study and its numbers.

    Args:
        name, size, seeds, settings: how the study was run; `seeds` is None where they are those of the size
        study: the study's file, as it was
        commits: of the code that ran it, as far as is known
        versions: of the libraries
    """

    name: str
    size: str
    study: dict[str, Any]
    steps: dict[str, ArchivedStep]
    seeds: list[int] | None = None
    settings: list[str] = field(default_factory=list)
    commits: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def parsed(self) -> Study:
        return parse(self.study, f"the archive of {self.name}")

    def cpu_hours(self) -> float:
        """CPU time of the training steps of all runs; evaluation comes on top."""
        seconds = [
            (metrics.get("train", {}).get("cpu_seconds") or 0.0)
            for step in self.steps.values()
            for path, metrics in step.files.items()
            if path.endswith("metrics.json")
        ]
        return sum(seconds) / 3600

    def done(self) -> list[str]:
        """The steps of which something is kept."""
        return [name for name, step in self.steps.items() if step.files]

    def after(self, earlier: Archive) -> Archive:
        """With the steps of an earlier archive that this one has nothing of: they were run in another folder."""
        steps = {
            name: earlier.steps.get(name, step) if name not in self.done() else step
            for name, step in self.steps.items()
        }
        return replace(self, steps=steps, commits=list(dict.fromkeys([*earlier.commits, *self.commits])))

    def write(self, path: Path) -> None:
        """Write it compressed; the same content gives the same bytes."""
        text = json.dumps(finite(asdict(self)), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
        part.replace(path)


def read(path: Path) -> Archive:
    """An archive, or one line about what is wrong with it."""
    try:
        with lzma.open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise BadInput(f"{path}: more than {_LARGEST} bytes once unpacked: not an archive of seqreg")
        stored = json.loads(content)
        if stored.get("format") != FORMAT:
            raise BadInput(f"{path}: format {stored.get('format')!r}: this seqreg reads {FORMAT}")
        steps = {name: ArchivedStep(**step) for name, step in stored["steps"].items()}
        return Archive(**{**stored, "steps": steps})
    except (OSError, EOFError, lzma.LZMAError, ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{path}: not an archive of seqreg ({error})") from None


def pack(study_run: StudyRun) -> Archive:
    """Everything that is needed of a study's folder; paths of this machine become placeholders."""
    steps = {step.name: without_texts(_packed(study_run, step)) for step in study_run.steps()}
    if not any(step.files for step in steps.values()):
        raise BadInput(f"{study_run.output}: nothing of {study_run.name} is there yet: run the study first")
    record = study_run.output / STUDY
    known = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    versions = {"seqreg": __version__, "python": platform.python_version()}
    versions |= {name: metadata.version(name) for name in _LIBRARIES}
    return Archive(
        study_run.name, study_run.size, study_run.study.model_dump(mode="json", exclude_defaults=True), steps,
        study_run.seeds, list(study_run.settings), [name for name in known.get("commits", []) if name],
        versions,
    )  # fmt: skip


def _packed(study_run: StudyRun, step: StudyStep) -> ArchivedStep:
    folder, packed = study_run.output / step.name, ArchivedStep()
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).as_posix()
        if path.stem in _FILES and not path.is_symlink() and "/." not in f"/{name}":
            values = with_placeholders(json.loads(path.read_text(encoding="utf-8")), study_run.places)
            left_out = _LEFT_OUT.get(path.name, ("tables",) if "kind" in values else ())
            packed.files[name] = {key: value for key, value in values.items() if key not in left_out}
    if step.command != "compare":
        return packed
    for path in sorted(folder.glob("*/*/predictions.jsonl")):
        _pack_predictions(packed, path.parent.relative_to(folder).as_posix(), path)
    for path in sorted(folder.glob("*/*.code")):
        code = path.read_text(encoding="utf-8").strip()
        if code != "0":
            log = path.with_suffix(".log")
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:] if log.is_file() else []
            packed.codes[path.relative_to(folder).with_suffix("").as_posix()] = (
                code, with_placeholders("\n".join(lines), study_run.places),
            )  # fmt: skip
    return packed


def with_placeholders(value: Any, places: Mapping[str, Path | None]) -> Any:
    """A JSON value whose texts and keys have placeholders for the folders of this machine.

    >>> with_placeholders({"data": ["data.path=data/glue", "/a/data/x"]}, {"data": Path("data")})
    {'data': ['data.path={data}/glue', '/a/data/x']}
    """
    if isinstance(value, dict):
        return {with_placeholders(key, places): with_placeholders(inner, places) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_placeholders(inner, places) for inner in value]
    if not isinstance(value, str):
        return value
    for name, path in places.items():
        for spelling in sorted({str(path), str(path.absolute()), str(path.resolve())}, key=len) if path else ():
            value = re.sub(rf"(?<![\w./~-]){re.escape(spelling)}(?=/)", f"{{{name}}}", value)
    return value


def _pack_predictions(packed: ArchivedStep, run: str, path: Path) -> None:
    """The columns of a file of predictions: numbers and names of classes, no probabilities; equal texts stay equal."""
    columns: dict[str, list[Any]] = {}
    for _, line in readers.read(path):
        for key, value in line.items():
            if key != "index" and (value is None or isinstance(value, (str, int, float, bool))):
                columns.setdefault(key, []).append(value)
    shared = {"prediction": "answer", "reference": "answer"}
    for key, column in columns.items():
        values = packed.values.setdefault(shared.get(key, key), [])
        places = {_key(value): place for place, value in enumerate(values)}
        for value in column:
            if _key(value) not in places:
                places[_key(value)] = len(values)
                values.append(value)
        packed.predictions.setdefault(run, {})[key] = [places[_key(value)] for value in column]


def _key(value: Any) -> tuple[str, Any]:
    """1, 1.0 and true are three values."""
    return type(value).__name__, value


def without_texts(packed: ArchivedStep) -> ArchivedStep:
    """The same with a number for every text, where there are more of them than classes."""
    values = {
        key: [f"text {place}" if isinstance(value, str) else value for place, value in enumerate(column)]
        if sum(isinstance(value, str) for value in column) > CLASSES else column
        for key, column in packed.values.items()
    }  # fmt: skip
    return ArchivedStep(packed.files, packed.predictions, values, packed.codes)


def restore(step: ArchivedStep, folder: Path) -> None:
    """Write the files of a step as its commands left them, so that it can be judged again."""
    for name, values in step.files.items():
        _write(folder, name, json.dumps(values))
    for run, columns in step.predictions.items():
        texts = {key: step.values["answer" if key in ("prediction", "reference") else key] for key in columns}
        lines = (
            {"index": place, **{key: texts[key][one] for key, one in zip(columns, row, strict=True)}}
            for place, row in enumerate(zip(*columns.values(), strict=True))
        )
        _write(folder, f"{run}/predictions.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    for run, (code, log) in step.codes.items():
        _write(folder, f"{run}.code", f"{code}\n")
        _write(folder, f"{run}.log", f"{log}\n")


def _write(folder: Path, name: str, text: str) -> None:
    path = inside(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def answers(step: ArchivedStep, method: str) -> dict[int, list[int]]:
    """The predictions of a method by seed, as numbers: equal ones have the same."""
    runs = {run.split("/")[1]: run for run in step.predictions if run.startswith(f"{method}/seed-")}
    return {int(seed.removeprefix("seed-")): step.predictions[run]["prediction"] for seed, run in sorted(runs.items())}


def archives(folder: Path) -> list[Path]:
    """All archives of a folder, by name."""
    return sorted(folder.glob(f"*{ENDING}"))
