"""Gradient ascent on a perturbation, and what the terms that use it share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from seqreg import diagnostics
from seqreg.context import Evaluation, Per, Where
from seqreg.divergences import Divergence
from seqreg.forward import Dropout, ExtraPass, Pass, Perturbation, Point
from seqreg.fused.block import Detach
from seqreg.losses import at_least_float32
from seqreg.noise import Noise, Norm, Over, norm, project, rms, sample, too_small
from seqreg.objective import Consistency, keep_logits
from seqreg.settings import Settings
from seqreg.term import ConsistencyTerm, Cost, Hints, Passes

Inject = Literal["scaled", "word", "layernorm", "normalised"]
Deltas = Mapping[str, Tensor]
Grad = Literal["both", "clean", "perturbed", "students"]

RESCALED_ASCENT: Mapping[str, Any] = {
    "inject": "layernorm",
    "scale": 1e-5,
    "step_size": 1e-3,
    "radius": 1.0,
    "relative": False,
    "rule": "raw",
    "projection": "rescale",
    "stabiliser": 1e-6,
    "dropout": "independent",
}
"""The ascent that mt-dnn, smart-pytorch and ALUM's code share: a raw gradient, rescaled to norm 1."""


@dataclass(frozen=True)
class Bounds:
    """Sizes of an ascent at one site, in the units of the perturbation; the mask is that of what may be perturbed."""

    mask: Tensor | None
    scale: float | Tensor
    step_size: float | Tensor
    radius: float | Tensor


@dataclass(frozen=True)
class AscentResult:
    """An ascent and how it came about.

    Args:
        start, final: the perturbations, by site                    # [B, S, D]
        gradient: the last gradient that was followed
        radius: of the ball, in the units of the perturbations
    """

    start: Deltas
    final: Deltas
    gradient: Deltas
    radius: Mapping[str, float | Tensor]


