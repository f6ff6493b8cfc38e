"""What is different for a while: generators, training mode, dropout rates, weights. All of it is restored.

The other weights are those that terms keep from step to step: a copy of the start, or a moving average.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from seqreg.engines.shards import full, like
from seqreg.errors import BadInput
from seqreg.losses import at_least_float32

Memory = dict[str, dict[str, Tensor]]
"""What terms keep from step to step, by name."""


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
    """Other values in some parameters and buffers inside.

    Only the storage is exchanged: graphs that saved the originals hold.
    """
    tensors = dict(itertools.chain(module.named_parameters(), module.named_buffers()))
    own = {name: tensor.data for name, tensor in tensors.items() if name in weights}
    torch.clear_autocast_cache()  # of casts of the same parameters
    try:
        for name in own:
            tensors[name].data = weights[name].to(own[name].dtype)
        yield
    finally:
        for name, data in own.items():
            tensors[name].data = data
        torch.clear_autocast_cache()


KEPT = "w/"
"""Before the name of every parameter that a term keeps in its state."""


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by name; one that is used in several places has one name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def moved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to the values of weights, by name: those of parametrizations, as of spectral norm."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, part in module.named_modules()
        if isinstance(part, ParametrizationList)
        for name, buffer in part.named_buffers()
    }


@torch.no_grad()
def start_weights(
    memory: Memory, owner: str, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The values that parameters and their buffers had when this was first asked for, in their own precision.

    Args:
        memory: what terms keep from step to step
        owner: the name of the term
    """
    if owner not in memory:
        own = {**parameters, **buffers}
        memory[owner] = {f"{KEPT}{name}": tensor.detach().clone() for name, tensor in own.items()}
    return _kept(memory[owner], owner, {**parameters, **buffers})


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
    def __call__(
        self,
        memory: Memory,
        owner: str,
        parameters: Mapping[str, nn.Parameter],
        step: int | None,
        *,
        module: nn.Module,
    ) -> dict[str, Tensor]:
        """The averaged weights, brought up to date if an optimizer step was made since they were last used.

        Args:
            module: the model of the parameters; the buffers of its parametrizations are kept beside the average, and
                move on with it
        """
        if step is None:
            raise BadInput(f"{owner} averages once an optimizer step: pass context(..., step=step)")
        now = torch.tensor(step)
        own: dict[str, Tensor] = {**parameters, **moved_buffers(module)}
        if owner not in memory:
            copies = {f"{KEPT}{name}": at_least_float32(tensor.detach()).clone() for name, tensor in own.items()}
            memory[owner] = {**copies, "step": now, "updates": torch.tensor(0)}
        state = memory[owner]
        average = _kept(state, owner, own)
        if step < int(state["step"]):
            raise BadInput(f"{owner}: step={step} comes after step {int(state['step'])}: count steps over all epochs")
        if state["step"] != now:
            passed = int(now - state["step"])
            beta = (self.beta if int(state["updates"]) < self.switch else self.beta_late) ** passed
            for name, parameter in parameters.items():
                average[name].lerp_(at_least_float32(parameter.detach()), 1 - beta)
            if len(own) > len(parameters):
                with swapped_weights(module, average):
                    for part in module.modules():
                        if isinstance(part, ParametrizationList):
                            part()  # one iteration for the averaged weights
            state["updates"] += passed
            state["step"] = now
        return average


def _kept(state: dict[str, Tensor], owner: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is in the state of a term, where the parameters are: what was loaded is on the CPU, and whole."""
    shapes = {key.removeprefix(KEPT): value.shape for key, value in state.items() if key.startswith(KEPT)}
    if shapes != {name: parameter.shape for name, parameter in parameters.items()}:
        raise BadInput(f"{owner}: the trained parameters are not those that it keeps: begin a new criterion")
    for name, parameter in parameters.items():
        state[f"{KEPT}{name}"] = like(state[f"{KEPT}{name}"], parameter)
    return {name: state[f"{KEPT}{name}"] for name in parameters}


def distance(parameters: Mapping[str, nn.Parameter], others: Mapping[str, Tensor]) -> float:
    """How far weights are from others, |w - w'| / |w|."""
    own = {name: at_least_float32(parameter.detach()) for name, parameter in parameters.items()}
    apart = sum(float(full((own[name] - others[name]).square().sum())) for name in own)
    whole = sum(float(full(weight.square().sum())) for weight in own.values())
    return (apart / whole) ** 0.5 if whole else 0.0
