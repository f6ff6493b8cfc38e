"""`python -m benchmarks growth` and `profile`: exponents and shares on steps whose answer is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from benchmarks import growth, profile_step, step_cost
from benchmarks import steps as bench_steps


def test_exponents_of_powers() -> None:
    points = (1, 2, 4, 8)
    for power in (0.0, 1.0, 2.0):
        values = tuple(round(1000 * point**power) for point in points)
        curve = growth.Curve("", "rows", points, values, values, tuple(map(float, values)))
        assert [curve.exponent(of) for of in ("flops", "memory", "seconds")] == pytest.approx([power] * 3, abs=1e-6)


def test_operations_grow_as_the_formula_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linear in rows; in vocabulary and layers a line with an offset; attention alone is above linear in lengths."""
    small = dataclasses.replace(growth.BASE, width=16, classes=200, source=8, target=8, rows=2, layers=1)
    monkeypatch.setattr(growth, "BASE", small)
    monkeypatch.setattr(growth, "POINTS", {"rows": (1, 2, 4), "classes": (100, 200, 300), "source": (8, 16, 32)})
    curves = growth.measure(["r3f"])
    assert [(curve.axis, curve.name) for curve in curves[:3]] == [
        ("rows", bench_steps.HF), ("rows", bench_steps.PLAIN), ("rows", "r3f")
    ]  # fmt: skip
    for curve in curves:
        first, second, third = curve.flops
        if curve.axis == "rows":
            assert curve.exponent("flops") == pytest.approx(1.0, abs=1e-9)
        if curve.axis == "classes":
            assert third - second == second - first > 0
            assert curve.exponent("flops") < 1.0
        if curve.axis == "source":
            assert (third - second) > 2 * (second - first)
        assert min(curve.memory) > 0
        assert min(curve.seconds) > 0
    growth.plot(curves, str(tmp_path / "growth.png"))
    assert (tmp_path / "growth.png").stat().st_size > 10_000


def test_growth_is_timed_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the process alone is that of its one thread; afterwards there are as many as before."""
    small = dataclasses.replace(growth.BASE, width=16, classes=200, source=8, target=8, rows=2, layers=1)
    monkeypatch.setattr(growth, "BASE", small)
    monkeypatch.setattr(growth, "POINTS", {"rows": (1, 2, 3)})
    threads: list[int] = []
    monkeypatch.setattr(growth, "clock", lambda: threads.append(torch.get_num_threads()) or float(len(threads)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        growth.measure([])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1}


def test_kinds_of_operators() -> None:
    kinds = {
        "aten::mm": "matrix products",
        "aten::addmm": "matrix products",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::_fused_adamw_": "optimizer",
        "aten::gelu": "other operators",
    }
    assert {name: profile_step.kind_of(name) for name in kinds} == kinds


def test_a_step_of_products_is_one() -> None:
    model = torch.nn.Linear(1200, 1200, bias=False)
    data = torch.randn(4000, 1200)

    def step() -> None:
        model(data).sum().backward()

    found = profile_step.profile_step("linear", step, model, lambda step: 2 * 2 * 4000 * 1200 * 1200, 1e12)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.shares["matrix products"] == max(found.shares.values())
    assert found.shares["attention"] == 0.0
    assert found.of_peak == found.product_flops / found.product_seconds / 1e12
    assert 0 < found.shares["optimizer"] < 1


def test_plain_steps_and_terms_are_profiled() -> None:
    told: list[str] = []
    found = step_cost.profile("tiny", ["r3f"], progress=told.append)
    names = [bench_steps.HF, bench_steps.UNPREPARED, bench_steps.PLAIN, "r3f"]
    assert told == [each.name for each in found] == names
    assert len({each.product_flops for each in found[:3]}) == 1
    assert found[3].product_flops == 2 * found[2].product_flops
    assert all(0 < each.of_peak < 1.5 and each.shares["attention"] > 0 for each in found)
