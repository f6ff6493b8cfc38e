"""JacHess: representations should not change steeply, nor bend sharply, with the input."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqreg.context import Evaluation
from seqreg.engines.detect import world_size
from seqreg.errors import BadInput
from seqreg.forward import Pass, Perturbation
from seqreg.losses import at_least_float32
from seqreg.noise import rms
from seqreg.schedules import Weight
from seqreg.smoothness import Norms, States, differences, masked, source_gap, states
from seqreg.term import Cost, Passes, Term, counts_on

DIRECTIONS = 128
"""Random directions of the first optimizer step, over its rows; at least one a row."""
RMS = "rms"
"""Where the state keeps rms(x), among the J of the layers."""


@dataclass(frozen=True, kw_only=True)
class JacHess(Term):
    """Small Jacobian, and if asked Hessian, of every layer's output with respect to the input embeddings.

    Formula:
        sum over layers l of  (J_l + hessian * rms(x)^2 * H_l) / (L * J_l at the start),
        J_l = |d f_l / dx|_F^2 a row,  H_l = sum over outputs of |d^2 f_l / dx^2|_F^2 a row,
        estimated with Gaussian directions v and w:  J by |(f(x + ev) - f(x)) / e|^2,
        H by the mixed second difference |(f(x + ev + ew) - f(x + ev) - f(x + ew) + f(x)) / e^2|^2

    Args:
        weight: of the sum, which is 1 in the first optimizer step (plus the Hessian's part), on average over random
            draws; 0.01, the largest tried on SST-2 and pronunciation and not shown to do harm there; on AESLC it was
            below the baseline (docs/results/defaults.md)
        estimator: "finite_difference"; "reverse", an exact Jacobian in expectation by one backward of one random
            combination of all layers; or "published", the authors' code: the state of a single token, ten directions,
            one forward a layer, a Hessian that carries no gradient
        layers: "all" outputs, or those of the "encoder", of the "decoder", or the "logits" alone
        hessian: share of the Hessian; 0 leaves it out. The units are made equal by rms(x)^2
        epsilon: of the difference, as a share of the embeddings' RMS in the first optimizer step; 0.01, and 0.03 with
            the Hessian, whose second difference drowns in rounding below and bends above
        floor: a layer whose J has fallen to this share of its start is not pushed further; a seq2seq model whose source
            Jacobian is 0 ignores its source. Held against the mean of one micro-batch
        mode: "joint" adds the term to the task loss; "two_phase" leaves the task loss out for the first `switch` steps;
            "alternate" is on="unlabelled"
        switch: when the second phase begins

        The layers' factors are ours: the published text says they are inverse to Jacobian norms, not how. J at the
        start is that of the first optimizer step in which the term counts, over all its micro-batches on all ranks.

    Cost:
        1 extra forward, 1 extra backward; 3 and 3 with the Hessian; reverse 1 extra forward and 2 extra backwards;
        published 1 and 31 for every layer. Once, in the first step, 2 + 128 / rows forwards without a gradient, to
        measure the start. Passes replay the dropout masks of the clean one. Under autocast those of
        the finite difference are made in float32, the clean one too, once more.

    Differs from:
        the authors' code: its Hessian term carries no gradient, it looks at one token, divides by padding, and needs
        one forward and twenty backwards a layer.

    References:
        Jukic and Snajder, From Robustness to Improved Generalization and Calibration in Pre-trained Language Models,
        arXiv 2404.00758; TACL 2025

    Example:
        >>> from seqreg import Criterion
        >>> from seqreg.terms.jachess import JacHess
        >>> criterion = Criterion(JacHess(weight=0.3), label_smoothing=0.1)
        >>> JacHess(hessian=0.1).cost
        Cost(forwards=3, backwards=3)
    """

    weight: Weight = 0.01
    estimator: Literal["finite_difference", "reverse", "published"] = "finite_difference"
    layers: Literal["all", "encoder", "decoder", "logits"] = "all"
    hessian: float = 0.0
    epsilon: float | None = None
    floor: float = 0.0
    mode: Literal["joint", "two_phase", "alternate"] = "joint"
    switch: int = 1000

    stateful: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"published": {"weight": 0.1, "estimator": "published"}}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "alternate":
            object.__setattr__(self, "on", "unlabelled")
        if self.hessian < 0:
            self.refuse("hessian", "expected a number >= 0")
        if self.epsilon is not None and self.epsilon <= 0:
            self.refuse("epsilon", "expected a number > 0, or nothing for the default")
        if not 0 <= self.floor < 1:
            self.refuse("floor", "expected a number in [0, 1)")
        if self.switch < 0:
            self.refuse("switch", "expected a whole number >= 0")
        if self.hessian and self.estimator != "finite_difference":
            fix = "torch's layer_norm has wrong third derivatives; use estimator='finite_difference'"
            self.refuse("hessian", fix)
        if self.floor and self.estimator != "finite_difference":
            self.refuse("floor", "only estimator='finite_difference' has a number for every layer to hold against it")

    @property
    def cost(self) -> Cost:
        if self.estimator != "finite_difference":
            return Cost(1, 2) if self.estimator == "reverse" else Cost(1, 31)
        passes = 3 if self.hessian else 1
        return Cost(passes, passes)

    def declare(self, ctx: Evaluation) -> Passes:
        return Passes(
            own="unknown",
            ascends=self.estimator != "finite_difference",
            hidden=True,
            replaces_base_loss=self._is_alone(ctx.step),
        )

    def _is_alone(self, step: int | None) -> bool:
        """Whether the task loss is left out at this step."""
        if self.mode != "two_phase":
            return False
        if step is None:
            raise BadInput(f"{self.name}: mode='two_phase' counts steps: pass context(..., step=step)")
        return step < self.switch

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Tensor:
        if ctx.forward.drops_layers:
            raise BadInput(
                f"{self.name}: layerdrop leaves out other layers in every step: set the model's layerdrop to 0"
            )
        if self.estimator == "reverse":
            return self._reverse(ctx)
        if self.estimator == "published":
            return self._published(ctx)
        return self._sum(ctx)

    def norms(self, ctx: Evaluation, unit: float | None = None, *, hessian: bool | None = None) -> Norms:
        """Estimates of (J_l, rms^2 H_l) for every layer; H is None where it is not asked for.

        Args:
            unit: rms(x); that of this batch by default
        """
        epsilon, bends = self.epsilon or (0.03 if self.hessian else 0.01), self.hessian > 0
        bends = bends if hessian is None else hessian
        return differences(ctx, epsilon=epsilon, unit=unit, hessian=bends, layers=self.layers, name=self.name)

    def states(self, ctx: Evaluation, view: Pass) -> States:
        """The outputs that are kept smooth."""
        return states(ctx, view, self.layers)

    def _start(self, ctx: Evaluation) -> dict[str, float] | None:
        """rms(x), and J of every layer, at the start: in the first optimizer step, and kept from there on."""
        kept = ctx.memory.get(self.name)
        if kept is None:
            _ = ctx.clean  # with its graph
            with torch.no_grad(), ctx.forward.observed() as forward:
                kept = self._measured(ctx.through(forward))
            if kept is None:
                return None
            if (
                torch.stack(list(kept.values())).isfinite().all()
            ):  # or the term is not finite, and the next is the first
                ctx.memory[self.name] = kept
        return {name: float(value) for name, value in kept.items()}

    def _measured(self, ctx: Evaluation) -> dict[str, Tensor] | None:
        """`_start` over all micro-batches of this step on all ranks; None where no row counts on any of them."""
        squares = torch.zeros(3, device=ctx.mask.device)
        for one in self._micro_batches(ctx):
            site = ctx.sites("input")[0]
            embeds = one.clean.embeds[site, "embedding"]
            real = one.real(site, embeds)
            number = embeds.numel() if real is None else int(real.sum()) * embeds.shape[-1]
            squares += squares.new_tensor([float(rms(embeds, real)) ** 2 * number, number, _counted(one)])
        square, number, rows = _over_ranks(squares).tolist()
        if not rows:
            return None
        if ctx.count.contexts is None and rows < ctx.count.sequences:
            ctx.notes[self.name] = (
                f"its start is that of {rows:.0f} of the {ctx.count.sequences:.0f} rows of this optimizer step: pass "
                "count=count(model, batches) to know them all"
            )
        unit, directions = (square / max(number, 1.0)) ** 0.5 or 1.0, math.ceil(DIRECTIONS / rows)
        sums: dict[str, Tensor] = {}
        for one in self._micro_batches(ctx):
            for slopes in self._slopes(one, unit, directions):
                for name, slope in slopes.items():
                    mean = slope.float() / _share(one) if _counted(one) else torch.zeros_like(slope).float()
                    sums[name] = sums.get(name, 0.0) + mean * _counted(one)
        means = (_over_ranks(torch.stack(list(sums.values()))) / (rows * directions)).clamp_min(1e-12).cpu()
        return {RMS: torch.tensor(unit), **dict(zip(sums, means.unbind(), strict=True))}

    def _micro_batches(self, ctx: Evaluation) -> Iterator[Evaluation]:
        """Those of the optimizer step on this rank on which the term counts, as far as they are known, observed."""
        if ctx.count.contexts is None:
            yield ctx
            return
        for other in ctx.count.contexts():
            if not counts_on(self, other.stream):
                continue
            one = Evaluation(replace(other, forward=other.forward.observer()), ctx.base, fused=ctx.fused, hidden=True)
            with one.forward.full_precision():  # also of the clean pass, which is then made once
                yield one.averaged_on(self.on)

    def _slopes(self, ctx: Evaluation, unit: float, directions: int) -> Iterator[dict[str, Tensor]]:
        """J of every layer along random directions, one after the other."""
        if self.estimator == "finite_difference":
            for _ in range(directions):
                yield {name: slope for name, (slope, _) in self.norms(ctx, unit, hessian=False).items()}
            return
        with self._at_input(ctx) as (site, delta, outputs):
            for _ in range(directions):
                yield {name: self._probe(ctx, site, {name: one}, {}, delta, False) for name, one in outputs.items()}

    def _sum(self, ctx: Evaluation) -> Tensor:
        start = self._start(ctx)
        total = torch.zeros((), device=ctx.mask.device)
        if (start is None or not _counted(ctx)) and ctx.forward.shards is None:
            return total
        norms = self.norms(ctx, None if start is None else start[RMS])
        if start is None or not _counted(ctx):
            return total + 0.0 * torch.stack([slope for slope, _ in norms.values()]).sum()  # ranks gather in step
        self._check_layers(start, norms)
        for name, (slope, bend) in norms.items():
            factor = 1.0 / (len(norms) * start[name])
            total = total + factor * slope.clamp_min(self.floor * start[name] * _share(ctx))
            if bend is not None:
                total = total + self.hessian * factor * bend
        return total

    def _check_layers(self, start: Mapping[str, float], layers: Mapping[str, Any]) -> None:
        if start.keys() != {RMS, *layers}:
            raise BadInput(f"{self.name}: the saved state is of a model with other layers, or of an earlier version")

    def _reverse(self, ctx: Evaluation) -> Tensor:
        self._check_double_backward(ctx)
        start = self._start(ctx)
        if start is None or not _counted(ctx):
            return torch.zeros((), device=ctx.mask.device)
        with self._at_input(ctx) as (site, delta, outputs):
            self._check_layers(start, outputs)
            factors = {name: 1.0 / (len(outputs) * start[name]) for name in outputs}
            return self._probe(ctx, site, outputs, factors, delta, True)

    @contextlib.contextmanager
    def _at_input(self, ctx: Evaluation) -> Iterator[tuple[str, Tensor, States]]:
        """Outputs as functions of a change of the input, which is 0, to be differentiated twice inside."""
        site = ctx.sites("input")[0]
        like = ctx.clean.embeds[site, "embedding"]
        delta = torch.zeros(like.shape, device=like.device, dtype=at_least_float32(like).dtype).requires_grad_()
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            view = ctx.forward(Perturbation({site: delta}), dropout="shared", hidden=True)
            yield site, delta, self.states(ctx, view)

    def _probe(
        self, ctx: Evaluation, site: str, outputs: States, factors: Mapping[str, float], delta: Tensor, graph: bool
    ) -> Tensor:
        """|d/dx of a random combination of the outputs|^2: in expectation the sum of their factors times |J|^2."""
        combined = delta.new_zeros(())
        for name, (values, mask) in outputs.items():
            direction = torch.randn_like(values) * factors.get(name, 1.0) ** 0.5
            combined = combined + (values * masked(direction, mask)).sum()
        (gradient,) = torch.autograd.grad(combined, delta, create_graph=graph, retain_graph=True)
        real = ctx.real(site, delta)
        if real is not None:  # what stands on padding may even be NaN
            gradient = gradient.masked_fill(~real.unsqueeze(-1), 0.0)
        return ctx.reduce_rows(gradient.square().sum((-2, -1)))

    def _check_double_backward(self, ctx: Evaluation) -> None:
        if ctx.forward.no_double_backward:
            raise BadInput(f"{self.name}: estimator={self.estimator!r}: {ctx.forward.no_double_backward}")

    def _published(self, ctx: Evaluation) -> Tensor:
        """One token, ten directions, means over rows and padded positions, a Hessian without gradient."""
        self._check_double_backward(ctx)
        site = ctx.sites("input")[0]
        names = list(self.states(ctx, ctx.clean))
        total = torch.zeros((), device=ctx.mask.device)
        for name in names:
            like = ctx.clean.embeds[site, "embedding"]
            delta = torch.zeros_like(like).requires_grad_()
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                view = ctx.forward(Perturbation({site: delta}, detach=True), dropout="independent", hidden=True)
                state = self.states(ctx, view)[name][0]
                token = state if state.dim() == 2 else state[:, -1 if site == "decoder" else 0]
                slopes = []
                for _ in range(10):
                    (slope,) = torch.autograd.grad((token * torch.randn_like(token)).sum(), delta, create_graph=True)
                    slopes.append(slope.square().sum((-2, -1)).mean() / like.shape[1])
                bends = []
                for index in torch.randint(0, token.shape[-1], (10,)).tolist():
                    (first,) = torch.autograd.grad(token[:, index].sum(), delta, create_graph=True)
                    (second,) = torch.autograd.grad((first * torch.randn_like(first)).sum(), delta, retain_graph=True)
                    bends.append(second.detach().square().sum((-2, -1)).mean() / like.shape[1])
            total = total + torch.stack(slopes).mean() + torch.stack(bends).mean()
        return total * _share(ctx) / len(names)

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """J of every layer over its start, the least of them, and the loss that the wrong source costs."""
        numbers: dict[str, float] = {}
        start = ctx.memory.get(self.name)
        if start is not None and self.estimator != "published" and ctx.full_precision_weights:
            norms = self.norms(ctx, float(start[RMS]), hessian=False)
            ratios = {name: float(slope) / float(start[name]) for name, (slope, _) in norms.items()}
            numbers = {**{f"J/{name}": ratio for name, ratio in ratios.items()}, "least_J": min(ratios.values())}
        gap = source_gap(ctx)
        return numbers if gap is None else {**numbers, "source_gap": gap}


def _over_ranks(sums: Tensor) -> Tensor:
    """The sums of all ranks."""
    if world_size() > 1:
        torch.distributed.all_reduce(sums)
    return sums


def _counted(ctx: Evaluation) -> float:
    """Rows of this batch that count."""
    return float(ctx.mask.reshape(len(ctx.mask), -1).any(-1).sum())


def _share(ctx: Evaluation) -> float:
    """What this batch's mean is multiplied by in the mean over the whole optimizer step."""
    return max(_counted(ctx), 1.0) * ctx.count.grad_divisor / max(ctx.count.sequences, 1.0)
