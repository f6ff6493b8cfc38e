"""Arrow files that are made once: found by a key, sealed by a checksum, shared by all processes that see the folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from filelock import FileLock

from seqreg.errors import BadInput
from seqreg.version import __version__
from seqreg.workbench.config.settings import Data
from seqreg.workbench.text.terminal import warn

_CHUNK = 2**22


@dataclass(frozen=True)
class StoredTable:
    """A table of the cache.

    Args:
        dataset: memory-mapped, a `datasets.Dataset`
        facts: what its maker said about it
        digest: SHA-256 of the file
    """

    dataset: Any
    facts: dict[str, Any]
    digest: str


class TableWriter:
    """Writes columns to an Arrow file, some examples at a time."""

    def __init__(self, path: Path) -> None:
        self.file = pyarrow.OSFile(str(path), "wb")
        self.stream: Any = None

    def write(self, columns: Mapping[str, pyarrow.Array]) -> None:
        batch = pyarrow.record_batch(dict(columns))
        self.stream = self.stream or pyarrow.ipc.new_stream(self.file, batch.schema)
        self.stream.write_batch(batch)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.file.close()


def folder_of(data: Data) -> Path:
    """Where the cache of a run is."""
    if data.cache_dir is not None:
        return Path(data.cache_dir)
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "seqreg"


def key_of(*parts: Any, code: tuple[Any, ...] = ()) -> str:
    """The name of what is made of `parts` by the modules in `code`: another where any of them has changed."""
    sources = [Path(module.__file__).read_bytes() for module in code]
    text = json.dumps([__version__, *(hashlib.sha256(source).hexdigest() for source in sources), *parts])
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def table(folder: Path, key: str, make: Callable[[TableWriter], Mapping[str, Any]]) -> StoredTable:
    """The table of a key: that of the cache if it is whole, else made by one process while others wait for it.

    Args:
        make: writes the table, and returns facts about it as JSON has them
    """
    stored = _whole(folder, key)
    if stored is not None:
        return stored
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{key}.lock"):
            return _whole(folder, key, tell=True) or _made(folder, key, make)
    except OSError as error:
        raise BadInput(
            f"data.cache_dir={folder}: cannot be written ({error.strerror or error}): choose another folder, or set "
            "data.keep_in_memory=true"
        ) from None


def value(folder: Path, key: str, compute: Callable[[], Any]) -> Any:
    """A small value as JSON has it, computed once: the facts of a table without columns."""
    return table(folder, key, lambda _: {"value": compute()}).facts["value"]


def _made(folder: Path, key: str, make: Callable[[TableWriter], Mapping[str, Any]]) -> StoredTable:
    part, path = folder / f"{key}.part", folder / f"{key}.arrow"
    try:
        writer = TableWriter(part)
        try:
            facts = make(writer)
        finally:
            writer.close()
        seal = {"sha256": file_digest(part), "facts": dict(facts), "checksum": _checksum(facts)}
        os.replace(part, path)
        part.write_text(json.dumps(seal))
        os.replace(part, folder / f"{key}.json")
    finally:
        part.unlink(missing_ok=True)
    return _open(path, seal)


def _whole(folder: Path, key: str, *, tell: bool = False) -> StoredTable | None:
    """A table that is in the cache, and is what was written."""
    path = folder / f"{key}.arrow"
    try:
        seal = json.loads((folder / f"{key}.json").read_text())
        whole = file_digest(path) == seal["sha256"] and _checksum(seal["facts"]) == seal["checksum"]
    except OSError:  # not there, or a reason to say so when it is to be written
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if whole:
        return _open(path, seal)
    if tell:
        warn(f"{path}: damaged, and made again")
    return None


def _checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _open(path: Path, seal: Mapping[str, Any]) -> StoredTable:
    import datasets

    dataset = datasets.Dataset.from_file(str(path)) if path.stat().st_size else None
    return StoredTable(dataset, seal["facts"], seal["sha256"])
