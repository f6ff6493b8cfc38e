"""Passes with other weights, and what is kept for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from seqreg import BadInput, Criterion, Evaluation, Term
from seqreg.integrations.hf import context
from seqreg.integrations.hf.model import r4f
from seqreg.overrides import KEPT
from seqreg.terms.anchor import Anchor
from seqreg.terms.bregman import Bregman
from tests.helpers import tiny_models


def train_far(net: Any, criterion: Criterion, steps: int = 6) -> None:
    """Steps so large that the head's singular vectors turn."""
    optimizer = torch.optim.SGD(net.parameters(), 3.0)
    for step in range(steps):
        optimizer.zero_grad()
        criterion(context(net, tiny_models.batch("roberta"), step=step)).total.backward()
        optimizer.step()


def test_the_start_of_a_normalised_head_gives_what_the_model_gave() -> None:
    """The vectors of the power iteration are those of the start, and are back after the pass."""
    net = tiny_models.dropout_off(r4f(tiny_models.make("roberta"), warmup=2))
    batch, criterion = tiny_models.batch("roberta"), Criterion(Anchor(weight=1e-6))
    first = context(net, batch, step=0)
    at_start = criterion(first)
    assert at_start.clean is not None
    expected = at_start.clean.logits.detach()
    train_far(net, criterion)
    ctx = Evaluation(context(net, batch, step=7))
    _ = ctx.clean
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    kept = {name.removeprefix(KEPT): value for name, value in criterion.memory["anchor"].items()}
    view = ctx.forward(dropout="off", grad=False, weights=kept)
    torch.testing.assert_close(view.logits, expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())
    parameters = {name: kept[name] for name, _ in net.named_parameters()}
    without = ctx.forward(dropout="off", grad=False, weights=parameters)
    assert (without.logits - expected).norm() > 1e-4 * expected.norm(), "these steps turn no vector"


@pytest.mark.parametrize("term", [Bregman(weight=1e-6, beta=0.5), Anchor(weight=1e-6, reference="average", beta=0.5)])
def test_the_average_of_a_normalised_head_is_normalised(term: Term) -> None:
    """Its spectral norm is that of the averaged weights, not of the model's."""
    net = tiny_models.dropout_off(r4f(tiny_models.make("roberta")))
    criterion = Criterion(term)
    train_far(net, criterion, 12)
    state = {name.removeprefix(KEPT): value for name, value in criterion.memory[term.name].items()}
    prefixes = [name.removesuffix(".original") for name in state if name.endswith(".original")]
    assert prefixes
    for prefix in prefixes:
        weight, u, v = state[f"{prefix}.original"], state[f"{prefix}.0.u"], state[f"{prefix}.0.v"]
        assert float(u @ weight @ v) == pytest.approx(float(torch.linalg.svdvals(weight)[0]), rel=1e-3)


@pytest.mark.parametrize("term", [Bregman(), Anchor(reference="average")])
def test_an_average_refuses_steps_that_go_backwards(term: Term) -> None:
    net, criterion = tiny_models.make("bart"), Criterion(term)
    criterion(context(net, tiny_models.batch("bart"), step=4))
    with pytest.raises(BadInput, match=rf"^{term.name}: step=0 comes after step 4: count steps over all epochs$"):
        criterion(context(net, tiny_models.batch("bart"), step=0))
