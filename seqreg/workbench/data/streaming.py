"""Training examples that are read while the model trains: in their order, mixed by the shuffle buffer of datasets."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from seqreg.errors import BadInput
from seqreg.workbench.data.examples import Example

FIRST = 1000
"""Examples that are read before anything is written, so that a mistake in them is told at once."""


@dataclass(frozen=True)
class StreamedExamples:
    """Examples that are read as often as they are asked for, and are not counted.

    Args:
        read: all of them, from the first on
        first: those at the beginning
        digest: of the file that they are in; of the first ones where there is no file
    """

    read: Callable[[], Iterator[Example]]
    first: Sequence[Example]
    digest: str

    @classmethod
    def of(
        cls, read: Callable[[], Iterator[Example]], place: str, most: int | None, digest: str | None = None
    ) -> StreamedExamples:
        """Examples that something reads, at most so many; refuses an empty `place`."""

        def limited() -> Iterator[Example]:
            return itertools.islice(read(), most)

        first = list(itertools.islice(limited(), FIRST))
        if not first:
            raise BadInput(f"{place}: 0 examples")
        return cls(limited, first, digest or hashlib.sha256(repr(first).encode()).hexdigest())

    def shuffled(self, seed: int, buffer_size: int) -> Iterator[tuple[int, Example]]:
        """Numbered examples without an end: when all were read, they begin again, in another order."""
        import datasets

        read = self.read  # alone: datasets takes a hash of all that its generator can see

        def numbered() -> Iterator[dict[str, Any]]:
            return ({"number": number, "example": example} for number, example in enumerate(read()))

        stream: Any = datasets.IterableDataset.from_generator(numbered)
        stream = stream.shuffle(seed=seed, buffer_size=buffer_size)
        for epoch in itertools.count():
            stream.set_epoch(epoch)
            yield from ((item["number"], item["example"]) for item in stream)
