"""Facts of a model that every batch needs: found once, and found again when the model has changed."""

from __future__ import annotations

import functools
import operator
import weakref
from dataclasses import replace
from typing import Any, Literal, cast

from torch import nn
from transformers import PreTrainedModel

from seqreg import spectral_norm
from seqreg.engines.deepspeed import is_deepspeed
from seqreg.engines.detect import WHOLE_WEIGHTS, engine_of, world_size
from seqreg.engines.shards import Shards
from seqreg.errors import BadInput
from seqreg.integrations.embedding_hook import Stack
from seqreg.integrations.hf import model as hf
from seqreg.integrations.hf import reference
from seqreg.integrations.hf.encoder_reuse import between, is_known, takes_encoder_output
from seqreg.integrations.hf.lazy_logits import head_of

_KEY = "_seqreg_facts"
_ROOT = nn.Module()
"""Stands for the model itself, to which the facts hold no strong reference."""


class ModelFacts:
    """What seqreg has to know about a model, wrapped as it is trained.

    What takes a walk over all modules is found once. The facts are kept in the model, to which they hold no reference
    but a weak one, and are found again when a module, its class or a parameter was exchanged, or a parameter that an
    engine must hold was frozen or unfrozen: that is when adapters are added or merged, embeddings resized, weights
    parametrized, or FSDP2 shards them. A wrapper (DistributedDataParallel, torch.compile, PEFT) is another model with
    facts of its own. What changes without any of this (gradient checkpointing, layerdrop, active adapters, hooks, a
    replaced `forward`) is looked up when asked for, in the few modules that can have it.

    Args:
        model: as it is trained, wrapped or not
    """

    def __init__(self, model: nn.Module) -> None:
        self._wrapped = weakref.ref(model)
        module = self.module
        self.task: hf.ModelTask = hf.task_of(module)
        self.engine, self.shards = engine_of(model), Shards.of(model)
        self.takes_cache: bool = self.task in ("seq2seq", "causal") or hf.takes_cache(module)
        if self.task == "classification":
            _check_head(module)
        if self.engine == "tensor parallelism" and spectral_norm.raw_state(module):
            raise BadInput("r4f: tensor parallelism cuts the head, whose norm is that of all of it: use FSDP2 or DDP")
        stacks = hf.stacks(module)
        self._stacks = {
            name: (replace(stack, module=_ROOT) if stack.module is model else stack) for name, stack in stacks.items()
        }
        below = [part for part in model.modules() if part is not model]
        self._checkpointed = [part for part in below if hasattr(part, "gradient_checkpointing")]
        self._around_encoder: list[nn.Module] | None = None
        whole = self.model is module and self.engine in WHOLE_WEIGHTS
        if self.task == "seq2seq" and whole and takes_encoder_output(module, stacks):
            self._around_encoder = list(between(module, stacks["encoder"].module))
        self._modules = below
        self._parts, self._parameters = self._look(), list(model.parameters())
        self._frozen = self._look_frozen()

    @classmethod
    def of(cls, model: nn.Module) -> ModelFacts:
        """The facts of a model as it is now."""
        known = vars(model).get(_KEY)
        if known is None or known.wrapped is not model or known.outdated():
            known = vars(model)[_KEY] = cls(model)
        return known

    def __reduce__(self) -> Any:
        """A copy of the model, or one that is read from a file, begins without facts."""
        return type(None), ()

    @property
    def wrapped(self) -> nn.Module:
        """The model as it is trained."""
        return cast("nn.Module", self._wrapped())

    @property
    def model(self) -> nn.Module:
        """The model that passes are made on: inside the engine of DeepSpeed, or as it is trained."""
        wrapped = self.wrapped
        return cast("nn.Module", wrapped.module) if is_deepspeed(wrapped) else wrapped

    @property
    def module(self) -> PreTrainedModel:
        return hf.unwrap(self.model)

    @property
    def adapted(self) -> Any | None:
        """The PEFT model, whose adapters can be switched off."""
        return reference.adapted(self.model)

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks that embed tokens, input side first."""
        model = self.model
        return {
            name: replace(stack, module=model) if stack.module is _ROOT else stack
            for name, stack in self._stacks.items()
        }

    def outdated(self) -> bool:
        """Whether the model has other modules or parameters than when the facts were found."""
        parts = self._look()
        same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        return not same or self._frozen != self._look_frozen()

    def _look(self) -> list[Any]:
        """Every module's class, children and parameters."""
        return [
            part
            for module in (self.wrapped, *self._modules)
            for part in (type(module), *module._modules.values(), *module._parameters.values())
        ]

    def _look_frozen(self) -> tuple[Any, ...]:
        """What decides whether the engine holds all parameters that learn, and averages gradients over all ranks."""
        if not self.engine:
            return ()
        factors = () if self.shards is None else self.shards.divide_factors
        return world_size(), factors, [parameter.requires_grad for parameter in self._parameters]

    @property
    def checkpointing(self) -> Literal["", "reentrant", "other"]:
        """Whether gradient checkpointing is on, and of which kind."""
        on = [part for part in (self.model, *self._checkpointed) if getattr(part, "gradient_checkpointing", False)]
        return "reentrant" if any(map(_is_reentrant, on)) else "other" if on else ""

    @property
    def head(self) -> nn.Linear | None:
        """The language-model head, where logits can be computed outside of the model's forward."""
        model = self.model
        return None if self.task == "classification" else head_of(model, hf.unwrap(model), self.shards)

    @property
    def reuses_encoder(self) -> bool:
        """Whether a pass that changes the decoder alone can be given the encoder's output of another pass."""
        return self._around_encoder is not None and all(map(is_known, (self.model, *self._around_encoder)))

    @property
    def no_double_backward(self) -> str:
        """Why a gradient of a gradient would fail in the middle of training, and the fix; empty where it would not."""
        module = self.module
        if getattr(module, "is_quantized", False):
            return "a quantised model has no second derivatives: use estimator='finite_difference'"
        if self.checkpointing and module.config._attn_implementation != "eager":
            return "checkpointing recomputes fused attention: load with attn_implementation='eager'"
        return ""


def _is_reentrant(module: Any) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    return isinstance(function, functools.partial) and function.keywords.get("use_reentrant", True)


def _check_head(module: PreTrainedModel) -> None:
    head = hf.classification_head(module)
    if spectral_norm.is_normalised(head):
        hf.check_adapted_head(head)
