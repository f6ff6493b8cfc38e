"""Disks that are full or cannot be written."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from seqreg.errors import DISK, BadInput, NoRoom, Stopped

_SAID = re.compile(
    r"(No space left on device|File too large|Disk quota exceeded|Read-only file system|Permission denied|"
    r"Input/output error|PytorchStreamWriter failed|file write failed|inline_container)"
)


@contextlib.contextmanager
def writing(path: Path, needed: int = 0, hint: str = "") -> Iterator[None]:
    """Turn a disk that is full or cannot be written into one line with the path and the bytes."""
    try:
        yield
    except (BadInput, Stopped):
        raise
    except Exception as error:  # writers in Rust and C++ have exceptions of their own
        reason = _reason(error)
        if reason is None:
            raise
        wanted = f", about {needed:,} needed" if needed else ""
        raise NoRoom(f"{path}: {reason}: {free(path):,} bytes free{wanted}{hint}") from None


def _reason(error: Exception) -> str | None:
    if isinstance(error, OSError) and error.errno in DISK:
        return os.strerror(error.errno)
    found = None if isinstance(error, OSError) else _SAID.search(str(error))
    return None if found is None else f"writing failed ({found[0]})"


def free(path: Path) -> int:
    """Bytes left on the disk of a path that may not exist yet."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free
