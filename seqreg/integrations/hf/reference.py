"""The model that training is compared with: adapters switched off, or parameters read from a folder."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqreg.errors import BadInput
from seqreg.overrides import generator_state, replay


def adapted(model: Any) -> Any | None:
    """The PEFT model inside wrappers, whose adapters can be switched off; None for a model without."""
    while isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        if hasattr(model, "disable_adapter"):
            return model
        model = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
    return None


@contextlib.contextmanager
def without_adapters(model: Any | None) -> Iterator[None]:
    """A PEFT model is the one that adapters were put on inside; what required a gradient does so again afterwards."""
    if model is None:
        yield
        return
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with contextlib.ExitStack() as stack:
            with warnings.catch_warnings():  # that biases stay, which the caller sees to
                warnings.filterwarnings("ignore", "Careful, disabling adapter layers")
                stack.enter_context(model.disable_adapter())
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


_saved: WeakKeyDictionary[nn.Module, dict[str, dict[str, Tensor]]] = WeakKeyDictionary()
"""Parameters that were read from folders, for every model they were read for."""


def saved_weights(model: PreTrainedModel, folder: str) -> dict[str, Tensor]:
    """All parameters of a model that `save_pretrained` wrote, by their names in this one; read once.

    Refused where a name or a shape differs, or a buffer (which is not a parameter, and stays the model's own).
    """
    known = _saved.setdefault(model, {})
    if folder not in known:
        state, others = dict(model.named_parameters()), _read(model, folder)
        for name, parameter in state.items():
            if name not in others:
                raise BadInput(f"it has no {name}, which {type(model).__name__} has")
            if others[name].shape != parameter.shape:
                raise BadInput(f"{name} is {list(others[name].shape)} there and {list(parameter.shape)} in the model")
        for name, buffer in model.state_dict().items():
            other = buffer.cpu() if name in state else others.get(name)
            if other is None or not (name in state or torch.equal(buffer.cpu(), other.to(buffer.dtype))):
                raise BadInput(f"its buffer {name} is not that of the model")
        known[folder] = {name: others[name].detach().to(p.device, p.dtype) for name, p in state.items()}
    return known[folder]


def _read(model: PreTrainedModel, folder: str) -> dict[str, Tensor]:
    """The state of a saved model of the same class, nothing of which is missing."""
    try:
        with replay(generator_state(model.device), model.device):  # which draws weights before it reads them
            other, found = type(model).from_pretrained(folder, output_loading_info=True, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        line = str(error).strip().partition("\n")[0]
        raise BadInput(f"{type(model).__name__}.from_pretrained cannot read it: {line}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(str(name) for name in found[kind]):
            raise BadInput(f"{names[0]} is {kind.partition('_')[0]} there, for a {type(model).__name__}")
    return dict(other.state_dict())
