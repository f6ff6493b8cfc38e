"""Weights that a term keeps to compare the model with: a copy of the start, or a moving average; part of its state.

They are kept in `Evaluation.memory` under the name of the term: `w/<parameter>` for every trained parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seqreg.context import Evaluation
from seqreg.errors import BadInput
from seqreg.losses import at_least_float32

PREFIX = "w/"


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by name; one that is used in several places has one name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def start(ctx: Evaluation, owner: str, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The values that parameters had when this was first asked for, in their own precision.

    Args:
        owner: the name of the term
    """
    if owner not in ctx.memory:
        if ctx.step and parameters:
            ctx.notes[owner] = (
                f"its reference is the model at step {ctx.step}, where it was first used: to resume a run, load "
                "Criterion.state_dict() of its checkpoint"
            )
        ctx.memory[owner] = {f"{PREFIX}{name}": parameter.detach().clone() for name, parameter in parameters.items()}
    return _kept(ctx, owner, parameters)


@dataclass(frozen=True)
class MovingAverage:
    """w' <- beta * w' + (1 - beta) * w once an optimizer step; starts at the weights, in float32 at least.

    Args:
        beta: for the first `switch` updates
        beta_late: from then on
    """

    beta: float
    beta_late: float
    switch: int = 0

    @torch.no_grad()
    def __call__(self, ctx: Evaluation, owner: str, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The averaged weights, brought up to date if an optimizer step was made since they were last used."""
        if ctx.step is None:
            raise BadInput(f"{owner} averages once an optimizer step: pass context(..., step=step)")
        now = torch.tensor(ctx.step)
        if owner not in ctx.memory:
            copies = {f"{PREFIX}{name}": _copy(parameter) for name, parameter in parameters.items()}
            ctx.memory[owner] = {**copies, "step": now, "updates": torch.tensor(0)}
        memory = ctx.memory[owner]
        average = _kept(ctx, owner, parameters)
        if memory["step"] != now:
            passed = max(int(now - memory["step"]), 1)
            beta = (self.beta if int(memory["updates"]) < self.switch else self.beta_late) ** passed
            for name, parameter in parameters.items():
                average[name].lerp_(at_least_float32(parameter.detach()), 1 - beta)
            memory["updates"] += passed
            memory["step"] = now
        return average


def _kept(ctx: Evaluation, owner: str, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What is in memory, where the parameters are: what was loaded is on the CPU."""
    memory = ctx.memory[owner]
    shapes = {key.removeprefix(PREFIX): value.shape for key, value in memory.items() if key.startswith(PREFIX)}
    if shapes != {name: parameter.shape for name, parameter in parameters.items()}:
        raise BadInput(f"{owner}: the trained parameters are not those that it keeps: begin a new criterion")
    for name, parameter in parameters.items():
        memory[f"{PREFIX}{name}"] = memory[f"{PREFIX}{name}"].to(parameter.device)
    return {name: memory[f"{PREFIX}{name}"] for name in parameters}


def distance(parameters: Mapping[str, nn.Parameter], others: Mapping[str, Tensor]) -> float:
    """How far weights are from others, |w - w'| / |w|."""
    own = {name: at_least_float32(parameter.detach()) for name, parameter in parameters.items()}
    apart = sum(float((own[name] - others[name]).square().sum()) for name in own)
    whole = sum(float(weight.square().sum()) for weight in own.values())
    return (apart / whole) ** 0.5 if whole else 0.0


def _copy(parameter: nn.Parameter) -> Tensor:
    return at_least_float32(parameter.detach()).clone()
