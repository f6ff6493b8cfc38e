"""Optimizer steps of a loop of your own. Several ranks: test_distributed.py."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Criterion
from seqreg.integrations.hf import optimizer_steps
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models
from tests.integrations.test_hf_context import fixed_noise

ROWS = tiny_models.batch("bart", rows=6)


def pieces(size: int) -> list[dict[str, Tensor]]:
    return [{key: value[start : start + size] for key, value in ROWS.items()} for start in range(0, 6, size)]


@pytest.mark.parametrize("divisor", [None, 1, 3])
def test_the_gradient_does_not_depend_on_the_cut(divisor: int | None, monkeypatch: Any) -> None:
    """Without Accelerate, with it, and where it divides the gradient by accumulation steps of its own."""
    fixed_noise(monkeypatch)
    accelerator = None if divisor is None else accelerate.Accelerator(cpu=True)
    if accelerator is not None:
        accelerator.gradient_accumulation_steps = divisor
    gradients = {}
    for size in (6, 3, 1):
        net = tiny_models.dropout_off(tiny_models.make("bart"))
        for step, contexts in optimizer_steps(net, pieces(size), 6 // size, accelerator=accelerator, first=7):
            assert step == 7
            for ctx in contexts:
                assert ctx.step == 7
                total = Criterion(R3F(scale=0.1), label_smoothing=0.1)(ctx).total
                total.backward() if accelerator is None else accelerator.backward(total)
        gradients[size] = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    for size in (3, 1):
        assert (gradients[size] - gradients[6]).norm() <= 1e-6 * gradients[6].norm()


def test_the_last_step_has_what_is_left() -> None:
    net = tiny_models.make("bart")
    steps = [(step, [ctx.count.sequences for ctx in contexts]) for step, contexts in optimizer_steps(net, pieces(1), 4)]
    assert steps == [(0, [4.0] * 4), (1, [2.0] * 2)]
    assert list(optimizer_steps(net, [], 4)) == []
    with pytest.raises(BadInput, match=r"gradient_accumulation_steps=0: expected a whole number >= 1"):
        next(optimizer_steps(net, pieces(1), 0))
