"""Batches of like length: little padding, every row once, the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from seqreg.bench.batch_padding import compare, gigaword_lengths
from seqreg.errors import BadInput
from seqreg.workbench.data.batches import GroupedBatches, GroupedOrder, length_key, padding_waste

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
    assert found["ours"] == padding_waste(LENGTHS, GroupedBatches(LENGTHS, size))


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("rows", [1, 7, 64, 65, 100, 129, 1000])
@pytest.mark.parametrize(("size", "world"), [(1, 1), (8, 1), (64, 1), (8, 2), (2, 3), (5, 7), (64, 4)])
def test_every_row_once_and_as_many_batches_on_every_rank(rows: int, size: int, world: int, epoch: int) -> None:
    if rows < world:
        with pytest.raises(BadInput, match=f"{rows} rows cannot give {world} ranks"):
            GroupedBatches(LENGTHS[:rows], size, world=world)
        return
    ranks = [GroupedBatches(LENGTHS[:rows], size, rank=rank, world=world) for rank in range(world)]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in ranks]
    assert sorted(row for own in batches for batch in own for row in batch) == list(range(rows))
    assert {len(own) for own in batches} == {len(sampler) for sampler in ranks} == {-(-rows // (size * world))}
    assert all(1 <= len(batch) <= size for own in batches for batch in own)


def test_ranks_see_about_the_same_length_at_a_step() -> None:
    world = [list(GroupedBatches(LENGTHS, 16, rank=rank, world=4)) for rank in range(4)]
    longest = np.array([[LENGTHS[batch].max(0).sum() for batch in own] for own in world])  # [ranks, steps]
    across = (longest.max(0) - longest.min(0))[:-1].mean()
    assert across < 0.5 * longest.std()
    assert np.mean([padding_waste(LENGTHS, own) for own in world]) < 0.10


def test_order_comes_from_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        sampler = GroupedBatches(LENGTHS, 32, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = order(0, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert order(0, 1) == first
    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    again = GroupedBatches(LENGTHS, 32)
    assert list(again) == list(again)  # until set_epoch


def test_batches_come_in_random_order_and_mix_anew() -> None:
    sampler = GroupedBatches(LENGTHS, 32)
    first = list(sampler)
    means = np.array([LENGTHS[batch, 0].mean() for batch in first])
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3  # neighbours in time are not alike
    sampler.set_epoch(1)
    assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in sampler}


@pytest.mark.parametrize("world", [1, 3])
def test_order_cut_into_batches_is_the_batches(world: int) -> None:
    """As a trainer's loader cuts, and hands to ranks in turn."""
    cut = list(BatchSampler(GroupedOrder(LENGTHS, 32, world=world), 32, drop_last=False))
    full = len(LENGTHS) // (32 * world)
    for rank in range(world):
        own = list(GroupedBatches(LENGTHS, 32, rank=rank, world=world))
        assert cut[rank::world][:full] == own[:full]
    assert len(GroupedOrder(LENGTHS, 32)) == len(LENGTHS)


def test_in_a_loader() -> None:
    loader: Any = DataLoader(list(range(100)), batch_sampler=GroupedBatches(LENGTHS[:100], 8))
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(100))
    assert len(loader) == 13


def test_key_of_one_length_is_the_length() -> None:
    assert length_key([5, 2, 9]) == [5, 2, 9]
    assert sorted(length_key(LENGTHS)) == list(range(len(LENGTHS)))
    assert padding_waste(LENGTHS[:, 0], GroupedBatches(LENGTHS[:, 0], 16)) < 0.05


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
        (([1, 2], 4), {"rank": 2, "world": 2}, "rank=2: expected a whole number from 0 to 1"),
        (([1, 2, 3], 1), {"world": 2}, "3 rows cannot give 2 ranks the same number of batches of at most 1"),
    ],
)
def test_bad_input(arguments: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        GroupedBatches(*arguments, **options)


def test_no_batches_have_no_waste() -> None:
    with pytest.raises(BadInput, match="batches hold no tokens"):
        padding_waste([1, 2], [])
