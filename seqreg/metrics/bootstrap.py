"""Bootstrap resamples, drawn a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_INDICES = 4_000_000
"""Indices that are held at once."""


def resamples(size: int, count: int, rng: np.random.Generator) -> Iterator[NDArray[np.int32]]:
    """Indices of `count` resamples of `size` examples, some at a time.      [some, size]"""
    step = max(1, _INDICES // size)
    for start in range(0, count, step):
        yield rng.integers(0, size, size=(min(step, count - start), size), dtype=np.int32)


def resampled_means(values: NDArray[Any], count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Means of `count` resamples of every row of values; all rows see the same.      [rows, n] -> [rows, count]"""
    size = values.shape[-1]
    means = []
    for indices in resamples(size, count, rng):
        indices += np.arange(0, indices.size, size, dtype=np.int32)[:, None]  # every resample counts for itself
        often = np.bincount(indices.ravel(), minlength=indices.size).reshape(indices.shape)
        means.append(values @ often.T.astype(np.float64) / size)
    return np.concatenate(means, axis=1)


def percentile_intervals(draws: NDArray[Any], confidence: float) -> list[tuple[float, float]]:
    """The percentile interval of every row.      [rows, resamples]"""
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=1)
    return [(float(start), float(end)) for start, end in zip(low, high, strict=True)]
