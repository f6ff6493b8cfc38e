"""Examples of a large file: cleaned once into an Arrow file of the cache, and read from there when asked for."""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow

from seqreg.errors import BadInput
from seqreg.workbench.config.cards import Card
from seqreg.workbench.data import arrow_cache, examples
from seqreg.workbench.data.arrow_cache import TableWriter
from seqreg.workbench.data.examples import Example
from seqreg.workbench.text import readers

IN_MEMORY = 64_000_000
"""Bytes of a file up to which its examples are held in memory."""
_AT_ONCE = 1000
"""Examples that are read or written at once, and thousands of characters."""


class OnDisk(Sequence[Example]):
    """Examples of a memory-mapped `datasets.Dataset`.

    Args:
        key: of their content, for what is made of it; None where that is not kept
        folder: of the cache
    """

    def __init__(self, dataset: Any, key: str | None, folder: Path) -> None:
        self.dataset, self.key, self.folder = dataset, key, folder

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.select(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.example(self.dataset[int(index)], index)

    @abstractmethod
    def example(self, record: Any, index: int) -> Example | None:
        """An example from what the dataset has of it."""

    def select(self, indices: Sequence[int]) -> Self:
        """Some of them, in this order."""
        chosen = hashlib.sha256(np.asarray(indices, dtype=np.int64).tobytes()).hexdigest()
        return self.changed(self.dataset.select(indices), chosen)

    def changed(self, dataset: Any, change: str) -> Self:
        """The same with another dataset, whose difference has a name."""
        other = copy.copy(self)
        other.dataset, other.key = dataset, None if self.key is None else arrow_cache.key_of(self.key, change)
        return other


class StoredExamples(OnDisk):
    """Examples in an Arrow file of the cache; `labelled` where they have their targets and labels."""

    labelled = True

    def without_labels(self) -> StoredExamples:
        other = self.changed(self.dataset, "without labels")
        other.labelled = False
        return other

    def example(self, record: Any, index: int) -> Example:
        return self._example(**record)

    def __iter__(self) -> Iterator[Example]:
        for columns in self.dataset.iter(batch_size=_AT_ONCE):
            yield from (
                self._example(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
            )

    def _example(
        self, source: str, second: Any, target: Any, label: Any, references: list[str], tags: list[int] | None,
        chat: list[list[str]], **_: Any,
    ) -> Example:  # fmt: skip
        messages = tuple((role, content) for role, content in chat)
        if not self.labelled:
            return Example(source, second, chat=messages)
        return Example(
            source, second, target, label, tuple(references), tags=None if tags is None else tuple(tags), chat=messages
        )

    def column(self, name: str) -> list[Any]:
        """A number of every example."""
        return list(self.dataset.select_columns([name])[:][name])


class _Writer:
    """A list of examples that is written to a table, and not held."""

    def __init__(self, writer: TableWriter, label: pyarrow.DataType) -> None:
        self.writer, self.label, self.count = writer, label, 0
        self.waiting, self.characters = list[Example](), 0

    def __len__(self) -> int:
        return self.count

    def append(self, example: Example) -> None:
        self.waiting.append(example)
        self.count, self.characters = self.count + 1, self.characters + example.characters
        if len(self.waiting) == _AT_ONCE or self.characters > 1000 * _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        text, rows = pyarrow.string(), self.waiting
        if rows or not self.count:
            self.writer.write({
                "source": pyarrow.array([row.source for row in rows], text),
                "second": pyarrow.array([row.second for row in rows], text),
                "target": pyarrow.array([row.target for row in rows], text),
                "label": pyarrow.array([row.label for row in rows], self.label),
                "references": pyarrow.array([row.references for row in rows], pyarrow.list_(text)),
                "tags": pyarrow.array([row.tags for row in rows], pyarrow.list_(pyarrow.int64())),
                "chat": pyarrow.array([row.chat for row in rows], pyarrow.list_(pyarrow.list_(text))),
                "identity": pyarrow.array([identity(row) for row in rows], pyarrow.int64()),
            })  # fmt: skip
        self.waiting, self.characters = [], 0


def store(
    card: Card, path: Path, folder: Path, settings: dict[str, Any], read: Callable[[Any], list[str]]
) -> tuple[StoredExamples, list[str]]:
    """The examples of a file and notes on them, from the cache if they are there.

    Args:
        settings: what is read, and how, beside the card
        read: appends the examples of the file, and returns the notes
    """
    digest = arrow_cache.file_digest(path)
    rules = [card.model_dump(mode="json"), settings, path.suffix, digest]
    key = arrow_cache.key_of("examples", rules, code=(examples, readers))

    def make(writer: TableWriter) -> dict[str, Any]:
        made = _Writer(writer, pyarrow.float64() if card.labels is None else pyarrow.int64())
        notes = read(made)
        made.flush()
        if arrow_cache.file_digest(path) != digest:  # or the cache would have others under its name, for good
            raise BadInput(f"{path}: changed while it was read: run the command again when it is written")
        return {"notes": notes}

    table = arrow_cache.table(folder, key, make)
    return StoredExamples(table.dataset, key, folder), table.facts["notes"]


def identity(example: Example) -> int:
    """A number that examples of the same texts have in common, and no others."""
    texts = "\0".join((example.source, example.second or "", example.target or ""))
    return int.from_bytes(hashlib.blake2b(texts.encode(), digest_size=8).digest(), "big", signed=True)
