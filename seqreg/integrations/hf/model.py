"""What seqreg has to know about a transformers model: its task, its stacks, its decoder inputs, its head."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from seqreg import spectral_norm
from seqreg.errors import Advice, BadInput
from seqreg.integrations.embedding_hook import Stack
from seqreg.losses import IGNORE

ModelTask = Literal["seq2seq", "causal", "tokens", "classification"]

_CLASSES: dict[ModelTask, set[str]] = {
    "seq2seq": {"EncoderDecoderModel", *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()},
    "tokens": {
        *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values(),
        *auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values(),
        "XLNetLMHeadModel",
        *(  # decoders of seq2seq models, and CPM-Ant: their loss does not shift the labels
            f"{name}ForCausalLM"
            for name in "Bart BigBirdPegasus Blenderbot BlenderbotSmall CpmAnt MBart Marian Mvp PLBart Pegasus "
            "ProphetNet TrOCR Whisper".split()
        ),
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


def task_of(model: PreTrainedModel) -> ModelTask:
    """What the model was made for, from its class; a subclass counts as what it inherits from."""
    _, task = _known_class(type(model))  # transformers counts language models that listen as seq2seq
    return "causal" if task == "seq2seq" and not model.config.is_encoder_decoder else task


def _known_class(kind: type[Any]) -> tuple[type[PreTrainedModel], ModelTask]:
    """The class of transformers that the class of a model is or inherits from, and its task."""
    for cls in kind.__mro__:
        for task, names in _CLASSES.items():
            if cls.__name__ in names:
                return cls, task
    raise BadInput(
        f"{kind.__name__} is neither a seq2seq, causal or masked LM nor a classifier: load it with "
        "AutoModelForSeq2SeqLM, AutoModelForCausalLM or AutoModelForSequenceClassification"
    )


def check_loss(model: PreTrainedModel) -> None:
    """Refuse a model whose own loss is another than that of its labels."""
    config, name = model.config, type(model).__name__
    if hasattr(config, "disable_ngram_loss") and config.ngram > 1 and not config.disable_ngram_loss:
        raise BadInput(f"{name} also learns to predict further tokens: set config.disable_ngram_loss=True, or ngram=1")
    if getattr(config, "model_type", "") == "prophetnet" and config.eps:
        raise BadInput(f"{name} smooths labels itself: set config.eps=0, and Criterion(label_smoothing={config.eps})")
    if getattr(config, "z_loss_coefficient", 0):
        raise BadInput(f"{name} adds a z-loss, which seqreg does not: set config.z_loss_coefficient=0")
    if hasattr(model, "_loss_function"):
        raise BadInput(
            f"{name}: the loss_function that was assigned to it would not be called: give a loss of your own as "
            "context(model, batch, loss=...)"
        )
    cls, _ = _known_class(type(model))
    if type(model).forward is not cls.forward:
        warnings.warn(
            f"{name} has a forward of its own: what it adds to the loss of {cls.__name__} is not in the criterion's",
            Advice,
            stacklevel=3,
        )


def routes(model: PreTrainedModel, inputs: Mapping[str, Any]) -> bool:
    """Whether rows of a batch depend on each other: experts have a limited capacity, or their balance is learnt."""
    asked = inputs.get("output_router_logits")
    balanced = getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked
    return bool(balanced) or hasattr(model.config, "expert_capacity")


def aux_loss(model: PreTrainedModel, output: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """What the model adds to the loss of its labels, weighted as it does: the load balance of its experts."""
    found: dict[str, list[Any]] = {
        kind: [output.get(f"{stack}{kind}_loss") for stack in ("", "encoder_", "decoder_")] for kind in ("aux", "z")
    }
    if getattr(model.config, "model_type", "") == "nllb-moe" and output.get("encoder_router_logits") is not None:
        balance = sys.modules[type(model).__module__].load_balancing_loss_func
        found["aux"] = [  # which that model computes beside labels alone
            balance(output[f"{stack}_router_logits"], model.num_experts, top_k=2, attention_mask=inputs.get(mask))
            for stack, mask in (("encoder", "attention_mask"), ("decoder", "decoder_attention_mask"))
        ]
    given = {kind: [loss for loss in losses if isinstance(loss, Tensor)] for kind, losses in found.items()}
    parts = [_coefficient(model, f"{kind}_loss_coef") * sum(losses) for kind, losses in given.items() if losses]
    return cast("Tensor", sum(parts)) if parts else None


def _coefficient(model: PreTrainedModel, name: str) -> float:
    return float(getattr(model, _coefficient_name(model, name)))


def _coefficient_name(model: PreTrainedModel, name: str) -> str:
    for known in (f"router_{name}", name):
        if hasattr(model, known):
            return known
    raise BadInput(f"{type(model).__name__} has no router_{name} to weigh its balance with: output_router_logits=False")


def set_aux_loss_coefficient(model: PreTrainedModel, value: float) -> None:
    """Weigh the load balance of experts by another coefficient than the model was made with."""
    setattr(model, _coefficient_name(model, "aux_loss_coef"), value)


def classes_of(model: PreTrainedModel, task: ModelTask) -> int:
    """How many classes the head has."""
    head = model.get_output_embeddings() if task != "classification" else None
    if head is None:
        return int(model.config.num_labels)
    size = getattr(head, "out_features", None)  # FSDP1 and ZeRO leave an empty weight on some ranks
    return int(head.weight.shape[0] if size is None else size)


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether a pass would fill a cache for generation, unless it is told not to."""
    return "use_cache" in inspect.signature(type(model).forward).parameters


