"""What run an output folder belongs to: one process at a time, and never two runs in one."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import socket
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import broadcast_object_list

from seqreg.errors import BadInput, NoRoom, nearest
from seqreg.version import __version__
from seqreg.workbench.config import overlay
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.run import checkpoints, disk
from seqreg.workbench.run.launch import processes
from seqreg.workbench.scores.results import METRICS
from seqreg.workbench.text import stored_json
from seqreg.workbench.text.atomic_files import ASIDE, REMOVED, open_own, to_json, write_text
from seqreg.workbench.text.terminal import say, warn

RECORD, LOCK = "run.json", ".lock"
_BEGINNING = {LOCK, "config.yaml", "task.yaml", f"{ASIDE}{RECORD}", f"{ASIDE}config.yaml", f"{ASIDE}task.yaml"}
ROWS, WORLD = "data.rows", "world_size"
_BLOCKS = 256
"""Of a split, each with a hash of its own."""
_SAMPLE = 1000
"""Rows of a dataset on disk that its fingerprint is taken from."""


@dataclass(frozen=True)
class RunRecord:
    """What run.json says.

    Args:
        run: a name that no other run has
        settings: of the recipe and the card, the fingerprint of the data and the number of processes, by dotted key
        versions: of the libraries when it was begun
        finished: whether the model and its scores are written
        before: scores of the untrained model, if they were asked for
        files: of the model when it was finished: size and SHA-256 of each
        outline: of every split of the data, to tell what has changed
    """

    run: str
    settings: dict[str, Any]
    versions: dict[str, str]
    finished: bool = False
    before: stored_json.Before = field(default_factory=stored_json.Before)
    files: dict[str, Any] = field(default_factory=dict)
    outline: dict[str, stored_json.Outline] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> RunRecord:
        return cls(uuid.uuid4().hex, settings_of(run), versions())

    @classmethod
    def read(cls, folder: Path) -> RunRecord | None:
        """The record of a folder; None if it has none."""
        path = folder / RECORD
        if not path.is_file():
            return None
        return stored_json.read(cls, path, "--overwrite the run, or choose another output")

    def write(self, folder: Path) -> None:
        write_text(folder / RECORD, to_json(asdict(self), indent=1) + "\n")

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest of a checkpoint."""
        settings = {key: value for key, value in self.settings.items() if key not in (ROWS, WORLD)}
        return {
            "run": self.run, "configuration": _hash(settings), "data": self.settings.get(ROWS),
            WORLD: self.settings.get(WORLD), "versions": versions(),
        }  # fmt: skip


