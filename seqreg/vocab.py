"""The fused path: vocabulary-sized arithmetic, a few tokens at a time.

With 50,000 classes the logits of a batch, not the network, fill memory and time. A `Projection` stands for logits that
nobody has computed. `fused` takes what a loss is made of, base losses of views and divergences between them, and works
through the tokens in chunks: head product, softmax, values, gradients of states and head, next chunk. Every head
product is made once for all parts that need it, tokens that no part counts are left out before the head, and gradients
are taken in the forward pass, so that nothing of size [tokens, V] outlives its chunk.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from seqreg.divergences import DIVERGENCES, Divergence, kl_summand
from seqreg.losses import Smoothing, at_least_float32, shares

Detach = Literal["none", "first", "second", "teachers"]

ROWS = 1024
"""Rows of logits that are held at a time; a token has one for every side."""
CLASSES = 1024
"""Width of the blocks of the head product."""
CELLS = 2**18
"""Logits that the elementwise work takes on at a time, so that they stay in cache."""
KL_FAMILY: Mapping[Divergence, tuple[float, float]] = {
    "symmetric_kl": (1.0, 1.0),
    "kl": (1.0, 0.0),
    "reverse_kl": (0.0, 1.0),
}
"""How often KL(p || q) and KL(q || p) are in a divergence. Their gradients are written out, those of others derived."""


@dataclass(frozen=True)
class Projection:
    """Logits that have not been computed: states @ weight.T + bias.

    Args:
        states: what the head is given                              # [B, T, D]
        weight: of the head                                         # [V, D]
        bias: of the head, and what the model adds afterwards       # [V]
        dtype: of the product; lower than that of the weight under autocast
        live: whether gradients may flow; False for a pass without them
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    live: bool = True

    def logits(self) -> Tensor:
        """All of them, [B, T, V], by way of autograd."""
        with torch.set_grad_enabled(self.live):  # whoever asks: what is computed here is kept for all
            product = functional.linear(self.states.to(self.dtype), self.weight.to(self.dtype))
            return product if self.bias is None else product + self.bias


@dataclass(frozen=True)
class Side:
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


class Fit(Part):
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
        logits, norm = block.logits[side], block.norms[side]
        labels = block.work.labels[at].clamp_min(0).unsqueeze(1)
        own, spread = shares(logits.shape[1], block.work.label_smoothing, block.work.smoothing)
        nll = (norm - logits.gather(1, labels)).squeeze(1)
        values = own * nll
        if spread:
            values = values + spread * (logits.shape[1] * norm.squeeze(1) - logits.sum(1))
        where, weight = self.where[at], self.weight[at].to(logits.dtype).unsqueeze(1)
        self.values[at], self.nll[at] = values.masked_fill(~where, 0.0), nll.masked_fill(~where, 0.0)
        if block.live[side]:
            gradient = block.probabilities[side] * weight
            if spread:
                gradient -= spread * weight
            block.add(side, gradient.scatter_add_(1, labels, -own * weight))


class Gap(Part):
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
        return self.detach == "first" or not block.live[first], self.detach == "second" or not block.live[second]

    def _kl(self, block: _Block) -> Tensor:
        """With d = log p - log q, KL(p || q) has the gradients p (d - KL) on the left and q - p on the right."""
        first, second = self.sides
        p, q = block.probabilities[first], block.probabilities[second]
        d = (block.logits[first] - block.logits[second]).sub_(block.norms[first] - block.norms[second])
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
        wanted = [one for one, held in zip(sides, self._held(block), strict=True) if not held]
        for one in wanted:
            one.requires_grad_()
        with torch.enable_grad():
            values = DIVERGENCES[self.divergence](*sides)
        if values.requires_grad:
            weight = self.weight[block.positions].to(values.dtype)
            found = torch.autograd.grad(values, wanted, weight, allow_unused=True)
            gradients = {id(one): gradient for one, gradient in zip(wanted, found, strict=True)}
            for side, one in zip(self.sides, sides, strict=True):
                if gradients.get(id(one)) is not None:
                    block.add(side, gradients[id(one)])
        return values.detach()


@dataclass(frozen=True)
class Work:
    """All that one call computes.

    Args:
        sides: the views; those that have a projection share one head
        labels: of every position; any number where no `Fit` is evaluated    # [P]
    """

    sides: Sequence[Side]
    labels: Tensor
    parts: Sequence[Part]
    label_smoothing: float = 0.0
    smoothing: Smoothing = "torch"


def fused(work: Work, *, head_grad: bool = True, hold: bool = False) -> Tensor:
    """The weighted sum of all parts, a scalar to call `backward` on; fills in the values of the parts.

    Its gradient cannot be differentiated again.

    Args:
        head_grad: False leaves out the gradient of the head, for which an ascent has no use
        hold: there will be several backwards through a retained graph; otherwise they compute everything anew
    """
    known = [side.projection for side in work.sides if side.projection is not None]
    weight, bias = known[0].weight, known[0].bias
    if not head_grad:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    states = [None if side.projection is None else side.projection.states for side in work.sides]
    result: Tensor = _Fused.apply(work, hold, torch.is_grad_enabled(), weight, bias, *states)  # type: ignore[no-untyped-call]
    return result


