"""Batches with little padding, or none: examples of similar length in a batch, and bins of short ones.

`DataCollatorForSeq2Seq` already pads to the longest example of its batch; what is left to do is to put like with like.
The windows and their sorting are transformers' own (`get_length_grouped_indices`). This file adds what that lacks: a
key that sorts by source *and* target length, batches in random order, the same order from the same (seed, epoch), and
ranks that see batches of about the same length at the same step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices

from seqreg.errors import BadInput

_STRIPS = 12


def length_key(lengths: ArrayLike) -> list[int]:
    """One number per example, to sort by: neighbours are alike in source and in target length.

    Examples are cut by source length into strips of equal size; the targets rise through one strip and fall through the
    next. The source alone leaves targets unlike, and the sum of both leaves both unlike.
    """
    table = length_table(lengths)
    if table.shape[1] == 1:
        return [int(length) for length in table[:, 0]]
    source, target = table.T
    strips = np.array_split(np.lexsort((target, source)), _STRIPS)
    ordered = [
        strip[np.argsort(target[strip], kind="stable")][:: 1 if odd % 2 else -1] for odd, strip in enumerate(strips)
    ]
    key = np.empty(len(table), dtype=np.int64)
    key[np.concatenate(ordered)] = np.arange(len(table))
    return [int(position) for position in key]


class GroupedOrder(Sampler[int]):
    """Indices of examples in an order that gives little padding when it is cut into batches of `batch_size`.

    For a `Trainer`, whose loader cuts the batches and hands them to `world` ranks in turn: return it from
    `_get_train_sampler`; for a plain `DataLoader` of one rank give it as `sampler`, and call `set_epoch` before every
    epoch. The longest examples are not first, so memory may peak late.

    Args:
        lengths: tokens of every example                    # [n], or [n, 2] for source and target
        batch_size: examples in a batch on one rank
        world: number of ranks
        seed: with the epoch, all that decides the order
    """

    def __init__(self, lengths: ArrayLike, batch_size: int, *, world: int = 1, seed: int = 0) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("world", world, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadInput(f"{name}={value!r}: expected a whole number from {least}")
        self.key = length_key(lengths)
        self.step_size, self.seed, self.epoch = batch_size * world, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.key)

    def __iter__(self) -> Iterator[int]:
        """Steps of all ranks together, in random order; only the last step may be short."""
        seeds = np.random.SeedSequence((self.seed, self.epoch))  # epoch 1 of seed 0 is not epoch 0 of seed 1
        generator = torch.Generator().manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> np.uint64(1)))
        indices: list[int] = get_length_grouped_indices(self.key, self.step_size, generator=generator)
        full = len(indices) // self.step_size
        for step in [*torch.randperm(full, generator=generator).tolist(), full]:
            yield from indices[step * self.step_size : (step + 1) * self.step_size]


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of examples by bin: the longest example first, each into the fullest bin that it fits into.

    TRL's `packing_strategy="bfd"`; no length is above `capacity`.
    """
    bins: list[list[int]] = []
    by_space: defaultdict[int, deque[int]] = defaultdict(deque)  # bins with so many tokens left
    spaces: list[int] = []  # of the bins that have any, sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(spaces, lengths[index])
        if place == len(spaces):
            number, space = len(bins), capacity
            bins.append([])
        else:
            space = spaces[place]
            number = by_space[space].popleft()
            if not by_space[space]:
                spaces.pop(place)
        bins[number].append(index)
        if left := space - lengths[index]:
            if not by_space[left]:
                insort(spaces, left)
            by_space[left].append(number)
    return bins


def length_table(lengths: ArrayLike) -> NDArray[np.int64]:
    """Lengths as [n, 1] or [n, 2]."""
    table: NDArray[Any] = np.asarray(lengths)
    if table.ndim not in (1, 2) or table.size == 0 or (table.ndim == 2 and table.shape[1] > 2):
        raise BadInput(f"lengths has shape {list(table.shape)}: expected [n], or [n, 2] for source and target")
    if table.dtype.kind not in "iu" or table.min() < 0:
        raise BadInput(f"lengths are {table.dtype} from {table.min()}: expected whole numbers of tokens, from 0")
    return table.reshape(len(table), -1).astype(np.int64)
