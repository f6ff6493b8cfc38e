"""Optimizer steps of a loop under an engine, and the same of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from seqreg import Criterion
from seqreg.ascent import Ascent
from seqreg.integrations.hf import context
from seqreg.terms.r3f import R3F
from seqreg.terms.smart import SMART
from tests.helpers import tiny_models
from tests.helpers.engine_cases import alone

TERMS = (R3F(weight=0.5, scale=0.1), SMART(attack=Ascent(relative=False)))
MICRO = 5
"""Micro-batches of a rank: the last of three optimizer steps of two has one."""


def micro_batches(rank: int, model: str = "bart") -> list[dict[str, Tensor]]:
    return [tiny_models.batch(model, rows=2, seed=10 * rank + piece) for piece in range(MICRO)]


def make(model: str = "bart") -> Any:
    return tiny_models.dropout_off(tiny_models.make(model))


def one_process(world: int, clipping: float = 0.0, model: str = "bart") -> dict[str, Tensor]:
    """What gradient descent on all micro-batches of all ranks comes to; noise has to be fixed."""
    net, criterion = make(model), Criterion(*TERMS, label_smoothing=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step, first in enumerate(range(0, MICRO, 2)):
        pieces = [piece for rank in range(world) for piece in micro_batches(rank, model)[first : first + 2]]
        net.zero_grad()
        whole = alone(SimpleNamespace(model=model), pieces)  # type: ignore[arg-type]
        for piece in pieces:
            criterion(context(net, piece, step=step, count=whole)).total.backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clipping)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """How far weights are from others, relative to their size."""
    assert found.keys() == expected.keys()
    moved = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (moved / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5
