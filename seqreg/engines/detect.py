"""Which engine spreads a model over ranks, and what is refused under it."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterable
from typing import Any, Literal

import torch
from torch import nn

from seqreg.engines import deepspeed
from seqreg.errors import BadInput

Engine = Literal["", "DDP", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "FSDP1", "tensor parallelism"]
"""What spreads a model over ranks; empty where nothing does. ZeRO is DeepSpeed's."""
WHOLE_WEIGHTS: tuple[Engine, ...] = ("", "DDP", "ZeRO-0", "ZeRO-1", "ZeRO-2")
"""Engines under which every rank holds all weights."""

_ZERO: tuple[Engine, ...] = ("ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_FSDP = "torch.distributed.fsdp"
USE_FSDP2 = "use FSDP2 (torch.distributed.fsdp.fully_shard) or DistributedDataParallel"


def world_size() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def check_group() -> None:
    """Refuse to train as one of several ranks that a launcher started and that no process group connects."""
    ranks = os.environ.get("WORLD_SIZE", "")
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if "RANK" in os.environ and ranks.isdecimal() and int(ranks) > 1 and not grouped:
        raise BadInput(
            f"WORLD_SIZE={ranks}, and no process group connects the ranks, so that each would train a model alone: "
            "call torch.distributed.init_process_group() first, or start one process"
        )


def _loaded(module: str, name: str) -> tuple[type, ...]:
    """A class of a module, if that has been imported: nothing can be an instance of it otherwise."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor: a shard of something larger, or known to be the same on several ranks."""
    return isinstance(tensor, _loaded("torch.distributed.tensor", "DTensor"))


def is_fsdp2(module: Any) -> bool:
    return isinstance(module, _loaded(_FSDP, "FSDPModule"))


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model, wrapped as it is trained."""
    modules = list(model.modules())
    ddp = [module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)]
    if any(is_fsdp2(module) for module in modules):
        if ddp:
            raise BadInput(
                "DistributedDataParallel around a model that FSDP2 has sharded would average different shards: use one "
                "of them"
            )
        return "FSDP2"
    fsdp1 = [module for module in modules if isinstance(module, _loaded(_FSDP, "FullyShardedDataParallel"))]
    if fsdp1:
        check_held(model, _inside(fsdp1), "FSDP1")
        return "FSDP1"
    parameters = list(model.parameters())
    if deepspeed.is_deepspeed(model):
        return _ZERO[deepspeed.stage(model)]
    if any(hasattr(each, "ds_id") for each in parameters):
        return "ZeRO-3"
    cut = {size for module in modules if (size := getattr(module, "_tp_size", None)) not in (None, 1)}
    if cut or any(is_sharded(each) for each in parameters):
        if cut - {world_size()}:
            raise BadInput(
                f"the model is cut over {cut.pop()} of {world_size()} ranks: tensor parallelism is exact over all "
                "ranks alone, not beside data parallelism"
            )
        return "tensor parallelism"
    if ddp:
        if (ranks := ddp[0].process_group.size()) != world_size():
            raise BadInput(f"DistributedDataParallel is over {ranks} of {world_size()} ranks: give it all of them")
        check_held(model, _inside(ddp), "DistributedDataParallel")
    return "DDP" if ddp else ""


def _inside(wrappers: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for wrapper in wrappers for parameter in wrapper.parameters()}


def check_held(model: nn.Module, held: Container[int], engine: str) -> None:
    """Refuse a model with a parameter that learns, and that its engine does not hold.

    Args:
        held: `id` of the parameters that it holds
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise BadInput(
                f"{engine} does not hold {name}, and its gradient would be that of one rank: wrap the whole model, "
                "after its parts, and pass that"
            )


def check_engine(model: nn.Module, asked: str) -> None:
    """Refuse to train under another engine than the one that was asked for.

    Args:
        model: as it is trained, wrapped
        asked: the setting that asks for FSDP, as the user wrote it; empty where none does
    """
    engine = engine_of(model)
    if asked and engine == "FSDP1":
        raise BadInput(f"{asked} gave FSDP1, whose trainers have not been tried: set fsdp_version to 2")
    if asked and engine != "FSDP2":
        got = engine or "a model that nothing shards"
        raise BadInput(
            f"{asked} asks for FSDP, and Accelerate gave {got}: on CPUs it does so; leave it out, or call fully_shard "
            "in a loop of your own"
        )


def check_processes(counted: int) -> None:
    """Refuse to train several ranks that Accelerate takes for one process each: all would read the same examples."""
    if (ranks := world_size()) != counted:
        raise BadInput(
            f"gradients are averaged over {ranks} ranks, and Accelerate counts {counted}: without GPUs set "
            "use_cpu=True, or call accelerate.PartialState(cpu=True) before Accelerator()"
        )


INEXACT: dict[Engine, tuple[str, ...]] = {"tensor parallelism": ("JacHess", "UEGR"), "ZeRO-3": ("JacHess",)}
"""Terms whose gradient is not that of one process: differences, and dropout masks of layers that are cut."""


def refusal(engine: Engine, *, other_weights: bool = False, kinds: Iterable[str] = ()) -> str:
    """Why a loss or a term is refused under an engine, and what to use; empty where it is exact.

    Args:
        other_weights: whether it makes a pass with weights other than the model's own
        kinds: names of the classes of the term
    """
    if engine in ("FSDP1", "ZeRO-3", "tensor parallelism") and other_weights:
        return f"{engine} cannot exchange weights for a pass: {USE_FSDP2}"
    if any(kind in INEXACT.get(engine, ()) for kind in kinds):
        return f"{engine} does not give its gradient of one process: {USE_FSDP2}"
    return ""
