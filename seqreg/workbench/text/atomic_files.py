"""How every file and folder is written: aside first, then renamed. Nothing is read or written through a link out.

A file is written by `write_text`, `write_bytes` or `written_aside`, a folder by `staged`. Errors of the disk are one
line with the path and the bytes (`writing`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from seqreg.errors import DISK, BadInput, DiskError, Stopped

ASIDE = ".tmp-"
"""What the name of a file or folder begins with until it is complete."""
REMOVED = "model_removed.txt"
"""In the folder of a finished run whose model was not kept; it says why."""
STAGE = f"{ASIDE}seqreg"
"""What the name of a folder begins with until all of it is written."""
_READY = ".ready"
_MESSAGES = re.compile(
    r"(No space left on device|File too large|Disk quota exceeded|Read-only file system|Permission denied|"
    r"Input/output error|PytorchStreamWriter failed|file write failed|inline_container)"
)


def inside(folder: Path, name: str) -> Path:
    """The path of a name in a folder, refused if `..`, an absolute name or a link leads out of the folder."""
    path = folder / name
    if Path(name).is_absolute() or not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise BadInput(f"{name!r} leads out of {folder}: what a file names must be in its own folder")
    return path


def refuse_links_out(folder: Path) -> None:
    """Refuse a folder with a link that leads out of it: what is read there would be somebody else's."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            raise BadInput(f"{path}: a link that leads out of its folder: put what it leads to there, or remove it")


