"""Exponential moving averages of weights: float32 copies by name, brought nearer to the weights in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seqreg.losses import at_least_float32


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def float_copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of the values of parameters, at least in float32."""
    return {name: at_least_float32(parameter.detach()).clone() for name, parameter in parameters.items()}


@torch.no_grad()
def update_average(average: dict[str, Tensor], parameters: Mapping[str, nn.Parameter], decay: float) -> None:
    """average <- decay * average + (1 - decay) * parameters; one that was loaded on the CPU moves to their device."""
    for name, parameter in parameters.items():
        average[name] = average[name].to(parameter.device)
        average[name].lerp_(at_least_float32(parameter.detach()), 1 - decay)


def is_average_of(average: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether names and shapes are the same."""
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    return {name: value.shape for name, value in average.items()} == shapes
