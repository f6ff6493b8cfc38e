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

from seqreg.fused.head import Projection


@dataclass
class Pending:
    """Logits that nobody has needed yet. Not a tensor, but torch's functions and its own methods take it for one."""

    projection: Projection
    made: Tensor | None = None

    def tensor(self) -> Tensor:
        """The logits; from here on they are what counts."""
        if self.made is None:
            self.made = self.projection.logits()
        return self.made

    def __add__(self, other: Any) -> Any:
        projection = self.projection
        if not _is_row(other, len(projection.weight)):
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
        if name.startswith("__") or name in ("projection", "made"):
            raise AttributeError(name)
        if name in ("float", "contiguous"):  # what follows is computed in float32 anyway
            return lambda: self
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_tensors(args), **{key: _tensors([value])[0] for key, value in (kwargs or {}).items()})

    def _with(self, **changes: Any) -> Pending:
        return Pending(replace(self.projection, **changes))


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


def head_of(model: nn.Module, module: PreTrainedModel) -> nn.Linear | None:
    """The head that can be deferred, or None: its weight must be usable outside of the model's own forward pass."""
    head = module.get_output_embeddings()
    while model is not module:
        if isinstance(model, DistributedDataParallel) and not model.find_unused_parameters:
            model = model.module
        elif hasattr(model, "get_base_model"):  # PEFT
            break
        else:  # FSDP and DeepSpeed shard the weight, torch.compile has compiled the head
            return None
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or "forward" in vars(head):
        return None
    if head._forward_hooks or head._forward_pre_hooks or getattr(module, "_compiled_call_impl", None) is not None:
        return None
    return head if head.weight.shape == (head.out_features, head.in_features) else None


@contextlib.contextmanager
def deferred(head: nn.Linear | None) -> Iterator[None]:
    """Passes inside stop before the head."""
    if head is None:
        yield
        return

    def stop(states: Tensor) -> Any:
        kind = states.device.type
        autocast = torch.is_autocast_enabled(kind) and states.is_floating_point()
        dtype = torch.get_autocast_dtype(kind) if autocast and states.dtype != torch.float64 else states.dtype
        return Pending(Projection(states, head.weight, head.bias, dtype, torch.is_grad_enabled()))

    head.forward = stop  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward
