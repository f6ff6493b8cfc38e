"""Edit distance: insertions, deletions and substitutions from a prediction to its reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SYMBOLS = 40_000
"""Of a text at most: the cost grows with the square of it."""


def edit_distance(prediction: Sequence[str], reference: Sequence[str]) -> int:
    """The smallest number of insertions, deletions and substitutions of symbols.

    >>> edit_distance("kitten", "sitting"), edit_distance([], ["a", "b"])
    (3, 2)
    """
    ids = {symbol: number for number, symbol in enumerate(dict.fromkeys([*prediction, *reference]))}
    wanted = np.array([ids[symbol] for symbol in reference], dtype=np.int64)
    places = np.arange(len(wanted) + 1)
    row = places.copy()
    for number, symbol in enumerate(prediction, start=1):
        best = np.empty_like(row)
        best[0] = number
        np.minimum(row[1:] + 1, row[:-1] + (wanted != ids[symbol]), out=best[1:])
        row = np.minimum.accumulate(best - places) + places  # an insertion costs one more than the place before
    return int(row[-1])


def closest(prediction: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Edits to the nearest of several references, and the length of that; of equally near ones the longest."""
    pairs = [(edit_distance(prediction, reference), len(reference)) for reference in references]
    return min(pairs, key=lambda pair: (pair[0], -pair[1]))


def edit_counts(predictions: Sequence[str], references: Sequence[Sequence[str]], *, words: bool) -> NDArray[np.int64]:
    """Edits and reference length of every example; `words`: symbols are apart by whitespace.      [examples, 2]"""

    def symbols(text: str) -> Sequence[str]:
        return text.split() if words else text

    rows = [
        closest(symbols(prediction), [symbols(reference) for reference in several])
        for prediction, several in zip(predictions, references, strict=True)
    ]
    return np.array(rows, dtype=np.int64)
