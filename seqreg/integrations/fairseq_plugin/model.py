"""What seqreg has to know about a fairseq model: what is inside its wrappers, its stacks, its head."""

from __future__ import annotations

from typing import Any

from fairseq.distributed import (
    DistributedTimeoutWrapper,
    LegacyDistributedDataParallel,
    ModuleProxyWrapper,
)
from fairseq.models import BaseFairseqModel
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import LayerDropModuleList
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqreg.errors import BadInput
from seqreg.integrations.embedding_hook import Stack


def unwrap(model: Any) -> Any:
    """The fairseq model inside what --ddp-backend wraps around it."""
    while not isinstance(model, BaseFairseqModel):
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise BadInput(f"{type(model).__name__} is not a fairseq model")
        model = inner
    return model


def stacks(model: Any) -> dict[str, Stack]:
    """The stacks that embed tokens, input side first."""
    parts = _parts(model)
    for name, kind in {"encoder": TransformerEncoderBase, "decoder": TransformerDecoderBase}.items():
        if name in parts and not isinstance(parts[name], kind):
            raise BadInput(
                f"{type(model).__name__} has a {type(parts[name]).__name__}: seqreg knows fairseq's transformer "
                "encoders and decoders (transformer, bart, roberta, transformer_lm and what is built on them)"
            )
    return {name: _stack(part) for name, part in parts.items()}


def _parts(model: Any) -> dict[str, nn.Module]:
    if isinstance(model, RobertaModel):
        return {"encoder": model.encoder.sentence_encoder}
    children = dict(model.named_children())
    found = {name: children[name] for name in ("encoder", "decoder") if name in children}
    if not found:
        raise BadInput(f"{type(model).__name__} has neither an encoder nor a decoder: seqreg cannot train it")
    return found


def _stack(part: Any) -> Stack:
    return Stack(part, part.embed_tokens, outer=float(part.embed_scale), norm=part.layernorm_embedding)


def padding(stack: Stack) -> int:
    """The token that fills up rows."""
    embedding: Any = stack.embedding
    return int(embedding.padding_idx)


def head_of(model: nn.Module, module: Any) -> nn.Linear | None:
    """The output projection, if logits may be computed outside of the model's own pass; None if not."""
    while model is not module:
        wrapped = isinstance(model, (ModuleProxyWrapper, DistributedTimeoutWrapper, LegacyDistributedDataParallel))
        if not wrapped and not (isinstance(model, DistributedDataParallel) and not model.find_unused_parameters):
            return None
        model = model.module  # type: ignore[assignment]
    decoder = getattr(module, "decoder", None)
    if decoder is None or type(decoder).output_layer is not TransformerDecoderBase.output_layer:
        return None
    if decoder.adaptive_softmax is not None:
        raise BadInput("an adaptive softmax gives no logits: train without --adaptive-softmax-cutoff")
    head = decoder.output_projection
    plain = type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)
    return head if plain else None


def drops_layers(model: nn.Module) -> bool:
    return any(isinstance(part, LayerDropModuleList) and part.p > 0 for part in model.modules())


def checkpoints(model: nn.Module) -> bool:
    """Whether --checkpoint-activations is on: fairseq then puts another `forward` into every layer."""
    return any("precheckpoint_forward" in vars(part) for part in model.modules())
