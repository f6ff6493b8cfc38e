"""What a loss is made of, and the two ways to compute it.

A term declares `BaseLoss` and `Consistency` parts, alone or as a `WeightedSum`. All of them are computed together: on
the fused path where the passes hold the states before a language-model head, and from logits where they do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

from seqreg.context import Evaluation, Per, Positions
from seqreg.divergences import DIVERGENCES, Divergence, kl
from seqreg.errors import BadInput
from seqreg.forward import Pass
from seqreg.fused.block import Block, Detach, divergence, smoothed_nll
from seqreg.fused.loss import Summand, Values, fused_loss
from seqreg.losses import at_least_float32, label_smoothed_nll, probability_weighted, squared_error

Path = Literal["fused", "plain", "own"]


class Part(ABC):
    """One number per position, of one pass or two, to be averaged over the batch."""

    @property
    @abstractmethod
    def passes(self) -> tuple[Pass, ...]:
        """The passes that it is of."""

    @property
    def learning(self) -> tuple[Pass, ...]:
        """The passes that have a gradient by it."""
        return self.passes

    @property
    def key(self) -> object:
        """Parts of the same key have the same values."""
        return id(self)

    def check(self, ctx: Evaluation) -> None:
        """Refuse what makes no sense on this batch."""
        return

    @abstractmethod
    def weights(self, ctx: Evaluation) -> Tensor:
        """What every position counts in the mean."""

    @abstractmethod
    def from_logits(self, ctx: Evaluation) -> Values:
        """The number at every position, [B, T] or [B], from all logits; and the plain negative log-likelihood."""

    @abstractmethod
    def from_block(self, block: Block, weight: Tensor | None) -> Values:
        """The same at the positions of a block of the fused path, to which it adds the gradients of the logits."""

    def value(self, ctx: Evaluation, *, retain_graph: bool = False) -> Tensor:
        """The mean, a scalar to call `backward` on; with `retain_graph`, more than once."""
        return _compute([(self, self.weights(ctx))], ctx, retain_graph=retain_graph)[0]

    def sum(self, ctx: Evaluation, where: Tensor) -> Tensor:
        """The plain sum over some positions, for an ascent: without a gradient for the head."""
        return _compute([(self, where.float())], ctx, head_grad=False)[0]


@dataclass(frozen=True, eq=False)
class BaseLoss(Part):
    """The base loss of a pass, averaged as the criterion averages it."""

    view: Pass

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (self.view,)

    @property
    def key(self) -> object:
        return (BaseLoss, id(self.view))

    def weights(self, ctx: Evaluation) -> Tensor:
        return ctx.weights(ctx.base.per)

    def from_logits(self, ctx: Evaluation) -> Values:
        return base_loss(self.view, ctx)

    def from_block(self, block: Block, weight: Tensor | None) -> Values:
        return smoothed_nll(block, self.view, weight)


@dataclass(frozen=True, eq=False)
class Consistency(Part):
    """Two passes that should agree.

    Args:
        first, second: the passes; `divergence(first, second)` is taken at every position. The second may be of some
            rows
        detach: the side that is held fixed; "teachers" holds the left side of each of the two KLs of "symmetric_kl"
        per, padding: see `Evaluation.reduce`
        positions: those that count, see `Evaluation.weights`
        sample: a factor of every position: 0 leaves it out, and others make up for it    # [B, T] or [B]
        confidence: positions whose held side has no class of this probability count as 0
        sharpen: the temperature of the held side, which is its target
    """

    first: Pass
    second: Pass
    divergence: Divergence = "symmetric_kl"
    detach: Detach = "none"
    per: Per = "token"
    padding: bool = False
    sample: Tensor | None = None
    positions: Positions = "labels"
    confidence: float = 0.0
    sharpen: float = 1.0

    @property
    def passes(self) -> tuple[Pass, ...]:
        return self.first, self.second

    @property
    def held(self) -> Pass:
        """The side that is the target of the other; the first where both learn."""
        return self.second if self.detach == "second" else self.first

    @property
    def learning(self) -> tuple[Pass, ...]:
        return {"first": (self.second,), "second": (self.first,)}.get(self.detach, self.passes)

    def check(self, ctx: Evaluation) -> None:
        if ctx.kind == "regression" and self.divergence != "mse":
            raise BadInput(f"divergence={self.divergence!r} is 0 on a regression head: use divergence='mse'")
        if self.divergence == "stable_kl" and self.detach == "second":
            raise BadInput("divergence='stable_kl' has a gradient on its second side alone, which is held fixed here")
        if self.sharpen != 1 and self.detach not in ("first", "second"):
            raise BadInput(f"sharpen={self.sharpen!r} needs a side that is held fixed: use grad='perturbed'")
        if self.confidence and ctx.kind == "regression":
            raise BadInput(
                f"confidence={self.confidence!r} is of classes, which a regression head has not: leave it out"
            )
        if self.detach == "teachers" and self.divergence != "symmetric_kl":
            raise BadInput(f"each teacher is held fixed in divergence='symmetric_kl' alone, not {self.divergence!r}")

    def weights(self, ctx: Evaluation) -> Tensor:
        weights = ctx.weights(self.per, padding=self.padding, positions=self.positions)
        return weights if self.sample is None else weights * self.sample

    def from_logits(self, ctx: Evaluation) -> Values:
        first, second, rows = self.first.logits, self.second.logits, self.second.rows
        first = first if rows is None else first[rows]
        if self.detach == "teachers":
            values = kl(first.detach(), second) + kl(second.detach(), first)
        else:
            first = first.detach() / self.sharpen if self.detach == "first" else first
            second = second.detach() / self.sharpen if self.detach == "second" else second
            values = DIVERGENCES[self.divergence](first, second)
        if self.confidence:
            held = self.held.logits if rows is None or self.held is self.second else self.held.logits[rows]
            values = values * confident(held, self.confidence)
        return values if rows is None else values.new_zeros(ctx.mask.shape).index_copy(0, rows, values), None

    def from_block(self, block: Block, weight: Tensor | None) -> Values:
        kept = block.probabilities[self.held].amax(1) >= self.confidence if self.confidence else None
        weight = weight if kept is None or weight is None else weight * kept.unsqueeze(1)
        values = divergence(block, self.first, self.second, self.divergence, self.detach, weight, self.sharpen)
        return values if kept is None else values * kept, None


@torch.no_grad()
def confident(logits: Tensor, confidence: float) -> Tensor:
    """Whether the most probable class has at least this probability, at every position."""
    return at_least_float32(logits).softmax(-1).amax(-1) >= confidence


class WeightedSum:
    """A weighted sum of parts, and of a number that a term computed by itself.

    Args:
        parts: pairs of factor and part
        rest: the number
    """

    def __init__(self, *parts: tuple[float, Part], rest: Tensor | None = None) -> None:
        self.parts, self.rest = parts, rest

    def on_texts(self, *, confidence: float, sharpen: float) -> WeightedSum:
        """The same sum, whose consistencies count confident positions and sharpened targets."""
        parts = (
            (factor, replace(part, confidence=confidence, sharpen=sharpen) if isinstance(part, Consistency) else part)
            for factor, part in self.parts
        )
        return WeightedSum(*parts, rest=self.rest)


def base_loss(view: Pass, ctx: Evaluation) -> Values:
    """The per-position base loss of a pass, and its plain negative log-likelihood if it has one, from logits."""
    if ctx.loss is not None:
        for field in fields(ctx.base):
            value = getattr(ctx.base, field.name)
            if field.name not in ("smoothing", "per") and value != field.default:
                raise BadInput(f"{field.name}={value!r} means nothing to your own loss: leave it out")
        values = ctx.loss(view.logits)
        if values.shape != ctx.mask.shape:
            shapes = f"{list(values.shape)}, and was to give {list(ctx.mask.shape)}"
            raise BadInput(f"the loss gave {shapes}: one number a position or example, not their mean")
        return at_least_float32(values), None
    if ctx.kind == "regression":
        if ctx.base.label_smoothing:
            raise BadInput(
                f"label_smoothing={ctx.base.label_smoothing} means nothing on a regression head: set it to 0"
            )
        if ctx.base.loss != "nll":
            raise BadInput(f"loss={ctx.base.loss!r} means nothing on a regression head: set loss='nll'")
        return squared_error(view.logits, ctx.labels), None
    values, nll = label_smoothed_nll(view.logits, ctx.labels, ctx.base.label_smoothing, ctx.base.smoothing)
    return probability_weighted(nll) if ctx.base.loss == "dft" else values, nll


@dataclass(frozen=True)
class PartResult:
    """The values of a part at every position, without a gradient; `nll` of a base loss, and the path that was taken."""

    values: Tensor
    path: Path
    nll: Tensor | None = None

    def mean(self, part: Part, ctx: Evaluation) -> Tensor:
        return _weighted(self.values, part.weights(ctx))


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum; what is not counted may be NaN."""
    return (values.masked_fill(weights == 0, 0.0) * weights.to(values.dtype)).sum()


