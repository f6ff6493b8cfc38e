"""Ranks that are killed at random instants: what torchrun starts again ends with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import faults


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_killed_ranks_end_with_identical_weights(engine: str, tmp_path: Path) -> None:
    if engine == "zero2":
        pytest.importorskip("deepspeed")
    tally = faults.run(4, seed=20, folder=tmp_path, engine=engine)
    assert (tally.kills, tally.same, tally.lost) == (4, 4, 0), str(tally)
