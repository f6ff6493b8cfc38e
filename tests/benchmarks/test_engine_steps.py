"""A step on two ranks holds less with the fused head and has the same loss; times are only printed."""

from __future__ import annotations

import pytest

from benchmarks import engine_steps
from benchmarks.sizes import Size


def test_fsdp2_with_a_fused_head() -> None:
    size = Size(width=32, layers=1, heads=2, classes=20000, source=8, target=64, rows=4, together=2)
    told: list[str] = []
    measured = engine_steps.measure("fsdp2", size, progress=told.append)
    assert told == ["fsdp2, 2 ranks, plain head", "fsdp2, 2 ranks, fused head"]
    assert measured.plain.loss == pytest.approx(measured.fused.loss, abs=1e-6)
    assert measured.memory <= 0.35  # the buffer of logits is as large as this whole batch