def regular(path: Path) -> Path:
    """A path that can be read to its end: a file, not a folder, a pipe or a device, and not larger than the memory."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise BadInput(f"{path}: {what}: expected a file; write what comes out of a pipe to one first")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if status.st_size > memory:
        raise BadInput(f"{path}: {status.st_size:,} bytes, more than the memory of this machine ({memory:,})")
    return path


def check_file(path: str | Path, option: str = "") -> None:
    """Refuse what is no file, before anything slow."""
    if os.path.exists(path) and not os.path.isdir(path):
        regular(Path(path))
    elif not os.path.isfile(path):
        raise BadInput(f"{option}{path}: no such file")


def writable(path: str | Path, option: str) -> None:
    """Refuse a place that nothing can be written to, whatever the disk: too long a name, a link that leads nowhere.

    A name with ~ or $HOME, which the shell has not spelt out, is refused too: a folder of that name would be made.
    """
    if (spelt := os.path.expandvars(os.path.expanduser(path))) != str(path):
        raise BadInput(f"{option}{path}: a folder called {Path(path).parts[0]} would be made here: write {spelt}")
    inner = Path(path) / ("x" * 64) / ("x" * 64)  # of the files that will be in it
    if max(len(os.fsencode(part)) for part in inner.parts) > 255:  # of a folder that is not there yet, nobody says so
        raise BadInput(f"{option}{path}: {os.strerror(errno.ENAMETOOLONG)}: choose another")
    try:
        os.stat(inner)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # may be made; or others say what is in the way
    except (OSError, ValueError) as error:
        raise BadInput(f"{option}{path}: {getattr(error, 'strerror', None) or error}: choose another") from None
    for parent in (Path(path), *Path(path).parents):
        if parent.is_symlink() and not parent.exists():
            raise BadInput(f"{option}{path}: {parent} is a link that leads nowhere: choose another")


@contextlib.contextmanager
def writing(path: Path, needed: int = 0, hint: str = "") -> Iterator[None]:
    """Turn a disk that is full or cannot be written into one line with the path and the bytes."""
    try:
        yield
    except (BadInput, Stopped):
        raise
    except Exception as error:  # writers in Rust and C++ have exceptions of their own
        reason = _reason(error, path)
        if reason is None:
            raise
        wanted = f", about {needed:,} needed" if needed else ""
        raise DiskError(f"{path}: {reason}: {free_bytes(path):,} bytes free{wanted}{hint}") from None


def _reason(error: Exception, path: Path) -> str | None:
    if isinstance(error, OSError):
        # no folder can be made, on a file system such as /proc
        missing = error.errno == errno.ENOENT and str(error.filename or "").startswith(str(path.parent))
        return os.strerror(error.errno or 0) if error.errno in DISK or missing else None
    match = _MESSAGES.search(str(error))
    return None if match is None else f"writing failed ({match[0]})"


def free_bytes(path: Path) -> int:
    """Bytes left on the disk of a path that may not exist yet."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, outlast a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def written_aside(path: Path, needed: int = 0) -> Iterator[Path]:
    """A path to write a file to, which becomes `path` at the end of the block: at any instant the old or the new file
    is there. A link is replaced, not followed.

    Args:
        needed: bytes of the file, if they are known
    """
    aside = path.with_name(f"{ASIDE}{path.name}")
    with writing(path, needed):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.unlink(missing_ok=True)  # of a process that was killed
            yield aside
            sync(aside)
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    with written_aside(path, len(data)) as aside, aside.open("xb") as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a file of text, in UTF-8, atomically."""
    write_bytes(path, text.encode())


@contextlib.contextmanager
def staged_folder(folder: Path, replaced: Iterable[str] = (), needed: int = 0) -> Iterator[Path]:
    """A folder to write files to, which become those of `folder` at the end of the block.

    A folder that is not there yet appears complete, by one rename. In one that is there, every file takes the place of
    the one of its name, and `finish` continues where a process was killed in between. All other files stay.

    Args:
        replaced: names of files of `folder` that an earlier call wrote, and which go
        needed: bytes of all files, if they are known
    """
    finish(folder)
    new = not folder.exists()
    stage = folder.with_name(f"{STAGE}-{folder.name}") if new else folder / STAGE
    with writing(folder, needed):
        remove([stage] if stage.is_symlink() else [])
        stage.mkdir(parents=True, exist_ok=True)
        with _alone(stage):
            try:
                remove(stage.iterdir())  # of a process that was killed
                yield stage
                names = settle(stage)
                if new:
                    stage.rename(folder)
                else:
                    write_text(stage / _READY, json.dumps(sorted({*replaced}.difference(names))))
                    _replace(stage, folder)
            except BaseException:
                remove([] if (stage / _READY).exists() else [stage])
                raise
        sync(folder.parent)


def finish(folder: Path) -> None:
    """Continue where a process was killed that had begun to replace files of a folder; remove what is half-written."""
    stage = folder / STAGE
    if stage.is_dir() and not stage.is_symlink():
        with writing(folder), _alone(stage):
            _replace(stage, folder)


def _replace(stage: Path, folder: Path) -> None:
    if (stage / _READY).is_file():
        gone = json.loads((stage / _READY).read_text(encoding="utf-8"))
        move(stage, folder, but=_READY)
        remove_files(folder, gone)
    remove([stage])


def move(aside: Path, folder: Path, but: str = "") -> None:
    """Move all files of a folder to where they belong, one by one; a link there is replaced, not followed."""
    for path in sorted(path for path in aside.rglob("*") if path.is_file() and path.name != but):
        name = path.relative_to(aside)
        inside(folder, str(name.parent)).mkdir(parents=True, exist_ok=True)
        path.replace(folder / name)
    sync(folder)


def settle(folder: Path) -> list[str]:
    """Sync all files of a folder, with the permissions of new files: safetensors writes for the user alone."""
    mask = os.umask(0)
    os.umask(mask)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        path.chmod(0o666 & ~mask)
        sync(path)
    return [path.relative_to(folder).as_posix() for path in paths]


def remove(paths: Iterable[Path]) -> None:
    """Delete files, links (not what they lead to) and folders; what is not there is left out."""
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Delete what is in a folder under some names, links too, and folders below it that are empty then."""
    paths = []
    for name in names:  # a link is deleted, wherever it leads; its folder must be here
        if ".." in Path(name).parts:
            raise BadInput(f"{name!r} leads out of {folder}: it is not deleted")
        paths.append(inside(folder, str(Path(name).parent)) / Path(name).name)
    remove(paths)
    for parent in {path.parent for path in paths} - {folder}:
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


@contextlib.contextmanager
def _alone(stage: Path) -> Iterator[None]:
    """Refuse to write what another process writes; the lock goes with the process."""
    handle = os.open(stage, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"{stage}: another process is writing there: wait for it") from None
        yield
    finally:
        os.close(handle)


def to_json(value: Any, **options: Any) -> str:
    """JSON that every program reads: a number that is not finite is null."""
    return json.dumps(finite(value), allow_nan=False, **options)


def open_own(path: Path, mode: str) -> Any:
    """Open a file of a run to write to it, or make it; a symbolic link, which leads elsewhere, is refused."""
    try:
        return open(
            path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)
        )
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise BadInput(f"{path}: a symbolic link: a run writes to its own folder alone: remove it") from None


def finite(value: Any) -> Any:
    """The same with None for every number that is not finite, also inside."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
