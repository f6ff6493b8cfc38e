"""What seqreg has to know about a transformers model: its task, its stacks, its decoder inputs, its head."""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from seqreg import heads
from seqreg.errors import BadInput
from seqreg.integrations.tap import Stack
from seqreg.losses import IGNORE

Task = Literal["seq2seq", "causal", "tokens", "classification"]

_CLASSES: dict[Task, set[str]] = {
    "seq2seq": {"EncoderDecoderModel", *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()},
    "causal": set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    - set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()),  # XLM is both, and does not shift
    "tokens": {
        *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values(),
    },
    "classification": set(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()),
}


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside DistributedDataParallel, torch.compile and PEFT wrappers."""
    while not isinstance(model, PreTrainedModel):
        wrapped = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if wrapped is None and hasattr(model, "get_base_model"):  # PEFT
            wrapped = model.get_base_model()
        if not isinstance(wrapped, nn.Module):
            raise BadInput(f"{type(model).__name__} is not a transformers model: build a Context with your own Forward")
        model = wrapped
    return model


def task_of(model: PreTrainedModel) -> Task:
    """What the model was made for, from its class; a subclass counts as what it inherits from."""
    for cls in type(model).__mro__:
        for task, names in _CLASSES.items():
            if cls.__name__ in names:
                return task
    raise BadInput(
        f"{type(model).__name__} is neither a seq2seq, causal or masked LM nor a classifier: load it with "
        "AutoModelForSeq2SeqLM, AutoModelForCausalLM or AutoModelForSequenceClassification"
    )


def classes_of(model: PreTrainedModel, task: Task) -> int:
    """How many classes the head has."""
    head = model.get_output_embeddings() if task != "classification" else None
    return int(model.config.num_labels if head is None else head.weight.shape[0])


def stacks(model: PreTrainedModel) -> dict[str, Stack]:
    """The stacks that embed tokens, input side first."""
    if getattr(model.config, "is_encoder_decoder", False):
        return {"encoder": _stack(model.get_encoder()), "decoder": _stack(model.get_decoder())}
    name = "decoder" if task_of(model) == "causal" or getattr(model.config, "is_decoder", False) else "encoder"
    return {name: _stack(model)}


def _stack(module: Any) -> Stack:
    embedding = module.get_input_embeddings()
    inner, outer = getattr(embedding, "embed_scale", None), getattr(module, "embed_scale", None)
    return Stack(
        module,
        embedding,
        inner=1.0 if inner is None else float(inner),
        outer=1.0 if outer is None else float(outer),
        norm=next(
            (part for name, part in module.named_modules() if isinstance(part, nn.LayerNorm) and "embed" in name), None
        ),
    )


def decoder_inputs(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """Labels shifted right, the way this model was trained; M2M100 and Blenderbot have no method of their own."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    empty = (labels == IGNORE).all(-1)
    if model.config.eos_token_id is not None and empty.any():  # mBART looks for the end of every row
        labels = labels.clone()
        labels[empty, 0] = model.config.eos_token_id
    if shift is not None:
        return shift(labels=labels)  # type: ignore[no-any-return]
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    for key, value in {"decoder_start_token_id": start, "pad_token_id": pad}.items():
        if value is None:
            raise BadInput(f"config.{key} is not set, so decoder inputs cannot be made from labels: set it")
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = start
    return shifted.masked_fill(shifted == IGNORE, pad)


def uses_reentrant_checkpointing(model: PreTrainedModel) -> bool:
    return any(
        getattr(module, "gradient_checkpointing", False)
        and isinstance(function := getattr(module, "_gradient_checkpointing_func", None), functools.partial)
        and function.keywords.get("use_reentrant", True)
        for module in model.modules()
    )


def classification_head(model: PreTrainedModel) -> nn.ModuleDict:
    """The layers between the pretrained body and the class scores."""
    task = task_of(model)
    if task != "classification":
        raise BadInput(f"R4F normalises a classification head, and {type(model).__name__} has a language-model head")
    body = model.base_model
    return nn.ModuleDict({name: child for name, child in model.named_children() if child is not body})


def r4f(model: nn.Module, layers: heads.Layers = "all", warmup: int = 15) -> Any:
    """Normalise the classification head of a transformers model in place, and return the model.

    The trainers export it folded. In a loop of your own, call `seqreg.heads.fold(model)` before `save_pretrained`.

    Args:
        layers: "all" weight matrices of the head (the paper) or only the last, "out_proj" (fairseq)
        warmup: power iterations before the first pass (fairseq makes none)
    """
    heads.spectral_norm(classification_head(unwrap(model)), layers, warmup)
    return model