@dataclass(frozen=True, kw_only=True)
class Ascent(Settings):
    """Gradient ascent on a perturbation: start from noise, follow the gradient, stay inside a ball.

    Terms hold one: `SMART(attack=Ascent(steps=2))`. A setting that is left out has the default of the term that holds
    it, or of its preset.

    Args:
        where: "input" (the encoder, or the only stack), "encoder", "decoder" or "both"
        inject: what is perturbed: "scaled" embeddings, as the stack consumes them; "word" embeddings, before the model
            scales them; "layernorm": the output of the embeddings' LayerNorm; "normalised": the input of that
            LayerNorm, brought to mean 0 and variance 1 first
        noise: of the start: "normal", "clamped" (normal, cut at two standard deviations) or "uniform"
        scale: size of the start: standard deviation or bound of every entry
        spread: "entry", or "sentence" to divide the scale by sqrt(length * dimensions)
        steps: of ascent
        step_size: of each
        radius: of the ball
        relative: sizes are shares of the embeddings': of their RMS for scale and linf, of their l2 norm for l2
        norm: "linf" or "l2": of the ball, and of the gradient where it is normalised
        over: the ball and the norm are those of each "token" or each "sentence"
        rule: "normalised" adds step_size * g / |g|; "raw" adds step_size * g; "power" replaces the perturbation by
            g / |g|, of size `scale` between steps and `radius` after the last (power iteration)
        projection: "clip" into the ball, "rescale" onto its surface, or "none"
        stabiliser: added to every norm that is divided by
        dropout: masks of all adversarial passes: "shared" with the clean pass, "independent" or "off"
        embedding_grad: whether the adversarial pass sends a gradient to the embeddings
        padding: also perturb padded positions
    """

    where: Where = "input"
    inject: Inject = "scaled"
    noise: Noise = "normal"
    scale: float = 1e-3
    spread: Literal["entry", "sentence"] = "entry"
    steps: int = 1
    step_size: float = 0.1
    radius: float = 0.1
    relative: bool = True
    norm: Norm = "linf"
    over: Over = "token"
    rule: Literal["normalised", "raw", "power"] = "normalised"
    projection: Literal["clip", "rescale", "none"] = "clip"
    stabiliser: float = 0.0
    dropout: Dropout = "shared"
    embedding_grad: bool = True
    padding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.steps <= 1000:
            self.refuse("steps", "expected a whole number >= 1, and at most 1000")
        for setting in ("scale", "step_size", "radius"):
            if getattr(self, setting) <= 0:
                self.refuse(setting, "expected a number > 0")
        if self.stabiliser < 0:
            self.refuse("stabiliser", "expected a number >= 0")

    @property
    def point(self) -> Point:
        return "embedding" if self.inject in ("scaled", "word") else self.inject  # type: ignore[return-value]

    def shift(self, deltas: Deltas) -> Perturbation:
        return Perturbation(deltas, point=self.point, detach=not self.embedding_grad)

    def _embeds(self, name: str, clean: Pass) -> Tensor:
        """What a site consumed, where the perturbation is added."""
        if self.point == "layernorm" and (name, self.point) not in list(clean.embeds):
            self.refuse("inject", f"the {name} has no LayerNorm on its embeddings: use 'scaled' or 'word'")
        return clean.embeds[name, self.point].detach()

    def bounds(self, ctx: Evaluation, name: str, clean: Pass) -> Bounds:
        """The sizes at a site; refuses those that the arithmetic cannot resolve."""
        site, embeds = ctx.forward.sites[name], self._embeds(name, clean)
        real = ctx.real(name, embeds)
        factor = site.scale if self.inject == "word" else 1.0
        unit: float | Tensor = float(rms(embeds, real)) if self.relative else factor
        width, length = embeds.shape[-1], _lengths(embeds, real)
        entries: float | Tensor = 1.0
        if self.norm == "l2":
            entries = math.sqrt(width) if self.over == "token" else (length * width).sqrt()
        ball = unit * entries if self.relative else unit
        start = unit / (length * width).sqrt() if self.spread == "sentence" else unit
        share = 1.0 if self.relative else 1 / entries
        reach = torch.as_tensor(unit * (self.scale if self.projection == "none" else self.radius * share))
        if complaint := too_small(float(reach.max()), embeds, real, clean.dtype):
            self.refuse("scale" if self.projection == "none" else "radius", complaint)
        if complaint := too_small(float(torch.as_tensor(self.scale * start).max()), embeds, real, embeds.dtype):
            fix = "load the weights in float32 and train under autocast, where the ascent is made in float32"
            self.refuse("scale", f"the start is lost: {complaint} ({fix})")
        mask = None if self.padding else real
        step = ball * factor if self.rule == "raw" else ball  # a word embedding's gradient is larger by the factor
        return Bounds(mask, self.scale * start, self.step_size * step, self.radius * ball)

    def init_delta(self, ctx: Evaluation, clean: Pass) -> tuple[dict[str, Tensor], dict[str, Bounds]]:
        """The random start, and the sizes that bound the ascent."""
        bounds, deltas = {}, {}
        for name in ctx.sites(self.where):
            embeds = self._embeds(name, clean)
            here = bounds[name] = self.bounds(ctx, name, clean)
            deltas[name] = sample(self.noise, embeds, here.scale, here.mask)
            if self.rule == "power":
                size = norm(deltas[name], self.norm, self.over).clamp_min(1e-30)
                deltas[name] = deltas[name] / size * self.scale * (here.radius / self.radius)
        return deltas, bounds

    def step(self, delta: Tensor, gradient: Tensor, bounds: Bounds, *, last: bool) -> Tensor:
        """One step: along the gradient, then back into the ball."""
        gradient = _masked(gradient, bounds.mask)
        size = norm(gradient, self.norm, self.over)
        direction = gradient / (size + self.stabiliser).clamp_min(1e-30)
        if self.rule == "power":
            return direction * (bounds.radius if last else bounds.radius / self.radius * self.scale)
        delta = delta + bounds.step_size * (gradient if self.rule == "raw" else direction)
        if self.projection == "clip":
            return project(delta, bounds.radius, self.norm, self.over)
        if self.projection == "rescale":
            return delta / (norm(delta, self.norm, self.over) + self.stabiliser).clamp_min(1e-30) * bounds.radius
        return delta

    def ascend(self, ctx: Evaluation, clean: Pass, objective: Callable[[Pass], Tensor]) -> AscentResult:
        """Move a perturbation so that `objective` of the perturbed pass grows.

        Only gradients with respect to the perturbation are computed; no parameter and no `.grad` is touched.
        """
        start, bounds = self.init_delta(ctx, clean)
        deltas, gradients = start, start
        for number in range(self.steps):
            live = {name: delta.detach().requires_grad_() for name, delta in deltas.items()}
            with torch.enable_grad():
                value = objective(ctx.forward(self.shift(live), dropout=self.dropout))
                computed = torch.autograd.grad(value, list(live.values()))
            gradients = {name: _masked(g, bounds[name].mask) for name, g in zip(live, computed, strict=True)}
            deltas = {
                name: self.step(delta.detach(), gradients[name], bounds[name], last=number == self.steps - 1)
                for name, delta in live.items()
            }
        return AscentResult(start, deltas, gradients, {name: here.radius for name, here in bounds.items()})

    def extra_pass(self, ctx: Evaluation, objective: Callable[[Pass], Tensor]) -> ExtraPass:
        """A pass at the end of an ascent on `objective`, for `Term.declare`."""
        return ExtraPass(
            perturbation=lambda clean: self.shift(self.ascend(ctx, clean, objective).final),
            dropout=self.dropout,
            ascends=True,
        )

    def diagnostics(self, result: AscentResult) -> dict[str, float]:
        """The largest |delta| over the radius, and the cosines of the perturbation with its start and last gradient."""
        sizes = {name: norm(delta, self.norm, self.over) for name, delta in result.final.items()}
        reach = torch.cat([(size / result.radius[name]).flatten() for name, size in sizes.items()])
        size = {"delta_over_radius": float(reach.max()), "mean_delta_over_radius": float(reach[reach > 0].mean())}
        return {
            **(size if self.projection != "none" else {}),
            "cosine_start": diagnostics.cosine(result.final, result.start),
            "cosine_gradient": diagnostics.cosine(result.final, result.gradient),
        }


