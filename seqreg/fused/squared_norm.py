"""The squared norm of logits, without the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from seqreg.fused.block_sizes import block_sizes
from seqreg.fused.head import refuse_second_derivative


def squared_norm(
    vectors: Tensor, weight: Tensor, weights: Tensor, gather: Callable[[], object] | None = None
) -> Tensor:
    """The sum over n of weights[n] |weight @ vectors[n]|^2, a scalar to call `backward` on, without the products.

    For differences of states this is the squared difference of logits. Through the Gram matrix of the head where there
    are more tokens than dimensions, and in blocks of classes where there are fewer.

    Args:
        vectors: differences of states                              # [N, D]
        weight: of the head                                         # [V, D]
        weights: of every vector; constant                          # [N]
        gather: see `seqreg.fused.head.Projection`
    """
    result: Tensor = _SquaredNorm.apply(torch.is_grad_enabled(), gather or _present, vectors, weight, weights)  # type: ignore[no-untyped-call]
    return result


def _present() -> None:
    """The weight is there."""


class _SquaredNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grad: bool, gather: Callable[[], object], vectors: Tensor, weight: Tensor, weights: Tensor
    ) -> Tensor:
        ctx.needs_grad = ctx.needs_input_grad[2:4] if grad else (False, False)
        ctx.gather = gather
        ctx.save_for_backward(vectors, weight, weights)
        gather()
        total, ctx.gradients = _compute(vectors, weight, weights, ctx.needs_grad)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        gradients, ctx.gradients = ctx.gradients, None  # handed over
        if gradients is None:  # a second backward through a retained graph
            vectors, weight, weights = ctx.saved_tensors
            ctx.gather()
            gradients = _compute(vectors, weight, weights, ctx.needs_grad)[1]
        return (
            None,
            None,
            *(None if gradient is None else gradient.mul_(2 * upstream) for gradient in gradients),
            None,
        )


def _compute(
    vectors: Tensor, weight: Tensor, weights: Tensor, needs_grad: Sequence[bool]
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """The sum, and half of the gradients of vectors and weight, as far as they are needed."""
    scale = weights.to(vectors.dtype).unsqueeze(1)
    weighted = vectors * scale
    weight_grad = torch.empty_like(weight) if needs_grad[1] else None
    if 2 * vectors.shape[1] < 3 * len(vectors):
        images = vectors @ (weight.t() @ weight)  # [N, D]
        if weight_grad is not None:
            torch.mm(weight, vectors.t() @ weighted, out=weight_grad)
    else:
        images = torch.zeros_like(vectors)
        size = block_sizes(weight.device).classes
        for start in range(0, len(weight), size):
            block = weight[start : start + size]
            product = vectors @ block.t()
            torch.addmm(images, product, block, out=images)
            if weight_grad is not None:
                torch.mm(product.t(), weighted, out=weight_grad[start : start + size])
    return (images * weighted).sum(), (images * scale if needs_grad[0] else None, weight_grad)
