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
    "tokens": {
        *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values(),
        *(
            f"{name}ForCausalLM"
            for name in "Bart BigBirdPegasus Blenderbot BlenderbotSmall MBart Marian Mvp PLBart".split()
        ),
        *(f"{name}ForCausalLM" for name in "Pegasus ProphetNet".split()),  # decoders of seq2seq models do not shift
    },
    "causal": set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    - set(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()),  # XLM is both, and does not shift
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
        found = {"encoder": model.get_encoder(), "decoder": model.get_decoder()}
    else:
        found = {"decoder" if task_of(model) == "causal" else "encoder": model}
    return {name: _stack(module) for name, module in found.items() if hasattr(module, "get_input_embeddings")}


def _stack(module: Any) -> Stack:
    embedding = module.get_input_embeddings()
    owner = next((part for part in module.modules() if embedding in part._modules.values()), module)
    inner = getattr(embedding, "embed_scale", None)
    outer = getattr(owner, "embed_scale", None) or getattr(owner, "embedding_multiplier", None)
    return Stack(
        module,
        embedding,
        inner=1.0 if inner is None else float(inner),
        outer=1.0 if outer is None else float(outer),
        norm=next(
            (part for name, part in module.named_modules() if isinstance(part, nn.LayerNorm) and "embed" in name), None
        ),
    )


def special(model: PreTrainedModel, name: str) -> int | None:
    """A special token of the configuration; the first where there are several."""
    value = getattr(model.config, name, None)
    return value[0] if isinstance(value, (list, tuple)) else value


def drops_layers(model: PreTrainedModel) -> bool:
    return any(getattr(model.config, f"{part}layerdrop", 0.0) for part in ("", "encoder_", "decoder_"))


def decoder_inputs(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """Labels shifted right, the way this model was trained; M2M100 and Blenderbot have no method of their own."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    empty = (labels == IGNORE).all(-1)
    eos = special(model, "eos_token_id")
    if eos is not None and empty.any():  # mBART looks for the end of every row
        labels = labels.clone()
        labels[empty, 0] = eos
    if shift is not None:
        return shift(labels=labels)  # type: ignore[no-any-return]
    start, pad = special(model, "decoder_start_token_id"), special(model, "pad_token_id")
    if start is None or pad is None:
        missing = "decoder_start_token_id" if start is None else "pad_token_id"
        raise BadInput(f"config.{missing} is not set, so decoder inputs cannot be made from labels: set it")
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

    The trainers export it folded. In a loop of your own, `save_pretrained(..., state_dict=heads.folded_state(model))`
    saves it in the middle of training, and `heads.fold(model)` makes it a plain model at the end.

    Args:
        layers: "all" weight matrices of the head (the paper) or only the last, "out_proj" (fairseq)
        warmup: power iterations before the first pass (fairseq makes none)
    """
    heads.spectral_norm(classification_head(unwrap(model)), layers, warmup)
    return model