def evaluate(items: Sequence[tuple[float, Part, Evaluation]]) -> tuple[Tensor, list[PartResult]]:
    """The sum of factor times mean over parts, a scalar to call `backward` on, and the result of each.

    Args:
        items: factors, parts, and the evaluation that says what each is averaged over, all of one batch; parts of one
            key whose factors add up to 0 are evaluated, and nothing else
    """
    if not items:
        return torch.zeros(()), []
    factors: dict[object, dict[Evaluation, float]] = {}
    for factor, part, ctx in items:
        averages = factors.setdefault(part.key, {})
        averages[ctx] = averages.get(ctx, 0.0) + factor
    parts = {part.key: part for _, part, _ in items}
    weighted = [(part, _total_weights(part, factors[key])) for key, part in parts.items()]
    total, results = _compute(weighted, items[0][2])
    by_key = dict(zip(parts, results, strict=True))
    return total, [by_key[part.key] for _, part, _ in items]


def _total_weights(part: Part, factors: Mapping[Evaluation, float]) -> Tensor | None:
    """What every position counts in the sum of several means of one part; None where nothing is left."""
    weights = [factor * part.weights(ctx) for ctx, factor in factors.items() if factor]
    return sum(weights[1:], weights[0]) if weights else None


def _compute(
    weighted: Sequence[tuple[Part, Tensor | None]], ctx: Evaluation, **options: bool
) -> tuple[Tensor, list[PartResult]]:
    """The weighted sum of parts, and the result of each; those without weights are evaluated without a gradient."""
    for part, _ in weighted:
        part.check(ctx)
    total = torch.zeros((), device=ctx.mask.device)
    results: dict[Part, PartResult] = {}
    fusable = [(part, weight) for part, weight in weighted if _fusable(part, ctx)]
    if fusable:
        with torch.set_grad_enabled(any(weight is not None for _, weight in fusable) and torch.is_grad_enabled()):
            loss, results = _fuse(fusable, ctx, **options)
        total = total + loss
    for part, weight in weighted:
        if part not in results:
            with torch.set_grad_enabled(weight is not None and torch.is_grad_enabled()):
                values, nll = part.from_logits(ctx)
            if weight is not None:
                total = total + _weighted(values, weight)
            results[part] = PartResult(values.detach(), "plain", None if nll is None else nll.detach())
    ctx.paths.update(result.path for result in results.values())
    return total, [results[part] for part, _ in weighted]


