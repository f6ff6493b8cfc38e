"""FSDP2 for a transformers model: what has to be done before a trainer, or a loop, gets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from seqreg.engines.detect import engine_of, world_size
from seqreg.errors import BadInput
from seqreg.integrations.hf.model import drops_layers


def shard(
    model: PreTrainedModel,
    *,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> PreTrainedModel:
    """Shard every layer and then the rest of a model over all ranks, in place, by torch's `fully_shard`.

    Every rank has to call it, on the same weights, before the optimizer or the trainer is made.

    Args:
        reshard_after_forward: free the whole weights of a layer after its forward pass, and gather them again for the
            backward one; False keeps them in between, which takes memory and saves a third of the communication
        param_dtype: what weights are cast to in every pass; they are kept, and gradients added up, as they are
        cpu_offload: keep the shards in the memory of the CPU
    """
    if world_size() == 1:
        raise BadInput("FSDP2 shards a model over several ranks, and there is one: start them with torchrun")
    if (engine := engine_of(model)) != "":
        raise BadInput(f"the model is under {engine} already: shard a plain one")
    if drops_layers(model):
        raise BadInput("FSDP2: layerdrop skips layers that other ranks gather: set the model's layerdrop to 0")
    kind = "cpu" if (device := torch.accelerator.current_accelerator()) is None else device.type
    if cpu_offload and kind == "cpu":
        raise BadInput("cpu_offload: the weights are in the memory of the CPU already: leave it out")
    mesh = init_device_mesh(kind, (world_size(),))
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=param_dtype and torch.float32),
        "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
    }
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward, **policies)
    fully_shard(model, mesh=mesh, **policies)
    if model.can_generate():
        register_fsdp_forward_method(model, "generate")
    model._is_fsdp_managed_module = True  # transformers then generates for as long as any rank does
    return model


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of every stack: what is in a list, and in no other."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)