def stacks(model: PreTrainedModel) -> dict[str, Stack]:
    """The stacks that embed tokens, input side first."""
    if getattr(model.config, "is_encoder_decoder", False):
        base = model if hasattr(model, "get_encoder") else model.base_model  # a classifier of transformers 4
        found = {"encoder": base.get_encoder(), "decoder": base.get_decoder()}
    elif task_of(model) == "causal":
        found = {"decoder": model}
    else:
        encoder = model.get_encoder() if hasattr(model, "get_encoder") else model  # of T5, which has a table of its own
        found = {"encoder": encoder if _embedding(encoder) is not None else model}
    return {name: _stack(module) for name, module in found.items() if _embedding(module) is not None}


def _embedding(module: Any) -> nn.Module | None:
    """What a stack looks its tokens up in; None for a model that has no such thing (CANINE, Perceiver)."""
    try:
        embedding = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    except NotImplementedError:
        return None
    return embedding if isinstance(embedding, nn.Module) else None


def _stack(module: Any) -> Stack:
    embedding = module.get_input_embeddings()
    owner = next((part for part in module.modules() if embedding in part._modules.values()), module)
    table = embedding
    while not isinstance(table, nn.Embedding) and isinstance(getattr(table, "base_layer", None), nn.Module):  # PEFT
        table = table.base_layer
    inner = getattr(table, "embed_scale", None)
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


def layers(stack: Stack) -> list[nn.Module]:
    """The layers of a stack, first to last: its longest list of modules that is not inside another one."""
    lists = [module for module in stack.module.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(part) for module in lists for child in module for part in child.modules()}
    outer = [module for module in lists if id(module) not in inner]
    if not outer:
        raise BadInput(f"{type(stack.module).__name__} has no list of layers to begin a pass in: leave layer out")
    return max((list(module) for module in outer), key=len)


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


def classification_head(model: PreTrainedModel) -> nn.ModuleDict:
    """The layers between the pretrained body and the class scores."""
    task = task_of(model)
    if task != "classification":
        raise BadInput(f"R4F normalises a classification head, and {type(model).__name__} has a language-model head")
    body = model.base_model
    return nn.ModuleDict({name: child for name, child in model.named_children() if child is not body})


def head_parameters(model: PreTrainedModel) -> set[str]:
    """Names of the parameters of a classification head."""
    return {name for name, _ in classification_head(model).named_parameters()}


def r4f(model: nn.Module, layers: spectral_norm.Layers = "all", warmup: int = 15) -> Any:
    """Normalise the classification head of a transformers model in place, and return the model.

    The trainers export it folded. In a loop of your own,
    `save_pretrained(..., state_dict=spectral_norm.folded_state(model))` saves it in the middle of training, and
    `spectral_norm.fold(model)` makes it a plain model at the end.

    Args:
        layers: "all" weight matrices of the head (the paper) or only the last, "out_proj" (fairseq)
        warmup: power iterations before the first pass (fairseq makes none)
    """
    head = classification_head(unwrap(model))
    check_adapted_head(head)
    spectral_norm.spectral_norm(head, layers, warmup)
    return model


def check_adapted_head(head: nn.Module) -> None:
    """Refuse adapters on layers that R4F normalises, or is to: what they add is not."""
    for name, module in head.named_modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Linear):
            raise BadInput(
                f"R4F: the adapters on layer {name!r} of the head are not normalised: train the head whole "
                "(modules_to_save), or take it out of target_modules"
            )
