"""What `python -m benchmarks frontier` measures, on models whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import frontier
from benchmarks.sizes import Size
from seqreg import BadInput
from seqreg.build import build_term
from seqreg.terms import r3f
from seqreg.workbench.config import run_config

SIZE = Size(width=32, layers=4, heads=2, classes=60, source=12, target=8, rows=4, together=1)


def gradients(*draws: list[float]) -> frontier._Gradients:
    found = frontier._Gradients(torch.zeros(len(draws[0])), [], [])
    for values in draws:
        gradient = torch.tensor(values)
        found.squares.append(float(gradient.square().sum()))
        found.products.append(0.0)
        found.total += gradient
    return found


def test_the_norm_of_a_mean_is_without_bias() -> None:
    """Over all pairs of different draws: (1, 3) . (1, -3) = -8 is no squared norm, (1, 1) . (1, 0) = 1 is."""
    assert gradients([1.0, 1.0], [1.0, 0.0]).mean_square == 1.0
    assert gradients([1.0, 3.0], [1.0, -3.0]).mean_square == 0.0
    torch.manual_seed(0)
    noisy = gradients(*(torch.cat([torch.ones(1), torch.randn(2000)]).tolist() for _ in range(40)))
    assert noisy.mean_square == pytest.approx(1.0, abs=5 * math.sqrt(2 * 2000) / 40)


def test_every_keeps_the_mean_and_has_larger_squares() -> None:
    whole = frontier.GradientCost("whole", 2.0, 1.0, 1.0, 0.8, 0.1)
    assert frontier.every(whole, 4) == frontier.GradientCost("Every(k=4)", 1.25, 1.0, 1.0, 0.4, 0.05)


def test_the_gradient_is_that_of_the_term_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout and with the same noise every draw is the same: cosines of 1."""
    monkeypatch.setattr(r3f, "sample", lambda noise, states, *_: 0.1 * torch.ones_like(states))
    model, batch = SIZE.model().eval(), SIZE.batch()
    term = build_term("r3f", frontier.WHOLE["noise"])
    whole = frontier.draw(term, model, batch, range(3))
    again = frontier.draw(term, model, batch, range(3, 6), whole)
    row = again.compare("again", 2.0, whole)
    assert (row.cosine, row.norm, row.step_cosine) == pytest.approx((1.0, 1.0, 1.0), rel=1e-4)
    assert row.error == pytest.approx(0.0, abs=1e-3)
    doubled = frontier.draw(build_term("r3f", {**frontier.WHOLE["noise"], "weight": 2.0}), model, batch, [0, 1], whole)
    assert doubled.compare("doubled", 2.0, whole).norm == pytest.approx(2.0, rel=1e-4)


def test_forms_of_a_model() -> None:
    names = list(frontier.forms("masks", SIZE.model()))
    layers = ["encoder, layer=1", "encoder, layer=2", "encoder, layer=3", "decoder, layer=0", "decoder, layer=2"]
    assert names[:6] == ["whole", *layers]
    assert "example_fraction=0.5" in names
    assert "example_fraction=0.5" not in frontier.forms("noise", SIZE.model())


def test_a_recipe_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "model_and_batch", lambda run: (SIZE.model(), SIZE.batch()))
    run: Any = run_config.resolve("quickstart")
    measured = frontier.measure(run, draws=2)
    for rows in measured.rows.values():
        by_name = {row.name: row for row in rows}
        assert by_name["whole"].flops == 2.0
        assert 1.0 < by_name["decoder, layer=2"].flops < by_name["decoder, layer=0"].flops < 2.0
        assert by_name["Every(k=2)"].flops == 1.5
    frontier.plot(measured, str(tmp_path / "frontier.png"))
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    with pytest.raises(BadInput, match="draws=1"):
        frontier.measure(run, draws=1)
