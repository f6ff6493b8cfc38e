"""The output folder of a run: its record, its lock, and whether it can be resumed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from seqreg.errors import BadInput, DiskError, nearest
from seqreg.workbench.config import overlay
from seqreg.workbench.config.other_names import current
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.run import checkpoints
from seqreg.workbench.run.record import (
    RECORD,
    ROWS,
    WEIGHTS,
    RunRecord,
    changed_settings,
    covers,
    difference,
    fingerprint,
    versions,
)
from seqreg.workbench.scores.results import METRICS, SCORES, forget_scores
from seqreg.workbench.text.atomic_files import ASIDE, REMOVED, open_own, remove_files, write_text, writing
from seqreg.workbench.text.terminal import first_process, say, warn

LOCK = ".lock"
_REPLACES = f"{ASIDE}replaces"
"""A file that says which run replaces what is in its folder, and which files go."""
_UNFINISHED = {LOCK, "config.yaml", "task.yaml", f"{ASIDE}{RECORD}", f"{ASIDE}config.yaml", f"{ASIDE}task.yaml"}
"""What a run that was killed in its first moments leaves."""
_WRITTEN = (LOCK, "crash", checkpoints.PREFIX, checkpoints.OLD, ASIDE, "tensorboard", "evidence", SCORES)
"""Prefixes of the names that a run writes to, or into."""
_OUTPUTS = (
    RECORD, LOCK, REMOVED, METRICS, "config.yaml", "task.yaml", "README.md", "soup.json", "scores/*.json",
    "scores/*/*.jsonl", "scores/*/*.txt", "predictions*.jsonl", "generated_predictions*.txt", "config.json",
    "model*.safetensors*", "pytorch_model*.bin*",
    f"{ASIDE}*", f"{checkpoints.PREFIX}[0-9]*", f"{checkpoints.OLD}*", f"spoilt-{checkpoints.PREFIX}*", "crash",
    "tensorboard", "evidence/*.json", "evidence/*.jsonl", "evidence/*.svg", "evidence/*.png",
)  # fmt: skip
"""Patterns of all that a run and the studies of it write, but for further files of the model, which run.json names."""


def written(folder: Path) -> list[str]:
    """Names of what runs, soups and studies wrote to a folder; all else in it is somebody's own."""
    try:
        record = RunRecord.read(folder)
    except BadInput:  # a spoilt one
        record = None
    names = {path.relative_to(folder).as_posix() for pattern in _OUTPUTS for path in folder.glob(pattern)}
    return sorted(names.union(() if record is None else record.files))


def check_output(folder: Path) -> None:
    """Refuse a path that cannot become a folder: of a file, too long, or of links that go round in circles."""
    for path in (folder, *folder.parents):
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            shown = str(folder) if len(str(folder)) < 200 else f"{str(folder)[:200]}..."
            raise BadInput(f"output={shown}: {getattr(error, 'strerror', None) or error}: choose another") from None
        if not stat.S_ISDIR(mode):
            raise BadInput(f"output={folder}: {path} is a file and in the way: choose another")


