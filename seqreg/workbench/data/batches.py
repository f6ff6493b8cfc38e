"""Batches of rows of similar length, so that little of a batch is padding.

`DataCollatorForSeq2Seq` already pads to the longest row of its batch; what is left to do is to put like with like. The
windows and their sorting are transformers' own (`get_length_grouped_indices`). This file adds what that lacks: a key
that sorts by source *and* target length, batches in random order, the same order from the same (seed, epoch), and
ranks that see batches of about the same length at the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from seqreg.errors import BadInput

_STRIPS = 12


def padding_waste(lengths: ArrayLike, batches: Iterable[Sequence[int]]) -> float:
    """Share of all positions that are padding, if every batch is padded to its longest row.

    Args:
        lengths: tokens of every row                        # [n], or [n, 2] for source and target
        batches: the rows of every batch

    Example:
        >>> padding_waste([[10, 2], [10, 4], [20, 4]], [[0, 1], [2]])  # 50 tokens in 28 + 24 positions
        0.0384...
    """
    table = _lengths(lengths)
    real = padded = 0
    for batch in batches:
        rows = table[list(batch)]
        real += int(rows.sum())
        padded += len(rows) * int(rows.max(0).sum())
    if not padded:
        raise BadInput("batches hold no tokens: give at least one batch with a row that is not empty")
    return 1 - real / padded


def length_key(lengths: ArrayLike) -> list[int]:
    """One number a row, to sort by: neighbours are alike in source and in target length.

    Rows are cut by source length into strips of equal size; the targets rise through one strip and fall through the
    next. The source alone leaves targets unlike, and the sum of both leaves both unlike.
    """
    table = _lengths(lengths)
    if table.shape[1] == 1:
        return [int(length) for length in table[:, 0]]
    source, target = table.T
    strips = np.array_split(np.lexsort((target, source)), _STRIPS)
    ordered = [
        strip[np.argsort(target[strip], kind="stable")][:: 1 if odd % 2 else -1] for odd, strip in enumerate(strips)
    ]
    key = np.empty(len(table), dtype=np.int64)
    key[np.concatenate(ordered)] = np.arange(len(table))
    return [int(place) for place in key]


class GroupedOrder(Sampler[int]):
    """Row numbers in an order that gives little padding when it is cut into batches of `batch_size`.

    For a `Trainer`, whose loader cuts the batches and hands them to `world` ranks in turn: return it from
    `_get_train_sampler`. The longest rows are not first, so memory may peak late; `epoch` is set by the loader.

    Args:
        lengths: tokens of every row                        # [n], or [n, 2] for source and target
        batch_size: rows of a batch on one rank
        world: number of ranks
        seed: with the epoch, all that decides the order
    """

    def __init__(self, lengths: ArrayLike, batch_size: int, *, world: int = 1, seed: int = 0) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("world", world, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadInput(f"{name}={value!r}: expected a whole number from {least}")
        self.key = length_key(lengths)
        self.batch_size, self.world, self.seed, self.epoch = batch_size, world, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.key)

    def __iter__(self) -> Iterator[int]:
        return (row for step in self.steps() for row in step)

    def steps(self) -> list[list[int]]:
        """The rows of every step, all ranks together; only the last step may be short."""
        generator = torch.Generator().manual_seed(_mix(self.seed, self.epoch))
        size = self.batch_size * self.world
        rows: list[int] = get_length_grouped_indices(self.key, size, generator=generator)
        steps = [rows[start : start + size] for start in range(0, len(rows), size)]
        full = len(rows) // size
        return [steps[place] for place in torch.randperm(full, generator=generator).tolist()] + steps[full:]


class GroupedBatches(Sampler[list[int]]):
    """Batches of rows of similar length for one rank: the `batch_sampler` of a plain `DataLoader`.

    Every row comes exactly once an epoch, on one rank. All ranks have the same number of batches, and at every step
    about the same length. Rows that do not fill a last step are spread over all ranks in smaller batches. Call
    `set_epoch` before every epoch. Do not also `prepare` the loader with Accelerate, which would divide it again: give
    `GroupedOrder` there.

    Args:
        lengths, batch_size, world, seed: as for `GroupedOrder`
        rank: whose batches these are
    """

    def __init__(self, lengths: ArrayLike, batch_size: int, *, rank: int = 0, world: int = 1, seed: int = 0) -> None:
        self.order = GroupedOrder(lengths, batch_size, world=world, seed=seed)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world:
            raise BadInput(f"rank={rank!r}: expected a whole number from 0 to {world - 1}, for world={world}")
        rows = len(self.order)
        if rows < world or (batch_size == 1 and rows % world):
            raise BadInput(f"{rows} rows cannot give {world} ranks the same number of batches of at most {batch_size}")
        self.rank, self.world, self.batch_size = rank, world, batch_size

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return -(-len(self.order) // (self.batch_size * self.world))

    def __iter__(self) -> Iterator[list[int]]:
        steps = self.order.steps()
        if len(steps[-1]) < self.world:  # too few for one each: take some from the step before
            rest = steps.pop(-2) + steps.pop(-1)
            steps += [rest[: len(rest) // 2], rest[len(rest) // 2 :]]
        return (_share(step, self.rank, self.world) for step in steps)


def _share(rows: list[int], rank: int, world: int) -> list[int]:
    """A rank's part of a step: rows that follow each other, as many as the others have or one more."""
    return rows[len(rows) * rank // world : len(rows) * (rank + 1) // world]


def _mix(seed: int, epoch: int) -> int:
    """One seed of two numbers, so that epoch 1 of seed 0 is not epoch 0 of seed 1."""
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _lengths(lengths: ArrayLike) -> NDArray[np.int64]:
    table: NDArray[Any] = np.asarray(lengths)
    if table.ndim not in (1, 2) or table.size == 0 or (table.ndim == 2 and table.shape[1] > 2):
        raise BadInput(f"lengths has shape {list(table.shape)}: expected [rows], or [rows, 2] for source and target")
    if table.dtype.kind not in "iu" or table.min() < 0:
        raise BadInput(f"lengths are {table.dtype} from {table.min()}: expected whole numbers from 0, tokens of a row")
    return table.reshape(len(table), -1).astype(np.int64)
