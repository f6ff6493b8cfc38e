"""Stop a transformers model before its language-model head.

Most models shift or scale what their head gives and hand it on. Inside `deferred` the head gives a `Pending` in place
of logits: it remembers a shift and a scale, and becomes a tensor as soon as anything else is done to it, so that a
model that does more is computed as it always was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from seqreg.engines.detect import is_fsdp2, is_sharded
from seqreg.engines.shards import Shards, kept_whole
from seqreg.errors import BadInput
from seqreg.fused.head import Projection
from seqreg.integrations.hf.lora_head import LoraHead


class _Reached(torch.autograd.Function):
    """States as they are, in a graph that leads to weight and bias of the head too, and gives them nothing.

    DistributedDataParallel with find_unused_parameters takes parameters that the graph of the output does not lead to
    for unused; their gradient comes from the loss, outside of the model.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, *_: Tensor | None) -> Tensor:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None


class _Head:
    """A projection without its states. No dataclass: engines that look for tensors in an output do not look inside."""

    def __init__(self, projection: Projection, reached: bool) -> None:
        self.projection, self.reached = projection, reached


@dataclass
class Pending:
    """Logits that nobody has needed yet. Not a tensor, but torch's functions and its own methods take it for one.

    FSDP2 puts a hook on every tensor in an output, and finds the states here: it gathers the weights that come before
    them when their gradient is there.
    """

    states: Tensor
    head: _Head
    made: Tensor | None = None

    @classmethod
    def of(cls, projection: Projection, *, reached: bool = False) -> Pending:
        """
        Args:
            reached: weight and bias are to be found in the graph of the states, for who looks at parameters there
        """
        if reached and projection.requires_grad:
            states = _Reached.apply(projection.states, projection.weight, projection.bias)  # type: ignore[no-untyped-call]
            projection = replace(projection, states=states)
        return cls(projection.states, _Head(projection, reached))

    @property
    def projection(self) -> Projection:
        return replace(self.head.projection, states=self.states)

    def tensor(self) -> Tensor:
        """The logits; from here on they are what counts."""
        if self.made is None:
            self.made = self.projection.logits()
        return self.made

    def __add__(self, other: Any) -> Any:
        projection = self.projection
        if not _is_row(other, len(projection.weight)) or (self.head.reached and other.requires_grad):
            return self.tensor() + other
        added = other.reshape(-1)
        return self._with(bias=added if projection.bias is None else projection.bias + added)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return self.tensor() * other
        bias = self.projection.bias
        return self._with(states=self.projection.states * other, bias=None if bias is None else bias * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self * (1 / other) if isinstance(other, (int, float)) else self.tensor() / other

    def __getitem__(self, key: Any) -> Tensor:
        return self.tensor()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tensor()[key] = value

    def __len__(self) -> int:
        return len(self.projection.states)

    @property
    def device(self) -> torch.device:
        return self.projection.states.device

    @property
    def dtype(self) -> torch.dtype:
        return self.projection.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.projection.states.shape[:-1], len(self.projection.weight)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("states", "head", "made"):
            raise AttributeError(name)
        if name in ("float", "contiguous"):  # what follows is computed in float32 anyway
            return lambda: self
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_tensors(args), **{key: _tensors([value])[0] for key, value in (kwargs or {}).items()})

    def _with(self, **changes: Any) -> Pending:
        changed = replace(self.projection, **changes)
        return Pending(changed.states, _Head(changed, self.head.reached))


def _on_tensor(name: str) -> Any:
    return lambda self, *others: getattr(self.tensor(), name)(*_tensors(others))


for _name in "sub rsub neg pow rpow rtruediv matmul rmatmul abs lt le gt ge".split():
    setattr(Pending, f"__{_name}__", _on_tensor(f"__{_name}__"))


def _is_row(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.numel() == size == value.shape[-1]


def _tensors(values: Any) -> list[Any]:
    return [
        value.tensor()
        if isinstance(value, Pending)
        else type(value)(_tensors(value))
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]


def head_of(model: nn.Module, module: PreTrainedModel, shards: Shards | None = None) -> nn.Linear | None:
    """The head that can be deferred, or None: its weight must be usable outside of the model's own forward pass."""
    head: Any = module.get_output_embeddings()
    if hasattr(head, "modules_to_save"):  # PEFT trains a copy, and calls that
        active = [] if head.disable_adapters else head.active_adapters
        head = head.modules_to_save[active[0]] if active else head.original_module
    while model is not module:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile, which sees that the head has another forward
            model = model._orig_mod  # type: ignore[assignment]
        elif hasattr(model, "get_base_model"):  # PEFT
            break
        else:  # FSDP1 shards the weight
            return None
    if LoraHead.fits(head) and shards is None and not _compiled(model, module):
        return None if "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks else head
    own_group = is_fsdp2(head)  # with a class made for it, and a hook before and after
    linear = type(head) is nn.Linear or (own_group and nn.Linear in type(head).__bases__)
    if not linear or "forward" in vars(head):
        return None
    if type(head.weight) is not nn.Parameter and (shards is None or shards.owner(head) is None):
        return None
    if max(len(head._forward_hooks), len(head._forward_pre_hooks)) > own_group:
        return None
    return head if head.weight.shape == (head.out_features, head.in_features) else None


def _compiled(*models: Any) -> bool:
    return any(hasattr(model, "_orig_mod") or model._compiled_call_impl is not None for model in models)


@contextlib.contextmanager
def deferred(
    head: nn.Linear | None,
    owner: Any = None,
    *,
    copied: bool = False,
    lora: LoraHead | None = None,
    reached: bool = False,
) -> Iterator[None]:
    """Passes inside stop before the head.

    Args:
        reached: DistributedDataParallel looks for unused parameters in the graph of the output
        lora: of a head with a LoRA adapter
        owner: the FSDP2 module whose group holds the weight of the head, if one does
        copied: that weight is not the model's own: what is gathered is kept, before the next pass overwrites it
    """
    if head is None:
        yield
        return
    exits = contextlib.ExitStack()
    gather = None if owner is None else owner.unshard

    def stop(states: Tensor) -> Any:
        if owner is not None:
            exits.enter_context(kept_whole(owner, "post_forward_mesh_info"))
            states = states if states._base is None else states.clone()  # FSDP2 warns of views
        kind = states.device.type
        autocast = torch.is_autocast_enabled(kind) and states.is_floating_point()
        dtype = torch.get_autocast_dtype(kind) if autocast and states.dtype != torch.float64 else states.dtype
        if is_sharded(head.weight):
            raise BadInput("FSDP2 has not gathered the language-model head in its own pass: use Criterion(fused=False)")
        if lora is not None:
            states, weight = lora(states, fresh=copied)
            return Pending.of(Projection(states, weight, head.bias, dtype, torch.is_grad_enabled()), reached=reached)
        if copied and owner is not None:
            bias = None if head.bias is None else head.bias.detach().clone()
            return Pending.of(Projection(states, head.weight.detach().clone(), bias, dtype, False))
        projection = Projection(states, head.weight, head.bias, dtype, torch.is_grad_enabled(), gather)
        return Pending.of(projection, reached=reached)

    head.forward = stop  # type: ignore[method-assign, assignment]
    try:
        with exits:
            yield
    finally:
        del head.forward
