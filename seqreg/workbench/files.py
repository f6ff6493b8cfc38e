"""Files that are whole or not there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

ASIDE = ".tmp-"
"""What the name of a file or folder begins with until it is complete."""
REMOVED = "model_removed.txt"
"""In the folder of a finished run whose model was not kept; it says why."""


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, outlast a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a file in one go: at any instant the old text or the new one is there."""
    aside = path.with_name(f"{ASIDE}{path.name}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)


def _digest(file: Any) -> str:  # Python 3.10
    found = hashlib.sha256()
    for block in iter(lambda: file.read(1 << 20), b""):
        found.update(block)
    return found.hexdigest()