def known(projection: Projection, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of these positions, [n, V], without a graph, and the row of every position in them."""
    places = positions.new_zeros(projection.states.shape[:-1].numel())
    places[positions] = torch.arange(len(positions), device=positions.device)
    with torch.no_grad():
        head = _Head([Side(projection)], projection.weight, projection.bias, (False,) * 3)
        logits = _space(len(positions), len(head.weight), head.wide, reuse=False)
        head.project(projection.states.detach().flatten(0, -2)[positions].to(head.dtype), logits)
    return logits, places


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
        ctx.wanted = ctx.needs_input_grad[1:3] if grad else (False, False)
        ctx.save_for_backward(vectors, weight, weights)
        total, ctx.gradients = _squared_norm(vectors, weight, weights, ctx.wanted)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        _refuse_second_derivative()
        gradients, ctx.gradients = ctx.gradients, None  # handed over
        if gradients is None:  # a second backward through a retained graph
            vectors, weight, weights = ctx.saved_tensors
            gradients = _squared_norm(vectors, weight, weights, ctx.wanted)[1]
        return (None, *(None if one is None else one.mul_(2 * upstream) for one in gradients), None)


def _squared_norm(
    vectors: Tensor, weight: Tensor, weights: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """The sum, and half of the gradients of vectors and weight, as far as they are wanted."""
    scale = weights.to(vectors.dtype).unsqueeze(1)
    weighted = vectors * scale
    d_weight = torch.empty_like(weight) if wanted[1] else None
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
    return (images * weighted).sum(), (images * scale if wanted[0] else None, d_weight)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: Work, hold: bool, grad: bool, weight: Tensor, bias: Tensor | None, *states: Tensor | None
    ) -> Tensor:
        ctx.work, ctx.hold = work, hold
        ctx.wanted = ctx.needs_input_grad[3:] if grad else (False,) * (2 + len(states))
        ctx.save_for_backward(weight, bias)
        total, ctx.gradients = _compute(work, weight, bias, ctx.wanted)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        _refuse_second_derivative()
        gradients = ctx.gradients
        if not ctx.hold:
            ctx.gradients = None  # handed over, so that autograd may add to them in place
        if gradients is None:  # a second backward through a retained graph
            weight, bias = ctx.saved_tensors
            gradients = _compute(ctx.work, weight, bias, ctx.wanted)[1]
        if upstream != 1.0:
            gradients = tuple(None if one is None else one * upstream.to(one.dtype) for one in gradients)
        of = [side.projection for side in ctx.work.sides]
        dtypes = [ctx.saved_tensors[0].dtype] * 2 + [torch.float32 if one is None else one.states.dtype for one in of]
        narrow = (None if one is None else one.to(dtype) for one, dtype in zip(gradients, dtypes, strict=True))
        return (None, None, None, *narrow)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # that is what create_graph=True does
        raise RuntimeError("the fused loss cannot be differentiated twice: use Criterion(..., fused=False)")


def _compute(
    work: Work, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss, and the gradients of weight, bias and the states of every side, as far as they are wanted."""
    head = _Head(work.sides, weight, bias, wanted)
    head.move([any(part.moves(k) for part in work.parts) for k in range(len(work.sides))])
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


def _groups(work: Work) -> Iterator[tuple[Tensor, list[int]]]:
    """Positions that need the same sides, together with those sides."""
    needed = torch.zeros(len(work.sides), len(work.labels), dtype=torch.bool, device=work.labels.device)
    for part in work.parts:
        for side in part.sides:
            needed[side] |= part.where
    pattern = (needed.long() << torch.arange(len(needed), device=needed.device).unsqueeze(1)).sum(0)
    for code in torch.unique(pattern).tolist():
        if code:
            yield (pattern == code).nonzero().squeeze(1), [k for k in range(len(needed)) if code >> k & 1]


def _chunk(work: Work, head: _Head, positions: Tensor, sides: Sequence[int]) -> None:
    """Some positions, all of which need these sides."""
    sides = sorted(sides, key=lambda k: not head.live[k])  # those with a gradient come first
    size, live = len(positions), [k for k in sides if head.live[k]]
    scores = _space(len(sides) * size, len(head.weight), head.wide)
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
        block = _Block(work, positions[rows], {k: logits[k][rows] for k in sides}, head.live)
        for part in parts:
            part.add_to(block)
        for k in live:
            block.logits[k].copy_(block.gradients[k]) if k in block.gradients else block.logits[k].zero_()
    if live:
        found = head.learn(scores[: len(live) * size], torch.cat([states[k] for k in live]))
        for k, gradient in zip(live, () if found is None else torch.split(found, size), strict=found is not None):
            if (target := head.d_states[k]) is not None:
                target.flatten(0, -2)[places[k]] = gradient.to(target.dtype)


def _at(places: Tensor | None, positions: Tensor) -> Tensor:
    return positions if places is None else places[positions]


class _Block:
    """Some rows of logits of every side, while they are in cache."""

    def __init__(self, work: Work, positions: Tensor, logits: Mapping[int, Tensor], live: Sequence[bool]) -> None:
        self.work, self.positions, self.logits, self.live = work, positions, logits, live
        self.probabilities: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        for side, rows in logits.items():
            top = rows.amax(1, keepdim=True)
            powers = (rows - top).exp_()
            total = powers.sum(1, keepdim=True)
            self.probabilities[side] = powers.div_(total)
            self.norms[side] = top + total.log()

    def add(self, side: int, gradient: Tensor) -> None:
        if side in self.gradients:
            self.gradients[side] += gradient
        else:
            self.gradients[side] = gradient


class _Head:
    """The head, and the gradients that grow on it and on the states of every side."""

    def __init__(self, sides: Sequence[Side], weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        projections = [side.projection for side in sides]
        self.dtype = next(one.dtype for one in projections if one is not None)
        self.weight, self.cast = weight.detach(), weight.detach().to(self.dtype)  # [V, D]
        self.wide = at_least_float32(weight.detach().new_empty(0))
        self.bias = None if bias is None or not (wanted[1] or bool(bias.any())) else bias.detach()
        self.states = [None if one is None else one.states.detach().flatten(0, -2) for one in projections]
        self.shapes = [() if one is None else one.states.shape for one in projections]
        self.live = [
            one is not None and one.live and (wanted[0] or wanted[1] or wanted[2 + k])
            for k, one in enumerate(projections)
        ]
        self.wanted = wanted
        self.d_weight: Tensor | None = None
        self.d_bias: Tensor | None = None
        self.d_states: list[Tensor | None] = [None for _ in sides]
        self.untouched = True

    def move(self, moves: Sequence[bool]) -> None:
        """Make room for gradients: of the sides that have one, or zeros for all where none has (a batch of padding)."""
        none = not any(move and live for move, live in zip(moves, self.live, strict=True))
        if self.wanted[0]:
            self.d_weight = torch.empty(self.weight.shape, dtype=self.wide.dtype, device=self.weight.device)
        if self.wanted[1]:
            self.d_bias = self.wide.new_zeros(len(self.weight))
        for k, states in enumerate(self.states):
            if states is not None and self.wanted[2 + k] and (moves[k] or none):
                self.d_states[k] = torch.zeros(self.shapes[k], dtype=self.wide.dtype, device=states.device)
        self.live = [live and move for live, move in zip(self.live, moves, strict=True)]

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

    def learn(self, gradient: Tensor, states: Tensor) -> Tensor | None:
        """Take in the gradient of some logits, [n, V]; gives that of their states, [n, D], if anyone wants it."""
        if self.d_bias is not None:
            self.d_bias += gradient.sum(0)
        wanted = any(one is not None for one in self.d_states)
        if self.dtype != gradient.dtype:
            return self._learn_narrow(gradient, states, wanted)
        if self.d_weight is not None:
            if self.untouched:
                torch.mm(gradient.t(), states, out=self.d_weight)
            else:  # not addmm_, which counters of operations overlook
                torch.addmm(self.d_weight, gradient.t(), states, out=self.d_weight)
            self.untouched = False
        return gradient @ self.cast if wanted else None

    def _learn_narrow(self, gradient: Tensor, states: Tensor, wanted: bool) -> Tensor | None:
        """The same with products in lower precision, their sums in float32.

        Gradients are brought to a sixteenth at most for the product: a loss scale comes too late for those that float16
        would lose, and the sums must not overflow it.
        """
        found = gradient.new_zeros(len(gradient), states.shape[1]) if wanted else None
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


_spaces = threading.local()


def _space(rows: int, width: int, like: Tensor, *, reuse: bool = True) -> Tensor:
    """Room for [rows, width] logits. Rows begin at multiples of 16 numbers, without which products are a third slower.

    On the CPU the room is kept from call to call: the system takes as long to give new pages as a product does.
    """
    stride = -(-width // 16) * 16
    if not reuse or like.device.type != "cpu":
        return like.new_empty(rows, stride)[:, :width]
    kept: Tensor | None = getattr(_spaces, str(like.dtype), None)
    if kept is None or kept.numel() < rows * stride:
        kept = like.new_empty(rows * stride)
        setattr(_spaces, str(like.dtype), kept)
    return kept[: rows * stride].view(rows, stride)[:, :width]


def release() -> None:
    """Give back the room that is kept from call to call."""
    vars(_spaces).clear()
