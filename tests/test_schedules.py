from __future__ import annotations

import pytest

from seqreg import BadInput, Every, StartAt, Warmup
from seqreg.schedules import weight_at


def test_schedules_nest() -> None:
    weight = Every(StartAt(2.0, start=4), k=2)
    assert [weight(step) for step in range(8)] == [0, 0, 0, 0, 4, 0, 4, 0]


def test_every_keeps_the_mean_weight() -> None:
    assert sum(Every(0.3, k=5)(step) for step in range(100)) / 100 == pytest.approx(0.3)


def test_warmup_starts_late_when_told() -> None:
    weight = Warmup(1.0, steps=10, start=100)
    assert [weight(step) for step in (0, 100, 105, 110, 500)] == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 10**400])
def test_bad_weights(value: float) -> None:
    with pytest.raises(BadInput, match="finite number >= 0"):
        weight_at(value, 3)
    with pytest.raises(BadInput, match="at step 7"):
        weight_at(lambda step: value, 7)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_bad_steps(steps: object) -> None:
    with pytest.raises(BadInput, match="steps="):
        Warmup(steps=steps)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="k="):
        Every(k=steps)  # type: ignore[arg-type]