def _fusable(part: Part, ctx: Evaluation) -> bool:
    """Whether the part can be computed before there are logits: no pass has any yet, or constant ones.

    Passes with a gradient share one head; others may have one of their own.
    """
    if ctx.kind != "tokens" or not ctx.fused or (ctx.loss is not None and isinstance(part, BaseLoss)):
        return False
    heads = [head for view in part.passes if (head := view.deferred) is not None]
    learning = [head for head in heads if head.requires_grad]
    one_head = all(head.same_head(learning[0]) for head in learning)
    constant = all(view.deferred or not view.logits.requires_grad for view in part.passes)
    return bool(heads) and one_head and constant


def _fuse(
    weighted: Sequence[tuple[Part, Tensor | None]], ctx: Evaluation, **options: bool
) -> tuple[Tensor, dict[Part, PartResult]]:
    """The parts that can be computed together, before there are logits."""
    summands = [
        Summand(part, weight, (part.weights(ctx) if weight is None else weight) != 0) for part, weight in weighted
    ]
    total, results = fused_loss(summands, ctx.labels, ctx.base, **options)
    return total, {
        part: PartResult(values, "fused", nll if isinstance(part, BaseLoss) else None)
        for (part, _), (values, nll) in zip(weighted, results, strict=True)
    }


def keep_logits(ctx: Evaluation, view: Pass, where: Tensor) -> None:
    """Compute the logits of some positions of a pass, once for several evaluations; they carry no gradient."""
    if ctx.fused and view.deferred is not None and view.early_logits is None:
        positions = where.flatten()
        view.early_logits = (*view.deferred.logits_at(positions.nonzero().squeeze(1)), positions)
