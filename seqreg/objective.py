"""What a loss is made of, and the two ways to compute it.

A term declares `BaseLoss` and `Consistency` parts, alone or as a `WeightedSum`. All of them are computed together: on
the fused path where the passes hold the states before a language-model head, and from logits where they do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seqreg.context import Evaluation, Per
from seqreg.divergences import DIVERGENCES, Divergence, kl
from seqreg.errors import BadInput
from seqreg.forward import Pass
from seqreg.fused import loss
from seqreg.fused.head import known
from seqreg.fused.loss import Detach
from seqreg.losses import label_smoothed_nll, squared_error

Path = Literal["fused", "plain", "own"]


class Part(ABC):
    """One number a position, of one view or two, to be averaged over the batch."""

    views: tuple[Pass, ...]

    @abstractmethod
    def values(self, ctx: Evaluation) -> Tensor:
        """The number at every position, [B, T] or [B], from logits."""

    def check(self, ctx: Evaluation) -> None:
        """Refuse what makes no sense on this batch."""
        return

    @abstractmethod
    def weights(self, ctx: Evaluation) -> Tensor:
        """What every position counts in the mean."""

    @property
    def key(self) -> object:
        """Parts of the same key have the same values."""
        return id(self)

    @abstractmethod
    def fused(self, sides: Sequence[int], weight: Tensor, where: Tensor) -> loss.Part:
        """The same for the fused path."""

    def value(self, ctx: Evaluation, *, retain_graph: bool = False) -> Tensor:
        """The mean, a scalar to call `backward` on; with `retain_graph`, more than once."""
        return _compute({self.key: self}, {self.key: self.weights(ctx)}, ctx, retain_graph=retain_graph)[0]

    def sum(self, ctx: Evaluation, where: Tensor) -> Tensor:
        """The plain sum over some positions, for an ascent: without a gradient for the head."""
        return _compute({self.key: self}, {self.key: where.float()}, ctx, head_grad=False)[0]


@dataclass(frozen=True, eq=False)
class BaseLoss(Part):
    """The base loss of a view, averaged as the criterion averages it."""

    view: Pass

    @property
    def views(self) -> tuple[Pass, ...]:  # type: ignore[override]
        return (self.view,)

    @property
    def key(self) -> object:
        return (BaseLoss, id(self.view))

    def values(self, ctx: Evaluation) -> Tensor:
        return base_loss(self.view, ctx)[0]

    def weights(self, ctx: Evaluation) -> Tensor:
        return ctx.weights(ctx.base.per)

    def fused(self, sides: Sequence[int], weight: Tensor, where: Tensor) -> loss.SmoothedNLL:
        return loss.SmoothedNLL(sides[0], weight.flatten(), where.flatten())


@dataclass(frozen=True, eq=False)
class Consistency(Part):
    """Two views that should agree.

    Args:
        first, second: the views; `divergence(first, second)` is taken at every position. The second may be of some rows
        detach: the side that is held fixed; "teachers" holds the left side of each of the two KLs of "symmetric_kl"
        per, padding: see `Evaluation.reduce`
        sample: a factor of every position: 0 leaves it out, and others make up for it    # [B, T] or [B]
    """

    first: Pass
    second: Pass
    divergence: Divergence = "symmetric_kl"
    detach: Detach = "none"
    per: Per = "token"
    padding: bool = False
    sample: Tensor | None = None

    @property
    def views(self) -> tuple[Pass, ...]:  # type: ignore[override]
        return self.first, self.second

    def check(self, ctx: Evaluation) -> None:
        if ctx.kind == "regression" and self.divergence != "mse":
            raise BadInput(f"divergence={self.divergence!r} is 0 on a regression head: use divergence='mse'")
        if self.divergence == "stable_kl" and self.detach == "second":
            raise BadInput("divergence='stable_kl' has a gradient on its second side alone, which is held fixed here")
        if self.detach == "teachers" and self.divergence != "symmetric_kl":
            raise BadInput(f"each teacher is held fixed in divergence='symmetric_kl' alone, not {self.divergence!r}")

    def values(self, ctx: Evaluation) -> Tensor:
        first, second, rows = self.first.logits, self.second.logits, self.second.rows
        first = first if rows is None else first[rows]
        if self.detach == "teachers":
            found = kl(first.detach(), second) + kl(second.detach(), first)
        else:
            first = first.detach() if self.detach == "first" else first
            second = second.detach() if self.detach == "second" else second
            found = DIVERGENCES[self.divergence](first, second)
        return found if rows is None else found.new_zeros(ctx.mask.shape).index_copy(0, rows, found)

    def weights(self, ctx: Evaluation) -> Tensor:
        weights = ctx.weights(self.per, padding=self.padding)
        return weights if self.sample is None else weights * self.sample

    def fused(self, sides: Sequence[int], weight: Tensor, where: Tensor) -> loss.LogitDivergence:
        return loss.LogitDivergence(sides[0], sides[1], self.divergence, self.detach, weight.flatten(), where.flatten())


class WeightedSum:
    """A weighted sum of parts, and of a number that a term computed by itself.

    Args:
        parts: pairs of factor and part
        rest: the number
    """

    def __init__(self, *parts: tuple[float, Part], rest: Tensor | None = None) -> None:
        self.parts, self.rest = parts, rest


def base_loss(view: Pass, ctx: Evaluation) -> tuple[Tensor, Tensor | None]:
    """The per-position base loss of a view, and its plain negative log-likelihood if it has one, from logits."""
    if ctx.kind == "regression":
        if ctx.base.label_smoothing:
            raise BadInput(
                f"label_smoothing={ctx.base.label_smoothing} means nothing on a regression head: set it to 0"
            )
        return squared_error(view.logits, ctx.labels), None
    return label_smoothed_nll(view.logits, ctx.labels, ctx.base.label_smoothing, ctx.base.smoothing)


@dataclass(frozen=True)
class PartResult:
    """The values of a part at every position, without a gradient; `nll` of a task, and the path that was taken."""

    values: Tensor
    path: Path
    nll: Tensor | None = None

    def mean(self, part: Part, ctx: Evaluation) -> Tensor:
        weights = part.weights(ctx)
        return (self.values.masked_fill(weights == 0, 0.0) * weights.to(self.values.dtype)).sum()


def evaluate(items: Sequence[tuple[float, Part]], ctx: Evaluation) -> tuple[Tensor, list[PartResult]]:
    """The sum of factor times mean over parts, a scalar to call `backward` on, and what each of them is.

    Args:
        items: factors and parts; a part whose factors add up to 0 is evaluated, and nothing else
    """
    factors: dict[object, float] = {}
    for factor, part in items:
        factors[part.key] = factors.get(part.key, 0.0) + factor
    parts = {part.key: part for _, part in items}
    weighted = {key: factors[key] * part.weights(ctx) if factors[key] else None for key, part in parts.items()}
    total, found = _compute(parts, weighted, ctx)
    return total, [found[part.key] for _, part in items]


def _compute(
    parts: Mapping[object, Part], weights: Mapping[object, Tensor | None], ctx: Evaluation, **options: bool
) -> tuple[Tensor, dict[object, PartResult]]:
    for part in parts.values():
        part.check(ctx)
    together = [key for key, part in parts.items() if _fusable(part, ctx)]
    total = torch.zeros((), device=ctx.mask.device)
    found: dict[object, PartResult] = {}
    if together:
        wanted = any(weights[key] is not None for key in together)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            fused, found = _fuse({key: parts[key] for key in together}, weights, ctx, **options)
        total = total + fused
    for key in [key for key in parts if key not in together]:
        part, weight = parts[key], weights[key]
        with torch.set_grad_enabled(weight is not None and torch.is_grad_enabled()):
            values, nll = base_loss(part.view, ctx) if isinstance(part, BaseLoss) else (part.values(ctx), None)
        if weight is not None:
            total = total + (values.masked_fill(weight == 0, 0.0) * weight.to(values.dtype)).sum()
        found[key] = PartResult(values.detach(), "plain", None if nll is None else nll.detach())
    ctx.paths.update(one.path for one in found.values())
    return total, found


def _fuse(
    parts: Mapping[object, Part], weights: Mapping[object, Tensor | None], ctx: Evaluation, **options: bool
) -> tuple[Tensor, dict[object, PartResult]]:
    """The parts that can be computed together, before there are logits."""
    views = {id(view): view for part in parts.values() for view in part.views}
    numbers = {key: number for number, key in enumerate(views)}
    jobs: dict[object, loss.Part] = {}
    for key, part in parts.items():
        weight = weights[key]
        where = ctx.mask if isinstance(part, BaseLoss) else (part.weights(ctx) if weight is None else weight) != 0
        of = [numbers[id(view)] for view in part.views]
        jobs[key] = part.fused(of, torch.zeros_like(part.weights(ctx)) if weight is None else weight, where)
    needed = {key: torch.zeros_like(ctx.mask).flatten() for key in views}
    for key, part in parts.items():
        for view in part.views:
            needed[id(view)] |= jobs[key].where
    sides = [_side(view, ctx, needed[key]) for key, view in views.items()]
    work = loss.FusedObjective(
        sides, ctx.labels.flatten(), list(jobs.values()), ctx.base.label_smoothing, ctx.base.smoothing
    )
    total = loss.fused(work, **options)
    shape = ctx.mask.shape
    return total, {
        key: PartResult(
            job.values.reshape(shape), "fused", job.nll.reshape(shape) if isinstance(job, loss.SmoothedNLL) else None
        )
        for key, job in jobs.items()
    }


def _fusable(part: Part, ctx: Evaluation) -> bool:
    """Whether the part can be computed before there are logits: no view has any yet, or constant ones."""
    if ctx.kind != "tokens" or not ctx.fused:
        return False
    heads = [view.projection for view in part.views if view.deferred]
    constant = all(view.deferred or not view.logits.requires_grad for view in part.views)
    return bool(heads) and constant and len({(id(head.weight), head.dtype) for head in heads if head is not None}) == 1


def _side(view: Pass, ctx: Evaluation, needed: Tensor) -> loss.LogitSource:
    head = view.projection
    shape = view.logits.shape if head is None else (*head.states.shape[:-1], len(head.weight))
    if view.rows is None and shape[:-1] != ctx.mask.shape:
        raise BadInput(f"labels {list(ctx.mask.shape)} do not fit logits {list(shape)}: one label a position")
    places = None
    if view.rows is not None:  # the rows of the batch that this view has
        length = ctx.mask.shape[1]
        places = torch.zeros(ctx.mask.numel(), dtype=torch.long, device=ctx.mask.device)
        taken = (view.rows.unsqueeze(1) * length + torch.arange(length, device=places.device)).flatten()
        places[taken] = torch.arange(len(taken), device=places.device)
    if not view.deferred:
        return loss.LogitSource(None, places, view.logits.detach().flatten(0, -2), places)
    if view.known is not None:
        logits, at, covered = view.known
        if not (needed & ~covered).any():
            return loss.LogitSource(view.projection, places, logits, at)
    return loss.LogitSource(view.projection, places)


def keep_logits(ctx: Evaluation, view: Pass, where: Tensor) -> None:
    """Compute the logits of some positions of a view, once for several evaluations; they carry no gradient."""
    if ctx.fused and view.deferred and view.known is None and view.projection is not None:
        view.known = (*known(view.projection, where.flatten().nonzero().squeeze(1)), where.flatten())
