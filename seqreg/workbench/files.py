"""Files that are whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput

ASIDE = ".tmp-"
"""What the name of a file or folder begins with until it is complete."""


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, outlast a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a file in one go: at any instant the old text or the new one is there. A link is replaced, not followed."""
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
        return {key: finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, (list, tuple)) else value


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:  # Python 3.10
    found = hashlib.sha256()
    for block in iter(lambda: file.read(1 << 20), b""):
        found.update(block)
    return found.hexdigest()