def versions() -> dict[str, str]:
    return {
        "seqreg": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def settings_of(run: Run) -> dict[str, Any]:
    """All settings of a run by dotted key, but for the names of its folder and of its card."""
    config = run.config.model_dump(mode="json", exclude={"output", "task"})
    card = run.card.model_dump(mode="json", exclude_defaults=True)
    return {**_flat(config), **_flat(card, "task."), WORLD: processes()[1]}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def fingerprint(splits: Splits) -> tuple[str, dict[str, stored_json.Outline]]:
    """SHA-256 of all examples of all splits, of a sample where they stay on disk, and the outlines of the splits."""
    found, outlines = hashlib.sha256(), dict[str, stored_json.Outline]()
    for name, examples in splits.sets.items():
        count, whole = len(examples), isinstance(examples, list)
        found.update(f"{name} {count}\n".encode())
        size, blocks = -(-count // _BLOCKS), list[str]()
        for index in range(0, count, 1 if whole else max(1, count // _SAMPLE)):
            if whole and index % size == 0:
                blocks.append(_block(examples[index : index + size]))
            found.update(_row(examples[index]))
        outlines[name] = {"count": count, "size": size, "blocks": blocks}
    return found.hexdigest(), outlines


def _row(example: Example) -> bytes:
    return json.dumps(list(vars(example).values())).encode()


def _block(examples: Sequence[Example]) -> str:
    return hashlib.sha256(b"\n".join(map(_row, examples))).hexdigest()[:8]


def difference(old: Mapping[str, stored_json.Outline], splits: Splits) -> str:
    """In what the data differ from those of an outline, as far as it tells; "" if it does not."""
    if not old:  # a run that was begun before there were outlines
        return ""
    told = [f"the split {name} is gone" for name in old if name not in splits.sets]
    for name, examples in splits.sets.items():
        if name not in old:
            told.append(f"the split {name} is new")
            continue
        count, size = old[name]["count"], max(old[name]["size"], 1)
        if count != len(examples):
            told.append(f"{name} had {count} examples and has {len(examples)}")
        for place, known in enumerate(old[name]["blocks"]):
            first, last = place * size, min((place + 1) * size, count)
            if _block([examples[index] for index in range(first, min(last, len(examples)))]) != known:
                where = f"example {last}" if last - first == 1 else f"one of the examples {first + 1} to {last}"
                text = f", now {examples[first].source[:40]!r}" if last - first == 1 and first < len(examples) else ""
                told.append(f"the first difference in {name} is {where}{text}")
                break
    return "; ".join(told)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_output(folder: Path, key: str = "output=") -> None:
    """Refuse a path that cannot become a folder: of a file, too long, or of links that go round in circles."""
    for path in (folder, *folder.parents):
        try:
            found = os.stat(path).st_mode
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            if isinstance(error, NotADirectoryError):
                continue
            shown = str(folder) if len(str(folder)) < 200 else f"{str(folder)[:200]}..."
            raise BadInput(f"{key}{shown}: {getattr(error, 'strerror', None) or error}: choose another") from None
        if not stat.S_ISDIR(found):
            raise BadInput(f"{key}{folder}: {path} is a file and in the way: choose another")


def check_folder(folder: Path, overwrite: bool, resume: bool) -> RunRecord | None:
    """The record of the run in a folder, if there is one; refuses a folder that is something else."""
    check_output(folder)
    check_links(folder)
    if overwrite and resume:
        raise BadInput("--overwrite begins again, and --resume never does: choose one")
    record = None if overwrite else RunRecord.read(folder)
    held = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if record is None and resume:
        raise BadInput(f"output={folder}: there is nothing to resume")
    if record is not None or not held - _BEGINNING:
        return record
    if not _is_run(folder):
        raise BadInput(f"output={folder}: the folder is not empty, and not a run of seqreg: choose another")
    if not overwrite:
        raise BadInput(
            f"output={folder}: there is a run already that cannot be gone on with (it has no {RECORD}): "
            "--overwrite it, or choose another output"
        )
    return None


_FOLDERS = (LOCK, "crash", checkpoints.PREFIX, checkpoints.OLD, ASIDE, "tensorboard", "evidence")
"""How the names begin of what a run writes into, or holds."""


def check_links(folder: Path) -> None:
    """Refuse symbolic links where a run writes: what it empties, replaces or adds would be somebody else's."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() and path.name.startswith(_FOLDERS):
            raise BadInput(f"{path}: a symbolic link: a run writes to its own folder alone: remove it")


def _is_run(folder: Path) -> bool:
    """Whether a training wrote what is in a folder: other programs have a config.yaml too, and it may be replaced."""
    try:
        if RunRecord.read(folder) is not None:
            return True
    except BadInput:  # a spoilt one
        pass
    try:
        return (folder / "task.yaml").is_file() and overlay.read(folder / "config.yaml").get("task") == "task.yaml"
    except BadInput:
        return False


def check_same(folder: Path, old: RunRecord, new: RunRecord, allowed: Sequence[str], rows: str = "") -> list[str]:
    """Refuse settings that differ from those of the run in a folder; returns the keys that were allowed to.

    Args:
        rows: in what the data differ
    """
    there = object()
    keys = [key for key in new.settings if old.settings.get(key, there) != new.settings[key]]
    keys += [key for key in old.settings if key not in new.settings and key != ROWS]
    refused = [key for key in keys if not any(_covers(one, key) for one in allowed)]
    if refused:
        lines = [f"  {key}: {_shown(old, key)} there, {_shown(new, key)} now" for key in refused]
        lines = [f"  {ROWS}: {rows}" if rows and line.startswith(f"  {ROWS}:") else line for line in lines]
        accept = " ".join(f"--allow-change {key}" for key in refused)
        raise BadInput(
            f"output={folder}: its run was begun with other settings:",
            *lines,
            f"choose another output, --overwrite the run, or go on all the same with {accept}",
        )
    return keys


def check_allowed(allowed: Sequence[str], *records: RunRecord | None) -> None:
    """Refuse --allow-change of what no run has, also where there is nothing to go on from yet."""
    known = {ROWS, "terms", *(key for record in records if record is not None for key in record.settings)}
    for key in allowed:
        if not any(_covers(key, name) for name in known):
            raise BadInput(f"--allow-change {key}: there is no such setting; {nearest(key, known)}")


def _covers(key: str, name: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def _shown(record: RunRecord, key: str) -> str:
    if key not in record.settings:
        return "nothing"
    shown = json.dumps(record.settings[key])
    return f"{shown[:12]}..." if key == ROWS else shown


def begin(folder: Path, run: Run, record: RunRecord) -> None:
    """Make a folder a new run's own; what was in it belonged to a run that is to be replaced."""
    if (folder / RECORD).exists():
        record.write(folder)  # first: nothing of the old run is taken for the new one's
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (RECORD, LOCK):
            path.unlink()
    run.save(folder)
    record.write(folder)


class RunDirectory:
    """An output folder, and the run that it is to belong to.

    Args:
        stack: keeps the lock for as long as it is open
        resume: refuse to begin at step 0
    """

    def __init__(self, folder: Path, run: Run, stack: contextlib.ExitStack, resume: bool) -> None:
        self.folder, self.run, self.stack, self.resume, self.overwrite = folder, run, stack, resume, False
        self.record, self.held = RunRecord.of(run), False
        self.found: RunRecord | None = None
        self.changed: list[str] = []
        self.settled = True

    def look(self, overwrite: bool, allowed: Sequence[str]) -> None:
        """Look at the folder before anything slow; nothing is written to it but the name of who holds it."""
        self.overwrite = overwrite
        if not first_process():  # the first one refuses for all
            self.found = None if overwrite else RunRecord.read(self.folder)
            return
        check_folder(self.folder, overwrite, self.resume)
        if (self.folder / LOCK).exists():
            self._lock()
        self.found = check_folder(self.folder, overwrite, self.resume)
        check_allowed(allowed, self.record, self.found)
        if self.found is not None:
            check_same(self.folder, self.found, self.record, allowed)

    def compare(self, splits: Splits, allowed: Sequence[str]) -> None:
        """The same for the data, when they are there."""
        self.record.settings[ROWS], outline = fingerprint(splits)
        self.record = replace(self.record, outline=outline)
        if self.found is not None:
            rows = difference(self.found.outline, splits)
            self.changed = check_same(self.folder, self.found, self.record, allowed, rows)

    @property
    def finished(self) -> bool:
        return self.found is not None and self.found.finished and not self.changed

    def reopen(self) -> None:
        """Look at the model of a finished run; one that is not whole is written again from the last checkpoint."""
        assert self.found is not None
        if (self.folder / REMOVED).is_file():  # a comparison has not kept it
            return
        wrong = checkpoints.damage(self.folder, self.found.files)
        if wrong is None and not any(path.is_file() for path in self.folder.glob("model*.safetensors")):
            wrong = "its model is missing"
        if wrong is None:
            return
        if checkpoints.newest(self.folder, self.found.run) is None:
            raise BadInput(
                f"output={self.folder}: this run was finished, but {wrong}, and there is no checkpoint: bring the file "
                "back, or train it again with --overwrite"
            )
        warn(f"{self.folder}: this run was finished, but {wrong}: it is written again from the last checkpoint")
        self.found = replace(self.found, finished=False)

    def take(self, trainer: Any) -> Path | None:
        """Make the folder this run's own, and find the checkpoint to go on from, for all processes."""
        checkpoint: Path | None = None
        if first_process():
            with disk.writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock()
                if self.found is None:
                    if check_folder(self.folder, self.overwrite, False) is not None:
                        raise BadInput(f"output={self.folder}: another process has begun there: run the command again")
                    begin(self.folder, self.run, self.record)
                else:
                    checkpoint = self._go_on(self.found)
        self.record, checkpoint = broadcast_object_list([self.record, checkpoint])
        trainer.facts, trainer.changed, trainer.loaded = self.record.facts, tuple(self.changed), self.settle
        return None if checkpoint is None else Path(checkpoint)

    def _go_on(self, found: RunRecord) -> Path | None:
        self.record = replace(self.record, run=found.run, before=found.before)
        checkpoint = checkpoints.newest(self.folder, found.run)
        if checkpoint is None and self.resume:
            raise BadInput(f"output={self.folder}: there is no checkpoint to resume from")
        if not found.finished:
            (self.folder / METRICS).unlink(missing_ok=True)  # of a run that was to be replaced
        if not (self.folder / "config.yaml").exists() or not (self.folder / "task.yaml").exists():
            self.run.save(self.folder)
        if self.changed:
            say(f"changed since the run was begun: {', '.join(self.changed)}")
            self.settled = False
        if found.versions != versions():
            warn(f"begun with {found.versions}, gone on with {versions()}: numbers may differ")
        say(f"goes on from {checkpoint}" if checkpoint else "begins again: there was no checkpoint yet")
        return checkpoint

    def settle(self) -> None:
        """Make changed settings the run's own, now that its checkpoint could be gone on with."""
        if not self.settled:
            self.settled = True
            with disk.writing(self.folder):
                self.run.save(self.folder)
                self.record.write(self.folder)
                (self.folder / METRICS).unlink(missing_ok=True)  # of the run as it was

    def check_own(self) -> None:
        if first_process():
            check_own(self.folder, self.record.run)

    def note(self, **values: Any) -> None:
        """Write something down about the run."""
        self.record = replace(self.record, **values)
        if first_process() and self.settled:
            self.check_own()
            with disk.writing(self.folder):
                self.record.write(self.folder)

    def _lock(self) -> None:
        if not self.held:
            self.stack.enter_context(locked(self.folder))
            self.held = True


def check_own(folder: Path, run: str) -> None:
    """Stop a run whose folder was removed, or given to another run, while it was training."""
    found = RunRecord.read(folder)
    if found is None or found.run != run:
        what = "was removed" if found is None else "was given to another run"
        raise NoRoom(f"{folder}: the folder of this run {what} while it was training: there is nowhere to write to")


def first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun started."""
    return processes()[0] == 0


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an output folder alone. The lock goes with the process, however it ends; workers do not inherit it."""
    with open_own(folder / LOCK, "a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise BadInput(
                f"output={folder}: {file.read().strip() or 'another process'} is working there: wait for it, or choose "
                "another output"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