def _lengths(embeds: Tensor, mask: Tensor | None) -> Tensor:
    """Real tokens of every row, [B, 1, 1]."""
    if mask is None:
        return torch.full((embeds.shape[0], 1, 1), float(embeds.shape[1]), device=embeds.device)
    return mask.sum(-1).clamp_min(1).float().reshape(-1, 1, 1)


def _masked(gradient: Tensor, mask: Tensor | None) -> Tensor:
    """What stands on padding may even be NaN."""
    gradient = at_least_float32(gradient)
    return gradient if mask is None else gradient.masked_fill(~mask.unsqueeze(-1), 0.0)


@contextlib.contextmanager
def _precisely(ctx: Evaluation, clean: Pass, dropout: Dropout) -> Iterator[Pass]:
    """The clean view to ascend from. Near it a divergence is flat, and bfloat16 rounds it away: inside is float32."""
    if clean.dtype in (None, ctx.weight_dtype) or not ctx.full_precision_weights:
        yield clean
    else:
        with ctx.forward.full_precision():
            yield ctx.forward(dropout="off" if dropout == "off" else "shared", grad=False)


ADVERSARIAL = Hints(
    remedy="raise attack.radius and attack.step_size", gentler="lower attack.radius and attack.step_size, or weight"
)
"""What a user is told about a term that holds an attack."""


@dataclass(frozen=True, kw_only=True)
class AdversarialConsistency(ConsistencyTerm):
    """Find the nearby input where the outputs differ most, and ask them to agree.

    Under autocast the ascent is made in float32, with one more clean pass to start from: near the clean input a
    divergence is flat, and lower precision rounds it away.

    Args:
        inner: divergence of the clean output from the perturbed one that the ascent increases
        inner_per: its "sum" over positions, or that divided by positions ("token") or by rows ("sequence"); matters for
            rule="raw" alone
        divergence: of the term itself
        grad: the sides that learn: "both", "clean", "perturbed", or "students" (the right side of each KL)
        per: averaged per "token", per "sequence" (summed over its tokens), or as released code does
        padding: also perturb padded positions, and count those without a label
        attack: how that input is found, see `Ascent`
    """

    inner: Divergence = "symmetric_kl"
    inner_per: Literal["sum", "token", "sequence"] = "sum"
    divergence: Divergence = "symmetric_kl"
    grad: Grad = "both"
    per: Per = "token"
    padding: bool = False
    attack: Ascent = Ascent()

    hints: ClassVar[Hints] = ADVERSARIAL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.padding:
            object.__setattr__(self, "attack", self.attack._changed(padding=True))

    @property
    def cost(self) -> Cost:
        quiet = 1 if self.attack.dropout == "off" else 0
        last = {"both": 1 + quiet, "perturbed": 1, "clean": quiet, "students": 1 + quiet}[self.grad]
        return Cost(self.attack.steps + 1 + quiet, self.attack.steps + last)

    def declare(self, ctx: Evaluation) -> Passes:
        worst = ExtraPass(
            perturbation=lambda clean: self.attack.shift(self.worst(ctx, clean).final),
            dropout=self.attack.dropout,
            grad=self.grad != "clean",
            ascends=True,
        )
        return Passes(worst)

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Consistency:
        return self.consistency(ctx.reference(self.attack.dropout), passes[0])

    def worst(self, ctx: Evaluation, clean: Pass) -> AscentResult:
        """Find the perturbation at which the output differs most from that of the clean pass."""
        if ctx.kind == "regression" and self.inner != "mse":
            self.refuse("inner", "a KL is 0 on a regression head: use inner='mse' and divergence='mse'")

        def objective(view: Pass) -> Tensor:
            return Consistency(reference, view, self.inner, "first").sum(ctx, counted) / divisor

        counted = torch.ones_like(ctx.mask) if self.padding else ctx.mask
        divisor = {"sum": 1, "token": max(int(counted.sum()), 1), "sequence": len(counted)}[self.inner_per]
        with _precisely(ctx, clean, self.attack.dropout) as reference:
            keep_logits(ctx, reference, counted)
            return self.attack.ascend(ctx, clean, objective)

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """See `seqreg.diagnostics` and `Ascent.diagnostics`."""
        dropout = self.attack.dropout
        clean = ctx.reference(dropout)
        ascent = self.worst(ctx, clean)
        shift = self.attack.shift(ascent.final)
        return {
            **self.attack.diagnostics(ascent),
            **diagnostics.size(ctx, clean, shift),
            **diagnostics.sources(ctx, clean, shift, dropout, lambda a, b: self.consistency(a, b).value(ctx)),
        }

    def consistency(self, clean: Pass, view: Pass) -> Consistency:
        held: dict[Grad, Detach] = {"both": "none", "perturbed": "first", "clean": "second", "students": "teachers"}
        return Consistency(clean, view, self.divergence, held[self.grad], self.per, self.padding)
