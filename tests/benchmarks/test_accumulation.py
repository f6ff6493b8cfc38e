"""The table of gradient accumulation: one step has one loss and one gradient, however it is cut."""

from __future__ import annotations

import pytest

from benchmarks.accumulation import CUTS, TINY, measurements, step, table, tiny
from seqreg import Criterion


@pytest.mark.parametrize("name", TINY)
def test_loss_and_gradient_with_attach_are_equal_across_cuts(name: str) -> None:
    model = tiny(name)
    first, *others = (step(model, batch, cuts, Criterion()) for batch, cuts in CUTS)
    assert first == pytest.approx(step(model, 16, 1, None), rel=1e-5)  # uncut, the stock Trainer has the same numbers
    for other in others:
        assert other == pytest.approx(first, rel=1e-5)


def test_the_table_has_a_row_per_trainer_and_a_column_per_cut() -> None:
    lines = table({"BART": tiny("BART")}).splitlines()
    assert [line.count("|") for line in lines] == [len(CUTS) + 3] * 4
    assert "| BART | with `attach` |" in lines[3]
    assert len(measurements({"BART": tiny("BART")})) == 2 * len(CUTS)
