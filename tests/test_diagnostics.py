from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from seqreg import Criterion, build_term
from seqreg.ascent import Ascent
from seqreg.build import term_names
from seqreg.integrations.hf import context, r4f
from seqreg.terms.bregman import Bregman
from seqreg.terms.freelb import FreeLB
from seqreg.terms.neftune import NEFTune
from seqreg.terms.r3f import R3F
from seqreg.terms.smart import SMART
from tests.helpers import tiny_models
from tests.integrations.test_trainer import losses, trainer


def diagnostics(net: Any, name: str, *terms: Any) -> dict[str, float]:
    criterion, ctx = Criterion(*terms), context(net, tiny_models.batch(name), step=0)
    criterion(ctx)
    return criterion.diagnostics(ctx)


def test_the_published_r3f_is_dropout() -> None:
    found = diagnostics(tiny_models.make("bart"), "bart", R3F())
    assert found["r3f/dropout_over_value"] == pytest.approx(1, rel=0.5)  # two draws of the masks differ
    assert found["r3f/noise_over_value"] < 1e-4
    assert found["r3f/delta_over_embedding"] < 1e-2


def test_r3f_with_shared_masks_is_noise() -> None:
    found = diagnostics(tiny_models.make("bart"), "bart", R3F(scale=0.05, relative=True, dropout="shared"))
    assert found["r3f/noise_over_value"] > 0.9
    assert found["r3f/dropout_over_value"] == 0
    assert found["r3f/delta_over_embedding"] == pytest.approx(0.05, rel=0.1)


@pytest.mark.filterwarnings("ignore:r3f. a perturbation of 0.0001 is below what bfloat16 resolves")
def test_rounding_is_told_from_noise() -> None:
    """At 1e-4 in bfloat16 what is left of the term is error of the arithmetic; in float32 it is noise."""
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    exact = diagnostics(net, "bart", R3F(scale=1e-2, dropout="shared"))
    with torch.autocast("cpu", torch.bfloat16):
        coarse = diagnostics(net, "bart", R3F(scale=1e-4, dropout="shared", unresolved="warn"))
    assert exact["r3f/rounding_over_value"] < 0.05
    assert coarse["r3f/rounding_over_value"] > 0.5


def test_an_ascent_tells_where_it_points() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    ours = diagnostics(net, "bart", SMART())
    assert ours["smart/delta_over_radius"] == pytest.approx(1, rel=1e-5)
    assert ours["smart/cosine_gradient"] > 0.5
    released = diagnostics(net, "bart", SMART(preset="mtdnn", attack=Ascent(inject="scaled")))
    assert released["smart/cosine_start"] > 0.95
    assert abs(released["smart/cosine_gradient"]) < 0.5


def test_others() -> None:
    net = tiny_models.make("bart")
    assert diagnostics(net, "bart", FreeLB())["freelb/rise"] > 0
    assert diagnostics(net, "bart", NEFTune())["neftune/delta_over_embedding"] > 0
    assert diagnostics(net, "bart", Bregman())["bregman/distance"] == 0


@pytest.mark.parametrize("term", term_names())
@pytest.mark.parametrize("model", ["bart", "roberta", "gpt2"])
def test_every_term_has_one_and_it_is_finite(term: str, model: str) -> None:
    found = diagnostics(tiny_models.make(model), model, build_term(term))
    assert f"{term}/part_over_base" in found
    assert all(torch.isfinite(torch.tensor(number)) for number in found.values())


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("term", term_names())
def test_it_changes_nothing(term: str, before: bool) -> None:
    """Value, gradient, generator, head and memory are the same with it as without, whenever it is called."""

    def run(with_diagnostics: bool) -> tuple[Any, ...]:
        net = r4f(tiny_models.make("roberta"), warmup=0)
        criterion = Criterion(build_term(term))
        torch.manual_seed(0)
        ctx = context(net, tiny_models.batch("roberta"), step=0)
        if with_diagnostics and before:
            criterion.diagnostics(ctx)
        report = criterion(ctx)
        if with_diagnostics and not before:
            criterion.diagnostics(ctx)
        report.total.backward()
        gradients = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        return report.total.detach(), gradients, torch.get_rng_state(), net.state_dict(), criterion.state_dict()

    plain, observed = run(False), run(True)
    assert plain[0] == observed[0]
    for a, b in zip(plain[1], observed[1], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert torch.equal(plain[2], observed[2])
    assert all(torch.equal(value, observed[3][key]) for key, value in plain[3].items())
    assert plain[4].keys() == observed[4].keys()


def test_trainers_log_it_and_train_the_same(tmp_path: Path) -> None:
    def run(steps: int) -> Any:
        net = tiny_models.make("bart")
        one = trainer("bart", tmp_path, R3F(), SMART(), net=net, max_steps=4, gradient_accumulation_steps=2)
        one.diagnostics_steps = steps
        one.train()
        return one

    plain, observed = run(0), run(2)
    for a, b in zip(plain.model.parameters(), observed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    with_it = [any(key.startswith("diagnostics/") for key in row) for row in losses(observed)]
    assert with_it == [True, False, True, False]
    assert {"diagnostics/r3f/dropout_over_value", "diagnostics/smart/delta_over_radius"} <= losses(observed)[0].keys()
    assert not any(key.startswith("diagnostics/") for row in losses(plain) for key in row)


def test_entropies_are_not_mistaken_for_dropout() -> None:
    from seqreg.terms.sift import SiFT

    found = diagnostics(tiny_models.dropout_off(tiny_models.make("bart")), "bart", SiFT(preset="deberta"))
    assert abs(found["sift/dropout_over_value"]) < 0.01
    assert "sift/delta_over_radius" not in found


@pytest.mark.parametrize("term", term_names())
def test_names_of_diagnostics_are_documented(term: str) -> None:
    """Ratios may be above 1, so that none is called a share."""
    found = diagnostics(tiny_models.make("bart"), "bart", build_term(term))
    assert found
    assert not any("share" in name for name in found)


def test_part_over_base_is_weighted() -> None:
    net = tiny_models.make("bart")
    torch.manual_seed(0)
    one = diagnostics(net, "bart", R3F(weight=1.0))["r3f/part_over_base"]
    torch.manual_seed(0)
    assert diagnostics(net, "bart", R3F(weight=3.0))["r3f/part_over_base"] == pytest.approx(3 * one, rel=1e-5)
