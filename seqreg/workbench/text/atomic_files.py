"""Atomic writes, and paths that can be read or written."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput

ASIDE = ".tmp-"
"""What the name of a file or folder begins with until it is complete."""
REMOVED = "model_removed.txt"
"""In the folder of a finished run whose model was not kept; it says why."""


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


def writable(path: str | Path, option: str) -> None:
    """Refuse a place that nothing can be written to, whatever the disk: too long a name, a link that leads nowhere."""
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


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, outlast a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: at any instant the old or the new text is there. A link is replaced, not followed."""
    aside = path.with_name(f"{ASIDE}{path.name}")
    try:
        aside.unlink(missing_ok=True)  # of a process that was killed
        with aside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


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
