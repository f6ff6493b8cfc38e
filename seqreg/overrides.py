"""What is different for a while: generators, training mode, dropout rates, weights. All of it is restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def generator_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Of the CPU, and of another device if it is one."""
    here = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), here


@contextlib.contextmanager
def replay(state: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    """The generators begin in this state inside, and are afterwards as they were before."""
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.get_device_module(device).set_rng_state(state[1], device)
        yield


@contextlib.contextmanager
def training_off(modules: Iterator[nn.Module]) -> Iterator[None]:
    """These modules are in evaluation mode inside: no dropout, no power iteration."""
    switched = [module for module in modules if module.training]
    try:
        for module in switched:
            module.training = False
        yield
    finally:
        for module in switched:
            module.training = True


@contextlib.contextmanager
def dropout_rate(module: nn.Module, rate: float, dropouts: tuple[type[nn.Module], ...]) -> Iterator[None]:
    """Another dropout probability inside: `dropouts` have it in `p`, transformers in modules or their configuration."""
    changed: list[tuple[Any, str, Any]] = []
    owners = {id(owner): owner for part in module.modules() for owner in (part, getattr(part, "config", part))}
    try:
        for owner in owners.values():
            for name, value in list(vars(owner).items()):
                known = name == "p" if isinstance(owner, dropouts) else "dropout" in name
                if known and isinstance(value, (int, float)) and not isinstance(value, bool):
                    changed.append((owner, name, value))
                    setattr(owner, name, rate)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


@contextlib.contextmanager
def swapped_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in some parameters inside. Only the storage is exchanged: graphs that saved the originals hold."""
    own = {name: parameter.data for name, parameter in module.named_parameters() if name in weights}
    torch.clear_autocast_cache()  # of casts of the same parameters
    try:
        for name, parameter in module.named_parameters():
            if name in weights:
                parameter.data = weights[name].to(parameter.dtype)
        yield
    finally:
        for name, parameter in module.named_parameters():
            if name in own:
                parameter.data = own[name]
        torch.clear_autocast_cache()
