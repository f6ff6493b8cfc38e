"""DeepSpeed (ZeRO): passes are made on the model inside its engine, whose backward pass begins at the loss.

An engine that is called takes the outputs of that call for the end of its only pass: whatever gradient goes through
them, also that of a perturbation, makes it reduce the gradients of the parameters. So the engine is not called. It is
told of the loss instead, as of an output.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from seqreg.errors import BadInput


def is_deepspeed(model: nn.Module) -> bool:
    """Whether `deepspeed.initialize` or `accelerator.prepare` gave this model."""
    return type(model).__module__.startswith("deepspeed.")


def _loaded(module: str) -> Any:
    """A module of DeepSpeed, which whoever made an engine has imported."""
    return sys.modules[f"deepspeed.runtime.{module}"]


def stage(engine: Any) -> int:
    """The stage of ZeRO: 0 shards nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    if not hasattr(sys.modules.get("deepspeed.runtime.utils"), "register_output_backward_hooks"):
        raise BadInput("this DeepSpeed is older than those that were tested: install deepspeed>=0.19.8")
    if (ranks := engine.dp_world_size) != (world := torch.distributed.get_world_size()):
        raise BadInput(
            f"DeepSpeed averages gradients over {ranks} of {world} ranks: leave pipeline, tensor and sequence "
            "parallelism out"
        )
    return int(engine.zero_optimization_stage())


def accumulation_steps(model: Any) -> int:
    """What `engine.backward` divides a loss by."""
    return int(model.gradient_accumulation_steps()) if is_deepspeed(model) else 1


def autocast(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The autocast that an engine makes its passes in, for one on the model inside."""
    if not is_deepspeed(model):
        return contextlib.nullcontext()
    return _loaded("torch_autocast").autocast_if_enabled(model)  # type: ignore[no-any-return]


def take_loss(model: Any, loss: Tensor) -> None:
    """Tell an engine that a backward pass will begin at a loss, as its own forward does of its output."""
    if is_deepspeed(model) and loss.requires_grad:
        if hasattr(model.optimizer, "clear_backward_seen_flag"):
            model.optimizer.clear_backward_seen_flag()
        _loaded("utils").register_output_backward_hooks(
            loss, model._backward_prologue, model._backward_prologue_per_tensor
        )
