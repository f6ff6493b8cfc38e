"""How much of a batch is padding: in random order, as transformers groups, and as we group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import BatchSampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from seqreg.errors import BadInput
from seqreg.workbench.data.batches import GroupedOrder, length_table


def padding_waste(lengths: ArrayLike, batches: Iterable[Sequence[int]]) -> float:
    """Share of all positions that are padding, if every batch is padded to its longest example.

    Args:
        lengths: tokens of every example                    # [n], or [n, 2] for source and target
        batches: the examples of every batch

    Example:
        >>> padding_waste([[10, 2], [10, 4], [20, 4]], [[0, 1], [2]])  # 50 tokens in 28 + 24 positions
        0.0384...
    """
    table = length_table(lengths)
    tokens = positions = 0
    for batch in batches:
        chosen = table[list(batch)]
        tokens += int(chosen.sum())
        positions += len(chosen) * int(chosen.max(0).sum())
    if not positions:
        raise BadInput("batches hold no tokens: give at least one batch with an example that is not empty")
    return 1 - tokens / positions


def gigaword_lengths(rows: int, seed: int = 0) -> NDArray[np.int64]:
    """Source and target lengths like those of Gigaword in BART's tokens: [rows, 2].

    Measured on 6,486 training pairs: source 40.7 ± 6.9, from 15 to 73; target 12.5 ± 2.5, from 5 to 25; correlation
    0.23.
    """
    spread, correlation = np.array([6.93, 2.49]), 0.23
    covariance = np.outer(spread, spread) * np.array([[1, correlation], [correlation, 1]])
    drawn = np.random.default_rng(seed).multivariate_normal([40.67, 12.46], covariance, size=rows)
    return np.clip(np.rint(drawn), [15, 5], [73, 25]).astype(np.int64)


def compare(rows: int = 6486, sizes: Sequence[int] = (8, 16, 32, 64), seed: int = 0) -> dict[int, dict[str, float]]:
    """Padding waste of every batch size: `random`; transformers' `source` (its default key) and `sum` (source and
    target added); `ours`."""
    lengths = gigaword_lengths(rows, seed)
    return {size: _wastes(lengths, size, seed) for size in sizes}


def _wastes(lengths: NDArray[np.int64], size: int, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)

    def waste(order: list[int]) -> float:
        return padding_waste(lengths, [order[start : start + size] for start in range(0, len(order), size)])

    def grouped(key: NDArray[np.int64]) -> list[int]:
        order: list[int] = get_length_grouped_indices(key.tolist(), size, generator=generator)
        return order

    return {
        "random": waste(torch.randperm(len(lengths), generator=generator).tolist()),
        "source": waste(grouped(lengths[:, 0])),
        "sum": waste(grouped(lengths.sum(1))),
        "ours": padding_waste(lengths, BatchSampler(GroupedOrder(lengths, size, seed=seed), size, drop_last=False)),
    }
