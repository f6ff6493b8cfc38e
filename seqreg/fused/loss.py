"""The fused path: vocabulary-sized arithmetic, a few tokens at a time.

With 50,000 classes the logits of a batch, not the network, fill memory and time. A `Projection` stands for logits that
nobody has computed. `fused` takes what a loss is made of, base losses of views and divergences between them, and works
through the tokens in chunks: head product, softmax, values, gradients of states and head, next chunk. Every head
product is made once for all parts that need it, tokens that no part counts are left out before the head, and gradients
are taken in the forward pass, so that nothing of size [tokens, V] outlives its chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from seqreg.divergences import DIVERGENCES, Divergence, kl_summand
from seqreg.fused.head import Head, Projection, refuse_second_derivative, scratch_buffer
from seqreg.losses import Smoothing, shares

Detach = Literal["none", "first", "second", "teachers"]

ROWS = 1024
"""Rows of logits that are held at a time; a token has one for every side."""
CELLS = 2**18
"""Logits that the elementwise work takes on at a time, so that they stay in cache."""
KL_FAMILY: Mapping[Divergence, tuple[float, float]] = {
    "symmetric_kl": (1.0, 1.0),
    "kl": (1.0, 0.0),
    "reverse_kl": (0.0, 1.0),
}
"""How often KL(p || q) and KL(q || p) are in a divergence. Their gradients are written out, those of others derived."""


@dataclass(frozen=True)
class LogitSource:
    """One view in the fused path: a projection, or constant logits, or a projection whose logits are known already.

    Args:
        places: the row of every position in the states; None where it is its number    # [P]
        logits: known logits                                        # [n, V]
        logit_places: the row of every position in the logits       # [P]
    """

    projection: Projection | None
    places: Tensor | None = None
    logits: Tensor | None = None
    logit_places: Tensor | None = None


class Part(ABC):
    """A number at every position of the batch, and its weight in the loss.

    Args:
        weight: of every position                                   # [P]
        where: the positions that are evaluated                     # [P]
    """

    sides: tuple[int, ...]
    values: Tensor
    """At every position, 0 where not evaluated; filled in by `fused`."""

    def __init__(self, weight: Tensor, where: Tensor) -> None:
        self.weight, self.where = weight, where

    def begin(self, like: Tensor) -> None:
        self.values = like.new_zeros(self.where.shape)

    def moves(self, side: int) -> bool:
        """Whether the logits of a side have a gradient by this part."""
        return side in self.sides and bool(self.weight.any())

    @abstractmethod
    def add_to(self, block: _Block) -> None:
        """Take in some positions: their values, and the gradients of their logits."""


class SmoothedNLL(Part):
    """The label-smoothed negative log-likelihood of one side; `nll` is the plain one."""

    nll: Tensor

    def __init__(self, side: int, weight: Tensor, where: Tensor) -> None:
        super().__init__(weight, where)
        self.sides = (side,)

    def begin(self, like: Tensor) -> None:
        super().begin(like)
        self.nll = torch.zeros_like(self.values)

    def add_to(self, block: _Block) -> None:
        (side,), at = self.sides, block.positions
        logits, top, norm = block.logits[side], block.tops[side], block.norms[side]
        labels = block.work.labels[at].clamp_min(0).unsqueeze(1)
        own, spread = shares(logits.shape[1], block.work.label_smoothing, block.work.smoothing)
        nll = (top - logits.gather(1, labels) + norm).squeeze(1)
        values = own * nll
        if spread:
            values = values + spread * ((top - logits).sum(1) + logits.shape[1] * norm.squeeze(1))
        where, weight = self.where[at], self.weight[at].to(logits.dtype).unsqueeze(1)
        self.values[at], self.nll[at] = values.masked_fill(~where, 0.0), nll.masked_fill(~where, 0.0)
        if block.requires_grad[side]:
            gradient = block.probabilities[side] * weight
            if spread:
                gradient -= spread * weight
            block.add(side, gradient.scatter_add_(1, labels, -own * weight))


class LogitDivergence(Part):
    """The divergence of two sides."""

    def __init__(
        self, first: int, second: int, divergence: Divergence, detach: Detach, weight: Tensor, where: Tensor
    ) -> None:
        super().__init__(weight, where)
        self.sides, self.divergence, self.detach = (first, second), divergence, detach

    def moves(self, side: int) -> bool:
        held = {"first": self.sides[0], "second": self.sides[1]}.get(self.detach)
        return side != held and super().moves(side)

    def add_to(self, block: _Block) -> None:
        values = self._kl(block) if self.divergence in KL_FAMILY else self._any(block)
        self.values[block.positions] = values.masked_fill(~self.where[block.positions], 0.0)

    def _held(self, block: _Block) -> tuple[bool, bool]:
        first, second = self.sides
        return self.detach == "first" or not block.requires_grad[
            first
        ], self.detach == "second" or not block.requires_grad[second]

    def _kl(self, block: _Block) -> Tensor:
        """With d = log p - log q, KL(p || q) has the gradients p (d - KL) on the left and q - p on the right."""
        first, second = self.sides
        p, q = block.probabilities[first], block.probabilities[second]
        shift = (block.tops[first] - block.tops[second]) + (block.norms[first] - block.norms[second])
        d = (block.logits[first] - block.logits[second]).sub_(shift)
        apart, (forward, backward) = p - q, KL_FAMILY[self.divergence]
        weight, held = self.weight[block.positions].to(d.dtype).unsqueeze(1), self._held(block)
        for side, own, left, right, sign in ((first, p, forward, backward, 1), (second, q, backward, forward, -1)):
            if held[sign < 0]:
                continue
            gradient = apart * right if right else torch.zeros_like(apart)
            if left and self.detach != "teachers":
                gradient += (d - (own * d).sum(1, keepdim=True)).mul_(own)
            block.add(side, gradient.mul_(sign * weight))
        if forward and backward:
            return apart.mul_(d).sum(1)
        return (kl_summand(p, q, d) if forward else kl_summand(q, p, d.neg_())).sum(1)

    def _any(self, block: _Block) -> Tensor:
        """By the plain formula and autograd, on these rows alone."""
        sides = [block.logits[side].detach() for side in self.sides]
        needs_grad = [one for one, held in zip(sides, self._held(block), strict=True) if not held]
        for one in needs_grad:
            one.requires_grad_()
        with torch.enable_grad():
            values = DIVERGENCES[self.divergence](*sides)
        if values.requires_grad:
            weight = self.weight[block.positions].to(values.dtype)
            found = torch.autograd.grad(values, needs_grad, weight, allow_unused=True)
            gradients = {id(one): gradient for one, gradient in zip(needs_grad, found, strict=True)}
            for side, one in zip(self.sides, sides, strict=True):
                if gradients.get(id(one)) is not None:
                    block.add(side, gradients[id(one)])
        return values.detach()


@dataclass(frozen=True)
class FusedObjective:
    """All that one call computes.

    Args:
        sides: the views; those that have a projection share one head
        labels: of every position; any number where no `SmoothedNLL` is evaluated    # [P]
    """

    sides: Sequence[LogitSource]
    labels: Tensor
    parts: Sequence[Part]
    label_smoothing: float = 0.0
    smoothing: Smoothing = "torch"


def fused(work: FusedObjective, *, head_grad: bool = True, retain_graph: bool = False) -> Tensor:
    """The weighted sum of all parts, a scalar to call `backward` on; fills in the values of the parts.

    Its gradient cannot be differentiated again.

    Args:
        head_grad: False leaves out the gradient of the head, for which an ascent has no use
        retain_graph: there will be several backwards through a retained graph; otherwise they compute everything anew
    """
    known = [side.projection for side in work.sides if side.projection is not None]
    weight, bias = known[0].weight, known[0].bias
    if not head_grad:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    states = [None if side.projection is None else side.projection.states for side in work.sides]
    result: Tensor = _Fused.apply(work, retain_graph, torch.is_grad_enabled(), weight, bias, *states)  # type: ignore[no-untyped-call]
    return result


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        work: FusedObjective,
        retain_graph: bool,
        grad: bool,
        weight: Tensor,
        bias: Tensor | None,
        *states: Tensor | None,
    ) -> Tensor:
        ctx.work, ctx.retain_graph = work, retain_graph
        ctx.needs_grad = ctx.needs_input_grad[3:] if grad else (False,) * (2 + len(states))
        ctx.save_for_backward(weight, bias)
        total, ctx.gradients = _compute(work, weight, bias, ctx.needs_grad)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        gradients = ctx.gradients
        if not ctx.retain_graph:
            ctx.gradients = None  # handed over, so that autograd may add to them in place
        if gradients is None:  # a second backward through a retained graph
            weight, bias = ctx.saved_tensors
            gradients = _compute(ctx.work, weight, bias, ctx.needs_grad)[1]
        if upstream != 1.0:
            gradients = tuple(None if one is None else one * upstream.to(one.dtype) for one in gradients)
        of = [side.projection for side in ctx.work.sides]
        dtypes = [ctx.saved_tensors[0].dtype] * 2 + [torch.float32 if one is None else one.states.dtype for one in of]
        narrow = (None if one is None else one.to(dtype) for one, dtype in zip(gradients, dtypes, strict=True))
        return (None, None, None, *narrow)


def _compute(
    work: FusedObjective, weight: Tensor, bias: Tensor | None, needs_grad: Sequence[bool]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss, and the gradients of weight, bias and the states of every side, as far as they are needs_grad."""
    head = Head([side.projection for side in work.sides], weight, bias, needs_grad)
    head.allocate_grads([any(part.moves(k) for part in work.parts) for k in range(len(work.sides))])
    for part in work.parts:
        part.begin(head.wide)
    with torch.autocast(weight.device.type, enabled=False):  # the products say themselves what they are in
        for positions, sides in _groups(work):
            for chunk in torch.split(positions, max(1, ROWS // len(sides))):
                _chunk(work, head, chunk, sides)
    total = head.wide.new_zeros(())
    for part in work.parts:
        total = total + (part.weight.to(part.values.dtype) * part.values).sum()
    return total, head.gradients()


def _groups(work: FusedObjective) -> Iterator[tuple[Tensor, list[int]]]:
    """Positions that need the same sides, together with those sides."""
    needed = torch.zeros(len(work.sides), len(work.labels), dtype=torch.bool, device=work.labels.device)
    for part in work.parts:
        for side in part.sides:
            needed[side] |= part.where
    pattern = (needed.long() << torch.arange(len(needed), device=needed.device).unsqueeze(1)).sum(0)
    for code in torch.unique(pattern).tolist():
        if code:
            yield (pattern == code).nonzero().squeeze(1), [k for k in range(len(needed)) if code >> k & 1]


def _chunk(work: FusedObjective, head: Head, positions: Tensor, sides: Sequence[int]) -> None:
    """Some positions, all of which need these sides."""
    sides = sorted(sides, key=lambda k: not head.requires_grad[k])  # those with a gradient come first
    size, requires_grad = len(positions), [k for k in sides if head.requires_grad[k]]
    scores = scratch_buffer(len(sides) * size, len(head.weight), head.wide)
    logits = dict(zip(sides, torch.split(scores, size), strict=True))  # [size, V] each
    places = {k: _at(work.sides[k].places, positions) for k in sides}
    states = {k: every[places[k]].to(head.dtype) for k in sides if (every := head.states[k]) is not None}
    for k in sides:
        given = work.sides[k].logits
        if given is None:
            head.project(states[k], logits[k])
        else:
            logits[k].copy_(given[_at(work.sides[k].logit_places, positions)])
    parts = [part for part in work.parts if set(part.sides) <= set(sides)]
    step = max(1, CELLS // len(head.weight))
    for start in range(0, size, step):
        rows = slice(start, start + step)
        block = _Block(work, positions[rows], {k: logits[k][rows] for k in sides}, head.requires_grad)
        for part in parts:
            part.add_to(block)
        for k in requires_grad:
            block.logits[k].copy_(block.gradients[k]) if k in block.gradients else block.logits[k].zero_()
    if requires_grad:
        found = head.accumulate_grads(
            scores[: len(requires_grad) * size], torch.cat([states[k] for k in requires_grad])
        )
        for k, gradient in zip(
            requires_grad, () if found is None else torch.split(found, size), strict=found is not None
        ):
            if (target := head.d_states[k]) is not None:
                target.flatten(0, -2)[places[k]] = gradient.to(target.dtype)


def _at(places: Tensor | None, positions: Tensor) -> Tensor:
    return positions if places is None else places[positions]


class _Block:
    """Some rows of logits of every side, while they are in cache.

    The log of a softmax is logits - top - norm, kept apart: where all logits lie far from 0, their sum has no digits
    left for the norm.
    """

    def __init__(
        self, work: FusedObjective, positions: Tensor, logits: Mapping[int, Tensor], requires_grad: Sequence[bool]
    ) -> None:
        self.work, self.positions, self.logits, self.requires_grad = work, positions, logits, requires_grad
        self.probabilities: dict[int, Tensor] = {}
        self.tops: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        for side, rows in logits.items():
            self.tops[side] = rows.amax(1, keepdim=True)
            powers = (rows - self.tops[side]).exp_()
            total = powers.sum(1, keepdim=True)
            self.probabilities[side] = powers.div_(total)
            self.norms[side] = total.log()

    def add(self, side: int, gradient: Tensor) -> None:
        if side in self.gradients:
            self.gradients[side] += gradient
        else:
            self.gradients[side] = gradient
