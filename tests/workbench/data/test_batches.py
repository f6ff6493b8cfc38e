"""Batches of similar length: little padding, every example once, the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from benchmarks.batch_padding import compare, gigaword_lengths, padding_waste
from seqreg.errors import BadInput
from seqreg.workbench.data.batches import GroupedOrder, length_key

LENGTHS = gigaword_lengths(6486)


def test_waste_is_counted_by_hand() -> None:
    lengths = [[3, 1], [5, 4], [2, 2]]
    assert padding_waste(lengths, [[0, 1], [2]]) == 1 - 17 / (2 * 9 + 4)
    assert padding_waste(lengths, [[0], [1], [2]]) == 0.0
    assert padding_waste([3, 5, 2], [[0, 1, 2]]) == 1 - 10 / 15


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_less_than_a_tenth_is_padding(size: int) -> None:
    found = compare(sizes=[size])[size]
    assert found["ours"] < 0.10 < 0.19 < found["random"]
    assert found["ours"] < 0.8 * found["source"] < found["sum"]
    assert found["ours"] == padding_waste(LENGTHS, batches(LENGTHS, size))


def batches(
    lengths: Any, size: int, *, rank: int = 0, world: int = 1, seed: int = 0, epoch: int = 0
) -> list[list[int]]:
    """The batches of a rank, as a trainer's loader cuts them and hands them to ranks in turn."""
    order = GroupedOrder(lengths, size, world=world, seed=seed)
    order.set_epoch(epoch)
    return list(BatchSampler(order, size, drop_last=False))[rank::world]


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("count", [1, 7, 64, 65, 100, 129, 1000])
@pytest.mark.parametrize(("size", "world"), [(1, 1), (8, 1), (64, 1), (8, 2), (2, 3), (5, 7), (64, 4)])
def test_every_example_once(count: int, size: int, world: int, epoch: int) -> None:
    ranks = [batches(LENGTHS[:count], size, rank=rank, world=world, epoch=epoch) for rank in range(world)]
    assert sorted(index for rank in ranks for batch in rank for index in batch) == list(range(count))
    assert all(len(batch) == size for rank in ranks for batch in rank[: count // (size * world)])
    assert sum(len(rank) for rank in ranks) == -(-count // size)


def test_ranks_see_about_the_same_length_at_a_step() -> None:
    world = [batches(LENGTHS, 16, rank=rank, world=4)[: len(LENGTHS) // 64] for rank in range(4)]
    longest = np.array([[LENGTHS[batch].max(0).sum() for batch in rank] for rank in world])  # [ranks, steps]
    across = (longest.max(0) - longest.min(0)).mean()
    assert across < 0.5 * longest.std()
    assert np.mean([padding_waste(LENGTHS, rank) for rank in world]) < 0.10


def test_order_comes_from_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return batches(LENGTHS, 32, seed=seed, epoch=epoch)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = order(0, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert order(0, 1) == first
    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    again = GroupedOrder(LENGTHS, 32)
    assert list(again) == list(again)  # until set_epoch


def test_batches_come_in_random_order_and_mix_anew() -> None:
    first = batches(LENGTHS, 32)
    means = np.array([LENGTHS[batch, 0].mean() for batch in first])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3  # neighbours in time are not alike
    assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in batches(LENGTHS, 32, epoch=1)}


def test_in_a_loader() -> None:
    loader: Any = DataLoader(list(range(100)), 8, sampler=GroupedOrder(LENGTHS[:100], 8))
    assert [batch.tolist() for batch in loader] == batches(LENGTHS[:100], 8)
    assert len(loader) == 13
    assert len(GroupedOrder(LENGTHS, 32)) == len(LENGTHS)


def test_key_of_one_length_is_the_length() -> None:
    assert length_key([5, 2, 9]) == [5, 2, 9]
    assert sorted(length_key(LENGTHS)) == list(range(len(LENGTHS)))
    assert padding_waste(LENGTHS[:, 0], batches(LENGTHS[:, 0], 16)) < 0.05


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([], 4), {}, r"lengths has shape \[0\]"),
        (([[1, 2, 3]], 4), {}, r"lengths has shape \[1, 3\]"),
        (([1.5], 4), {}, "lengths are float64 from 1.5"),
        (([-1], 4), {}, "lengths are int64 from -1"),
        (([1], 0), {}, "batch_size=0: expected a whole number from 1"),
        (([1], True), {}, "batch_size=True"),
        (([1], 4), {"world": 0}, "world=0"),
        (([1], 4), {"seed": -1}, "seed=-1: expected a whole number from 0"),
    ],
)
def test_bad_input(arguments: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        GroupedOrder(*arguments, **options)


def test_no_batches_have_no_waste() -> None:
    with pytest.raises(BadInput, match="batches hold no tokens"):
        padding_waste([1, 2], [])
