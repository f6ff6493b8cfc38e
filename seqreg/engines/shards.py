"""Weights that FSDP2 (`torch.distributed.fsdp.fully_shard`) keeps as shards.

Every module that `fully_shard` was called on owns a group of weights: shards between passes, whole inside them. What is
done to weights outside of a pass is in this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seqreg.engines.detect import check_held, is_fsdp2, is_sharded, world_size
from seqreg.errors import BadInput


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; where it is sharded every rank has to ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    data = tensor.detach()
    return data.to_local() if is_sharded(data) else data  # type: ignore[attr-defined]


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A tensor on the device of a parameter, and cut as that is: what was saved whole is sharded, and the reverse."""
    if not is_sharded(parameter):
        return full(tensor).to(parameter.device)
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if is_sharded(tensor):
        return tensor.redistribute(mesh, placements)  # type: ignore[attr-defined, no-any-return]
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(parameter.device), mesh, placements)


class Shards:
    """The weights of a model that FSDP2 has sharded.

    Args:
        groups: the modules that `fully_shard` was called on
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups = groups
        policies = {group._get_fsdp_state()._mp_policy.param_dtype for group in groups}
        if len(policies) > 1:
            raise BadInput(f"FSDP2: mp_policy.param_dtype is {_names(policies)} in one model: use one for all modules")
        self.param_dtype: torch.dtype | None = policies.pop()
        """What weights are cast to in every pass, whatever they are kept in."""

    @classmethod
    def of(cls, model: nn.Module) -> Shards | None:
        """The shards of a model; None where FSDP2 does not hold it."""
        groups: list[Any] = [module for module in model.modules() if is_fsdp2(module)]
        if not groups:
            return None
        for name, parameter in model.named_parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is None:
                continue  # whole at the moment, or left out
            cut = [placement for placement in parameter.placements if not placement.is_replicate()]  # type: ignore[attr-defined]
            if mesh.size() != world_size() or len(cut) > 1:
                raise BadInput(
                    f"FSDP2 holds {name} on a mesh of {mesh.size()} of {world_size()} ranks, cut {len(cut)} times: "
                    "shard over all ranks, without tensor or pipeline parallelism"
                )
        held = [group for module in groups for group in module._get_fsdp_state()._fsdp_param_groups]
        for group in held:
            if (factor := group.gradient_divide_factor) not in (None, world_size()):
                raise BadInput(
                    f"FSDP2: set_gradient_divide_factor({factor}): the loss is made for gradients that are averaged "
                    f"over the {world_size()} ranks: leave it out"
                )
        check_held(model, {id(parameter) for group in held for parameter in _parameters(group)}, "FSDP2")
        return cls(groups)

    @property
    def divide_factors(self) -> list[float | None]:
        """What the gradients of every group are divided by; None for the number of ranks."""
        groups = [group for module in self.groups for group in module._get_fsdp_state()._fsdp_param_groups]
        return [group.gradient_divide_factor for group in groups]

    def reshard(self) -> None:
        """Free all whole weights; only shards are left, and what is done to them counts in the next pass."""
        for group in self.groups:
            group.reshard()

    def owner(self, part: nn.Module) -> Any:
        """The module whose group holds the weights of a part: the smallest around it."""
        around = [group for group in self.groups if any(module is part for module in group.modules())]
        return min(around, key=lambda group: sum(1 for _ in group.modules())) if around else None

    @contextlib.contextmanager
    def swapped(self, module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Other values in the shards inside, rank by rank: the next pass gathers these."""
        self.reshard()
        own: dict[str, Tensor] = {}
        try:
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if name in weights:
                        own[name] = local(parameter).clone()
                        local(parameter).copy_(local(like(weights[name], parameter)))
            yield
        finally:
            self.reshard()
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if name in own:
                        local(parameter).copy_(own[name])


def _parameters(group: Any) -> Iterator[nn.Parameter]:
    """What a group of FSDP2 holds, as its modules have it now: shards or whole."""
    for parameter in group.fsdp_params:
        owner = parameter._module_info
        yield getattr(owner.module, owner.param_name)


@contextlib.contextmanager
def kept_whole(owner: Any, setting: Literal["post_forward_mesh_info", "reshard_after_backward"]) -> Iterator[None]:
    """The weights of one group are not freed after a forward, or a backward, that ends inside: gathered once, they
    serve all passes of a step."""
    groups = [] if owner is None else owner._get_fsdp_state()._fsdp_param_groups
    before = [(group, getattr(group, setting)) for group in groups]
    try:
        for group in groups:
            setattr(group, setting, None if setting == "post_forward_mesh_info" else False)
        yield
    finally:
        for group, value in before:
            setattr(group, setting, value)


def reshard(model: nn.Module) -> None:
    """Free the whole weights that a pass has left, where FSDP2 holds a model: its parameters are shards again."""
    shards = Shards.of(model)
    if shards is not None:
        shards.reshard()


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The whole state of a model, on the CPU, with tied weights tied; every rank has to ask.

    Args:
        keep: False for a rank that only takes part; it gets nothing
    """
    reshard(model)
    state, gathered = dict[str, Tensor](), dict[int, Tensor]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            whole = full(tensor.detach())
            gathered[id(tensor)] = whole.cpu() if keep else whole.new_empty(0)
        state[name] = gathered[id(tensor)]
    return state if keep else {}


def _names(values: set[Any]) -> str:
    return " and ".join(sorted(str(value) for value in values))
