"""The model that training is compared with: adapters switched off, or parameters read from a folder."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from seqreg.errors import BadInput
from seqreg.overrides import generator_state, replay


def adapted(model: Any) -> Any | None:
    """The PEFT model inside wrappers, whose adapters can be switched off; None for a model without."""
    while isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        if hasattr(model, "disable_adapter"):
            return model
        model = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
    return None


def check_no_virtual_tokens(model: Any | None) -> None:
    """Refuse a PEFT model whose virtual tokens come before those of the batch: labels would not be aligned."""
    for config in () if model is None else model.peft_config.values():
        if config.peft_type.value in ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT"):
            raise BadInput(f"{config.peft_type.value}: virtual tokens have no labels: use LoRA, or prefix tuning")


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


_SAME_FUNCTION = frozenset(
    # Names, and how a model is stored, called, initialised or trained.
    "_name_or_path architectures dtype finetuning_task gradient_checkpointing id2label init_std initializer_factor "
    "initializer_range label2id output_attentions output_hidden_states problem_type return_dict task_specific_params "
    "torch_dtype transformers_version use_cache "
    # Of generation, and ids that the Trainer sets to those of its tokenizer.
    "bos_token_id decoder_start_token_id early_stopping eos_token_id forced_bos_token_id forced_eos_token_id "
    "length_penalty max_length min_length no_repeat_ngram_size num_beams pad_token_id".split()
)
"""Fields of a configuration that do not change the logits of a batch; besides all of dropout."""


_saved: WeakKeyDictionary[nn.Module, dict[str, dict[str, Tensor]]] = WeakKeyDictionary()
"""Parameters that were read from folders, for every model they were read for."""


def saved_weights(model: PreTrainedModel, folder: str) -> dict[str, Tensor]:
    """All parameters of a model that `save_pretrained` wrote, by their names in this one; read once.

    Refused where a name or a shape differs, or what is not exchanged with the parameters: a buffer, or a field of the
    configuration that changes what the model computes.
    """
    known = _saved.setdefault(model, {})
    if folder not in known:
        other, parameters = _read(model, folder), dict(model.named_parameters())
        found = dict(other.named_parameters())
        if names := sorted(parameters.keys() ^ found.keys()):
            where = "has no" if names[0] in parameters else "also has"
            raise BadInput(f"it {where} {names[0]}, unlike the model")
        for name, parameter in parameters.items():
            if found[name].shape != parameter.shape:
                raise BadInput(f"{name} is {list(found[name].shape)} there and {list(parameter.shape)} in the model")
        buffers = dict(other.named_buffers())
        for name, buffer in model.named_buffers():
            if name not in buffers or not _equal(buffer.cpu(), buffers[name]):
                raise BadInput(f"its buffer {name} is not that of the model")
        if different := _different_fields(other.config.to_dict(), model.config.to_dict()):
            raise BadInput(different)
        known[folder] = {name: found[name].detach().to(p.device, p.dtype) for name, p in parameters.items()}
    return known[folder]


def _different_fields(there: dict[str, Any], here: dict[str, Any], path: str = "") -> str:
    """The first field of two configurations that makes two functions of the same weights; "" if there is none."""
    for key in dict.fromkeys([*here, *there]):
        own, other, name = here.get(key), there.get(key), f"{path}{key}"
        if own == other or key in _SAME_FUNCTION or "drop" in key:
            continue
        if not (isinstance(own, dict) and isinstance(other, dict)):
            return f"its config.json has {name}={other!r}, the model {own!r}"
        if different := _different_fields(other, own, f"{name}."):
            return different
    return ""


def _equal(buffer: Tensor, other: Tensor) -> bool:
    """But for rounding: where positions are rotated, buffers are computed, on whatever device."""
    return buffer.shape == other.shape and torch.allclose(buffer, other.to(buffer.dtype))


def _read(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """A saved model of the same class, on the CPU, nothing of which is missing."""
    cls, level = type(model), logging.get_verbosity()
    try:
        logging.set_verbosity_error()  # what is missing is said below, in one line
        with replay(generator_state(model.device), model.device):  # it draws weights before it reads them
            other, found = cls.from_pretrained(
                folder, output_loading_info=True, local_files_only=True, use_safetensors=True
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        line = str(error).strip().partition("\n")[0]
        raise BadInput(f"{cls.__name__}.from_pretrained cannot read it: {line}") from error
    finally:
        logging.set_verbosity(level)
    for kind in ("missing", "mismatched"):
        if names := sorted(str(name) for name in found[f"{kind}_keys"]):
            raise BadInput(f"{names[0]} is {kind} there, for a {cls.__name__}")
    return cast("PreTrainedModel", other)
