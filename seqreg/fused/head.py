"""The head of a vocabulary: logits that nobody has computed, and products with it in blocks of classes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from seqreg.losses import at_least_float32

CLASSES = 1024
"""Width of the blocks of the head product."""


@dataclass(frozen=True)
class Projection:
    """Logits that have not been computed: states @ weight.T + bias.

    Args:
        states: what the head is given                              # [B, T, D]
        weight: of the head                                         # [V, D]
        bias: of the head, and what the model adds afterwards       # [V]
        dtype: of the product; lower than that of the weight under autocast
        requires_grad: whether gradients may flow; False for a pass without them
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    requires_grad: bool = True

    def logits(self) -> Tensor:
        """All of them, [B, T, V], by way of autograd."""
        with torch.set_grad_enabled(self.requires_grad):  # whoever asks: what is computed here is kept for all
            product = functional.linear(self.states.to(self.dtype), self.weight.to(self.dtype))
            return product if self.bias is None else product + self.bias


def known(projection: Projection, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of these positions, [n, V], without a graph, and the row of every position in them."""
    places = positions.new_zeros(projection.states.shape[:-1].numel())
    places[positions] = torch.arange(len(positions), device=positions.device)
    with torch.no_grad():
        head = Head([projection], projection.weight, projection.bias, (False,) * 3)
        logits = scratch_buffer(len(positions), len(head.weight), head.wide, reuse=False)
        head.project(projection.states.detach().flatten(0, -2)[positions].to(head.dtype), logits)
    return logits, places


class Head:
    """The head, and the gradients that grow on it and on the states of every side."""

    def __init__(
        self, projections: Sequence[Projection | None], weight: Tensor, bias: Tensor | None, needs_grad: Sequence[bool]
    ) -> None:
        self.dtype = next(one.dtype for one in projections if one is not None)
        self.weight, self.cast = weight.detach(), weight.detach().to(self.dtype)  # [V, D]
        self.wide = at_least_float32(weight.detach().new_empty(0))
        self.bias = None if bias is None or not (needs_grad[1] or bool(bias.any())) else bias.detach()
        self.states = [None if one is None else one.states.detach().flatten(0, -2) for one in projections]
        self.shapes = [() if one is None else one.states.shape for one in projections]
        self.requires_grad = [
            one is not None and one.requires_grad and (needs_grad[0] or needs_grad[1] or needs_grad[2 + k])
            for k, one in enumerate(projections)
        ]
        self.needs_grad = needs_grad
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        self.d_states: list[Tensor | None] = [None for _ in projections]
        self.untouched = True

    def allocate_grads(self, moves: Sequence[bool]) -> None:
        """Make room for gradients: of the sides that have one, or zeros for all where none has (a batch of padding)."""
        none = not any(move and requires_grad for move, requires_grad in zip(moves, self.requires_grad, strict=True))
        if self.needs_grad[0]:
            self.d_weight = torch.empty(self.weight.shape, dtype=self.wide.dtype, device=self.weight.device)
        if self.needs_grad[1]:
            self.d_bias = self.wide.new_zeros(len(self.weight))
        for k, states in enumerate(self.states):
            if states is not None and self.needs_grad[2 + k] and (moves[k] or none):
                self.d_states[k] = torch.zeros(self.shapes[k], dtype=self.wide.dtype, device=states.device)
        self.requires_grad = [
            requires_grad and move for requires_grad, move in zip(self.requires_grad, moves, strict=True)
        ]

    def project(self, states: Tensor, logits: Tensor) -> None:
        """logits = states @ weight.T + bias, in blocks of classes: as fast as the machine multiplies."""
        for start in range(0, len(self.cast), CLASSES):
            block, out = self.cast[start : start + CLASSES], logits[:, start : start + CLASSES]
            if out.dtype == self.dtype:
                torch.mm(states, block.t(), out=out)
            else:
                out.copy_(states @ block.t())
        if self.bias is not None:
            logits += self.bias

    def accumulate_grads(self, gradient: Tensor, states: Tensor) -> Tensor | None:
        """Take in the gradient of some logits, [n, V]; gives that of their states, [n, D], if anyone wants it."""
        if self.d_bias is not None:
            self.d_bias += gradient.sum(0)
        needs_grad = any(one is not None for one in self.d_states)
        if self.dtype != gradient.dtype:
            return self._accumulate_narrow_grads(gradient, states, needs_grad)
        if self.d_weight is not None:
            if self.untouched:
                torch.mm(gradient.t(), states, out=self.d_weight)
            else:  # not addmm_, which counters of operations overlook
                torch.addmm(self.d_weight, gradient.t(), states, out=self.d_weight)
            self.untouched = False
        return gradient @ self.cast if needs_grad else None

    def _accumulate_narrow_grads(self, gradient: Tensor, states: Tensor, needs_grad: bool) -> Tensor | None:
        """The same with products in lower precision, their sums in float32.

        Gradients are brought to a sixteenth at most for the product: a loss scale comes too late for those that float16
        would lose, and the sums must not overflow it.
        """
        found = gradient.new_zeros(len(gradient), states.shape[1]) if needs_grad else None
        scale = 2.0 ** (-4 - torch.ceil(torch.log2(gradient.abs().amax().clamp_min(1e-30))))
        for start in range(0, len(self.cast), CLASSES):
            block = (gradient[:, start : start + CLASSES] * scale).to(self.dtype)
            if self.d_weight is not None:
                rows = self.d_weight[start : start + CLASSES]
                product = (block.t() @ states).to(rows.dtype) / scale
                rows.copy_(product) if self.untouched else rows.add_(product)
            if found is not None:
                found += (block @ self.cast[start : start + CLASSES]).to(found.dtype) / scale
        self.untouched = False
        return found

    def gradients(self) -> tuple[Tensor | None, ...]:
        weight = self.d_weight
        if weight is not None:
            weight = weight.zero_() if self.untouched else weight
        return (weight, self.d_bias, *self.d_states)


def squared_norm(vectors: Tensor, weight: Tensor, weights: Tensor) -> Tensor:
    """The sum over n of weights[n] |weight @ vectors[n]|^2, a scalar to call `backward` on, without the products.

    For differences of states this is the squared difference of logits. Through the Gram matrix of the head where there
    are more tokens than dimensions, and in blocks of classes where there are fewer.

    Args:
        vectors: differences of states                              # [N, D]
        weight: of the head                                         # [V, D]
        weights: of every vector; constant                          # [N]
    """
    result: Tensor = _SquaredNorm.apply(torch.is_grad_enabled(), vectors, weight, weights)  # type: ignore[no-untyped-call]
    return result


class _SquaredNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: bool, vectors: Tensor, weight: Tensor, weights: Tensor) -> Tensor:
        ctx.needs_grad = ctx.needs_input_grad[1:3] if grad else (False, False)
        ctx.save_for_backward(vectors, weight, weights)
        total, ctx.gradients = _squared_norm(vectors, weight, weights, ctx.needs_grad)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        gradients, ctx.gradients = ctx.gradients, None  # handed over
        if gradients is None:  # a second backward through a retained graph
            vectors, weight, weights = ctx.saved_tensors
            gradients = _squared_norm(vectors, weight, weights, ctx.needs_grad)[1]
        return (None, *(None if one is None else one.mul_(2 * upstream) for one in gradients), None)


def _squared_norm(
    vectors: Tensor, weight: Tensor, weights: Tensor, needs_grad: Sequence[bool]
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """The sum, and half of the gradients of vectors and weight, as far as they are needs_grad."""
    scale = weights.to(vectors.dtype).unsqueeze(1)
    weighted = vectors * scale
    d_weight = torch.empty_like(weight) if needs_grad[1] else None
    if 2 * vectors.shape[1] < 3 * len(vectors):
        images = vectors @ (weight.t() @ weight)  # [N, D]
        if d_weight is not None:
            torch.mm(weight, vectors.t() @ weighted, out=d_weight)
    else:
        images = torch.zeros_like(vectors)
        for start in range(0, len(weight), CLASSES):
            block = weight[start : start + CLASSES]
            product = vectors @ block.t()
            torch.addmm(images, product, block, out=images)
            if d_weight is not None:
                torch.mm(product.t(), weighted, out=d_weight[start : start + CLASSES])
    return (images * weighted).sum(), (images * scale if needs_grad[0] else None, d_weight)


def refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # that is what create_graph=True does
        raise RuntimeError("the fused loss cannot be differentiated twice: use Criterion(..., fused=False)")


_spaces = threading.local()


def scratch_buffer(rows: int, width: int, like: Tensor, *, reuse: bool = True) -> Tensor:
    """Room for [rows, width] logits. Rows begin at multiples of 16 numbers, without which products are a third slower.

    On the CPU the room is kept from call to call: the system takes as long to give new pages as a product does.
    """
    stride = -(-width // 16) * 16
    if not reuse or like.device.type != "cpu":
        return like.new_empty(rows, stride)[:, :width]
    kept: Tensor | None = getattr(_spaces, str(like.dtype), None)
    if kept is None or kept.numel() < rows * stride:
        with torch.inference_mode(False):  # what an evaluation leaves here, training writes to
            kept = torch.empty(rows * stride, dtype=like.dtype)
        setattr(_spaces, str(like.dtype), kept)
    return kept[: rows * stride].view(rows, stride)[:, :width]


def release() -> None:
    """Give back the room that is kept from call to call."""
    vars(_spaces).clear()
