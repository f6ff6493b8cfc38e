"""Losses of a few positions from their logits: values, and gradients of the logits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor

from seqreg.divergences import DIVERGENCES, Divergence, kl_summand
from seqreg.forward import Pass
from seqreg.losses import Base, probability_weighted, shares

Detach = Literal["none", "first", "second", "teachers"]

KL_FAMILY: Mapping[Divergence, tuple[float, float]] = {
    "symmetric_kl": (1.0, 1.0),
    "kl": (1.0, 0.0),
    "reverse_kl": (0.0, 1.0),
}
"""How often KL(p || q) and KL(q || p) are in a divergence. Their gradients are written out, those of others derived."""


class Block:
    """Logits of a few positions, while they are in cache: their softmax, and the gradients that parts add up.

    The log of a softmax is logits - top - norm, kept apart: where all logits lie far from 0, their sum has no digits
    left for the norm.

    Args:
        labels: any number where no base loss is evaluated          # [n]
        logits: of every pass                                       # [n, V]
        learning: the passes whose logits get a gradient
    """

    def __init__(self, labels: Tensor, base: Base, logits: Mapping[Pass, Tensor], learning: Collection[Pass]) -> None:
        self.labels, self.base, self.logits, self.learning = labels, base, logits, learning
        self.probabilities: dict[Pass, Tensor] = {}
        self.tops: dict[Pass, Tensor] = {}
        self.norms: dict[Pass, Tensor] = {}
        self.gradients: dict[Pass, Tensor] = {}
        for view, scores in logits.items():
            self.tops[view] = scores.amax(1, keepdim=True)
            powers = (scores - self.tops[view]).exp_()
            total = powers.sum(1, keepdim=True)
            self.probabilities[view] = powers.div_(total)
            self.norms[view] = total.log()

    def add_gradient(self, view: Pass, gradient: Tensor) -> None:
        if view in self.gradients:
            self.gradients[view] += gradient
        else:
            self.gradients[view] = gradient

    def write_gradients(self) -> None:
        """Replace the logits that learn by their gradients, in place."""
        for view in self.learning:
            self.logits[view].copy_(self.gradients[view]) if view in self.gradients else self.logits[view].zero_()


def smoothed_nll(block: Block, view: Pass, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The base loss (label-smoothed, or DFT) and the plain negative log-likelihood, [n] each; adds the gradient.

    Args:
        weight: of every position in the loss; None adds no gradient    # [n, 1]
    """
    logits, top, norm = block.logits[view], block.tops[view], block.norms[view]
    labels, size = block.labels.clamp_min(0).unsqueeze(1), logits.shape[1]
    on_label, on_all = shares(size, block.base.label_smoothing, block.base.smoothing)
    nll = (top - logits.gather(1, labels) + norm).squeeze(1)
    values = on_label * nll
    if block.base.loss == "dft":  # which has no smoothing; the probability is held fixed, a weight like the other
        values = probability_weighted(nll)
        weight = None if weight is None else weight * torch.exp(-nll).unsqueeze(1)
    if on_all:
        values = values + on_all * ((top - logits).sum(1) + size * norm.squeeze(1))
    if weight is not None and view in block.learning:
        gradient = block.probabilities[view] * weight
        if on_all:
            gradient -= on_all * weight
        block.add_gradient(view, gradient.scatter_add_(1, labels, -on_label * weight))
    return values, nll


def divergence(
    block: Block,
    first: Pass,
    second: Pass,
    name: Divergence,
    detach: Detach,
    weight: Tensor | None,
    sharpen: float = 1.0,
) -> Tensor:
    """The divergence of two passes, [n]; adds the gradients of those that are not held fixed.

    Args:
        sharpen: temperature of the side that is held fixed
    """
    learns = [
        weight is not None and view in block.learning and detach != side
        for view, side in ((first, "first"), (second, "second"))
    ]
    if name in KL_FAMILY and sharpen == 1:
        return _kl(block, (first, second), name, learns, detach == "teachers", weight)
    sides = [block.logits[view].detach().requires_grad_(on) for view, on in zip((first, second), learns, strict=True)]
    temperatures = (sharpen if detach == "first" else 1.0, sharpen if detach == "second" else 1.0)
    with torch.enable_grad():
        values = DIVERGENCES[name](*(side / t for side, t in zip(sides, temperatures, strict=True)))
    if weight is not None and values.requires_grad:
        values.backward(weight.squeeze(1))  # type: ignore[no-untyped-call]
        for view, side in zip((first, second), sides, strict=True):
            if side.grad is not None:
                block.add_gradient(view, side.grad)
    return values.detach()


def _kl(
    block: Block, passes: tuple[Pass, Pass], name: Divergence, learns: list[bool], teachers: bool,
    weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """With d = log p - log q, KL(p || q) has the gradients p (d - KL) on the left and q - p on the right.

    Args:
        teachers: hold the left side of each KL fixed
    """
    (p, q), (top_p, top_q), (norm_p, norm_q), (logits_p, logits_q) = (
        (of[passes[0]], of[passes[1]]) for of in (block.probabilities, block.tops, block.norms, block.logits)
    )
    d = (logits_p - logits_q).sub_((top_p - top_q) + (norm_p - norm_q))
    apart, (forward, backward) = p - q, KL_FAMILY[name]
    for number, own, left, right, sign in ((0, p, forward, backward, 1), (1, q, backward, forward, -1)):
        if learns[number] and weight is not None:
            gradient = apart * right if right else torch.zeros_like(apart)
            if left and not teachers:
                gradient += (d - (own * d).sum(1, keepdim=True)).mul_(own)
            block.add_gradient(passes[number], gradient.mul_(sign * weight))
    if forward and backward:
        return apart.mul_(d).sum(1)
    return (kl_summand(p, q, d) if forward else kl_summand(q, p, d.neg_())).sum(1)