def check_links(folder: Path) -> None:
    """Refuse symbolic links where a run writes: what it empties, replaces or adds would be somebody else's."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_symlink() and path.name.startswith(_WRITTEN):
            raise BadInput(f"{path}: a symbolic link: a run writes to its own folder alone: remove it")


def check_folder(folder: Path, overwrite: bool, resume: bool) -> RunRecord | None:
    """The record of the run in a folder, if there is one; refuses a folder that is something else."""
    check_output(folder)
    check_links(folder)
    if overwrite and resume:
        raise BadInput("--overwrite restarts a run, and --resume never does: choose one")
    record = None if overwrite else RunRecord.read(folder)
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if record is None and resume:
        raise BadInput(f"output={folder}: there is nothing to resume")
    if record is not None or not names - _UNFINISHED:
        return record
    if not _is_run(folder):
        raise BadInput(f"output={folder}: the folder is not empty, and not a run of seqreg: choose another")
    if not overwrite:
        raise BadInput(
            f"output={folder}: there is a run already that cannot be resumed (it has no {RECORD}): "
            "--overwrite it, or choose another output"
        )
    return None


def _is_run(folder: Path) -> bool:
    """Whether a run wrote what is in a folder: other programs have a config.yaml too, and it may be replaced."""
    with contextlib.suppress(BadInput):  # a spoilt one
        if RunRecord.read(folder) is not None:
            return True
    with contextlib.suppress(BadInput):
        return (folder / "task.yaml").is_file() and overlay.read(folder / "config.yaml").get("task") == "task.yaml"
    return False


def check_same(folder: Path, old: RunRecord, new: RunRecord, allowed: Sequence[str], rows: str = "") -> list[str]:
    """Refuse settings that differ from those of the run in a folder; returns the keys that were allowed to.

    Args:
        rows: how the data differ
    """
    keys = changed_settings(old, new)
    refused = [key for key in keys if not any(covers(name, key) for name in allowed)]
    if refused:
        details = {key: f"{_shown(old, key)} there, {_shown(new, key)} now" for key in refused}
        if rows and ROWS in details:
            details[ROWS] = rows
        raise BadInput(
            f"output={folder}: its run was started with other settings:",
            *(f"  {key}: {detail}" for key, detail in details.items()),
            "choose another output, --overwrite the run, or resume all the same with "
            + " ".join(f"--allow-change {key}" for key in refused),
        )
    return keys


def check_allowed(allowed: Sequence[str], *records: RunRecord | None) -> None:
    """Refuse --allow-change of what no run has, also where there is nothing to resume yet."""
    known = {ROWS, "terms", WEIGHTS, *(key for record in records if record is not None for key in record.everything)}
    for key in allowed:
        if not any(covers(key, name) for name in known):
            raise BadInput(f"--allow-change {key}: there is no such setting; {nearest(key, known)}")


def _shown(record: RunRecord, key: str) -> str:
    if key not in record.everything:
        return "nothing"
    shown = json.dumps(value := record.everything[key])
    return f"{shown[:12]}..." if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else shown


class RunDirectory:
    """An output folder, and the run that it is to belong to.

    Args:
        stack: keeps the lock for as long as it is open
        overwrite: replace the run in the folder
        resume: refuse to start at step 0
        allowed: settings that may differ from those that the run was started with

    Attributes:
        record: of this run; that of a resumed one keeps its name
        changed: the settings that do differ
    """

    def __init__(
        self, folder: Path, run: Run, stack: contextlib.ExitStack, *,
        overwrite: bool = False, resume: bool = False, allowed: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.folder, self.run, self.stack = folder, run, stack
        self.overwrite, self.resume = overwrite, resume
        self.allowed = [current(key) for key in allowed]
        self.record, self.changed = RunRecord.of(run), list[str]()
        self._stored: RunRecord | None = None
        self._locked, self._settled = False, True

    def check(self) -> None:
        """Look at the folder before anything slow; nothing is written to it but the name of who holds it."""
        if not first_process():  # the first one refuses for all
            self._stored = None if self.overwrite else RunRecord.read(self.folder)
            return
        check_folder(self.folder, self.overwrite, self.resume)
        if (self.folder / LOCK).exists():
            self._lock()
        self._stored = check_folder(self.folder, self.overwrite, self.resume)
        check_allowed(self.allowed, self.record, self._stored)
        if self._stored is not None:
            check_same(self.folder, self._stored, self.record, self.allowed)

    def check_data(self, splits: Splits) -> None:
        """The same for the data, when they are loaded."""
        self.record.settings[ROWS], outline = fingerprint(splits)
        self.record = replace(self.record, outline=outline)
        if self._stored is not None:
            rows = "" if self._stored.outline == outline else difference(self._stored.outline, splits)
            self.changed = check_same(self.folder, self._stored, self.record, self.allowed, rows)

    def check_inputs(self, inputs: dict[str, Any], pretrained: str) -> None:
        """The same for what the settings only name, when it is loaded; see `record.inputs_of`."""
        self.record = replace(self.record, inputs=inputs, pretrained=pretrained)
        if self._stored is not None:
            self.changed = check_same(self.folder, self._stored, self.record, self.allowed)

    def finished(self) -> bool:
        """Whether nothing is left to do; a finished model that is damaged is written again from the last checkpoint."""
        if self._stored is None or not self._stored.finished or self.changed:
            return False
        if (self.folder / REMOVED).is_file():  # a comparison has not kept it
            return True
        damage = checkpoints.damage(self.folder, self._stored.files)
        if damage is None and not any(path.is_file() for path in self.folder.glob("model*.safetensors")):
            damage = "its model is missing"
        if damage is None:
            return True
        if checkpoints.newest(self.folder, self._stored.run) is None:
            raise BadInput(
                f"output={self.folder}: this run was finished, but {damage}, and there is no checkpoint: bring the "
                "file back, or train it again with --overwrite"
            )
        warn(f"{self.folder}: this run was finished, but {damage}: it is written again from the last checkpoint")
        self._stored = replace(self._stored, finished=False)
        return False

    def take(self) -> Path | None:
        """Make the folder this run's own; returns the checkpoint to resume from, in all processes."""
        checkpoint: Path | None = None
        if first_process():
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock()
                if self._stored is None:
                    self._start()
                else:
                    checkpoint = self._resume(self._stored)
        self.record, checkpoint = broadcast_object_list([self.record, checkpoint])
        return None if checkpoint is None else Path(checkpoint)

    def _start(self) -> None:
        """Start a new run; what an earlier run wrote goes, and files of nobody's stay."""
        if check_folder(self.folder, self.overwrite, False) is not None:
            raise BadInput(f"output={self.folder}: another process has started there: run the command again")
        gone = [name for name in written(self.folder) if name not in (RECORD, LOCK)]
        if (self.folder / RECORD).exists():
            write_text(self.folder / _REPLACES, json.dumps({"run": self.record.run, "gone": gone}))
            self.record.write(self.folder)  # first: nothing of the old run is taken for the new one's
        self._clear(gone)
        self.run.save(self.folder)
        self.record.write(self.folder)

    def _clear(self, gone: Sequence[str]) -> None:
        """Remove files of an earlier run, and at last the note that they are to be removed."""
        remove_files(self.folder, [name for name in gone if name != _REPLACES])
        (self.folder / _REPLACES).unlink(missing_ok=True)

    def _resume(self, stored: RunRecord) -> Path | None:
        self.record = replace(
            self.record,
            run=stored.run,
            start=stored.start,
            before=stored.before,
            retention=stored.retention,
        )
        if (self.folder / _REPLACES).is_file():  # killed before the files of an earlier run were gone
            note = json.loads((self.folder / _REPLACES).read_text(encoding="utf-8"))
            self._clear(note["gone"] if note["run"] == stored.run else ())
        checkpoint = checkpoints.newest(self.folder, stored.run)
        if checkpoint is None and self.resume:
            raise BadInput(f"output={self.folder}: there is no checkpoint to resume from")
        if not stored.finished:
            forget_scores(self.folder)  # of a run that was to be replaced
        if not (self.folder / "config.yaml").exists() or not (self.folder / "task.yaml").exists():
            self.run.save(self.folder)
        if self.changed:
            say(f"changed since the run was started: {', '.join(self.changed)}")
            self._settled = False
        if stored.versions != versions():
            warn(f"started with {stored.versions}, resumed with {versions()}: numbers may differ")
        say(f"resumes from {checkpoint}" if checkpoint else "restarts: there was no checkpoint yet")
        return checkpoint

    def settle(self) -> None:
        """Make changed settings the run's own, now that its checkpoint could be loaded with them."""
        if not self._settled:
            self._settled = True
            with writing(self.folder):
                self.run.save(self.folder)
                self.record.write(self.folder)
                forget_scores(self.folder)  # of the run as it was

    def check_own(self) -> None:
        """Stop a run whose folder was removed, or given to another run, while it was training."""
        stored = RunRecord.read(self.folder) if first_process() else self.record
        if stored is None or stored.run != self.record.run:
            what = "was removed" if stored is None else "was given to another run"
            raise DiskError(
                f"{self.folder}: the folder of this run {what} while it was training: nothing can be written"
            )

    def update(self, **values: Any) -> None:
        """Change fields of the record."""
        self.record = replace(self.record, **values)
        if first_process() and self._settled:
            self.check_own()
            with writing(self.folder):
                self.record.write(self.folder)

    def _lock(self) -> None:
        if not self._locked:
            self.stack.enter_context(locked(self.folder))
            self._locked = True


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
