"""JacHess: representations should not change steeply, nor bend sharply, with the input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqreg.context import Context, Shift, View
from seqreg.criterion import Cost, Term
from seqreg.errors import BadInput
from seqreg.losses import at_least_float32
from seqreg.schedules import Weight
from seqreg.smoothness import Norms, States, differences, masked, states


@dataclass(frozen=True, kw_only=True)
class JacHess(Term):
    """Small Jacobian, and if asked Hessian, of every layer's output with respect to the input embeddings.

    Formula:
        sum over layers l of  (J_l + hessian * rms(x)^2 * H_l) / (L * J_l at the start),
        J_l = |d f_l / dx|_F^2 a row,  H_l = sum over outputs of |d^2 f_l / dx^2|_F^2 a row,
        estimated with Gaussian directions v and w:  J by |(f(x + ev) - f(x)) / e|^2,
        H by the mixed second difference |(f(x + ev + ew) - f(x + ev) - f(x + ew) + f(x)) / e^2|^2

    Args:
        weight: of the sum, which is 1 at the start of training (plus the Hessian's part)
        estimator: "finite_difference"; "reverse", an exact Jacobian in expectation by one backward of one random
            combination of all layers; or "published", the authors' code: the state of a single token, ten directions,
            one forward a layer, a Hessian that carries no gradient
        layers: "all" outputs, or those of the "encoder", of the "decoder", or the "logits" alone
        hessian: share of the Hessian; 0 leaves it out. The units are made equal by rms(x)^2
        epsilon: of the difference, as a share of the embeddings' RMS; 0.01, and 0.03 with the Hessian, whose second
            difference drowns in rounding below and bends above
        floor: a layer whose J has fallen to this share of its start is not pushed further; a seq2seq model whose source
            Jacobian is 0 ignores its source
        mode: "joint" adds the term to the task loss; "two_phase" leaves the task loss out for the first `switch` steps;
            "alternate" counts on unlabelled batches alone
        switch: when the second phase begins

        The layers' factors are ours: the published text says they are inverse to Jacobian norms, not how.

    Cost:
        1 extra forward, 1 extra backward; 3 and 3 with the Hessian; reverse 1 extra forward and 2 extra backwards.
        All passes replay the dropout masks of the clean one. Under autocast the passes are made in float32, the clean
        one too, once more.

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

    weight: Weight = 0.1
    estimator: Literal["finite_difference", "reverse", "published"] = "finite_difference"
    layers: Literal["all", "encoder", "decoder", "logits"] = "all"
    hessian: float = 0.0
    epsilon: float | None = None
    floor: float = 0.0
    mode: Literal["joint", "two_phase", "alternate"] = "joint"
    switch: int = 1000

    needs_hidden: ClassVar[bool] = True
    remembers: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"published": {"estimator": "published"}}

    def __post_init__(self) -> None:
        super().__post_init__()
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

    @property
    def ascends(self) -> bool:
        return self.estimator != "finite_difference"

    @property
    def cost(self) -> Cost:
        if self.estimator == "reverse":
            return Cost(1, 2)
        passes = 3 if self.hessian else 1
        return Cost(passes, passes)

    def counts(self, ctx: Context) -> bool:
        return not ctx.labelled if self.mode == "alternate" else True

    def alone(self, step: int | None) -> bool:
        return self.mode == "two_phase" and (step or 0) < self.switch

    def __call__(self, ctx: Context) -> Tensor:
        if self.estimator == "reverse":
            return self._reverse(ctx)
        if self.estimator == "published":
            return self._published(ctx)
        return self._sum(ctx, self.norms(ctx))

    def norms(self, ctx: Context) -> Norms:
        """Estimates of (J_l, rms^2 H_l) for every layer; H is None where it is not asked for."""
        epsilon = self.epsilon or (0.03 if self.hessian else 0.01)
        return differences(ctx, epsilon=epsilon, hessian=self.hessian > 0, layers=self.layers, name=self.name)

    def states(self, ctx: Context, view: View) -> States:
        """The outputs that are kept smooth."""
        return states(ctx, view, self.layers)

    def _factors(self, ctx: Context, norms: Mapping[str, Tensor]) -> dict[str, float]:
        """1 / (layers * norm at the start), kept from the first batch on, the same on every rank."""
        kept = ctx.memory.get(self.name)
        if kept is None:
            start = torch.stack([norms[name].detach().float() / ctx.count.world for name in norms]) * _share(ctx)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(start)
                start = start / torch.distributed.get_world_size()
            kept = {name: value.cpu() for name, value in zip(norms, start.clamp_min(1e-12), strict=True)}
            ctx.memory[self.name] = kept
        if kept.keys() != norms.keys():
            raise BadInput(f"{self.name}: this model has other layers than the one that the saved state is of")
        return {name: 1.0 / (len(kept) * float(value)) for name, value in kept.items()}

    def _sum(self, ctx: Context, norms: Mapping[str, tuple[Tensor, Tensor | None]]) -> Tensor:
        factors = self._factors(ctx, {name: slope for name, (slope, _) in norms.items()})
        total = torch.zeros((), device=ctx.mask.device)
        for name, (slope, bend) in norms.items():
            total = total + factors[name] * slope.clamp_min(self.floor / (len(factors) * factors[name]))
            if bend is not None:
                total = total + self.hessian * factors[name] * bend
        return total

    def _reverse(self, ctx: Context) -> Tensor:
        site = ctx.sites("input")[0]
        like = ctx.clean.embeds[site, "embedding"]
        delta = torch.zeros(like.shape, device=like.device, dtype=at_least_float32(like).dtype).requires_grad_()
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            view = ctx.forward(Shift({site: delta}), dropout="shared", hidden=True)
            outputs = self.states(ctx, view)
            if self.name not in ctx.memory:
                each = {
                    name: self._probe(ctx, {name: output}, {name: 1.0}, delta, False)
                    for name, output in outputs.items()
                }
                self._factors(ctx, each)
            factors = self._factors(ctx, {name: delta.new_zeros(()) for name in outputs})
            return self._probe(ctx, outputs, factors, delta, True)

    def _probe(self, ctx: Context, outputs: States, factors: Mapping[str, float], delta: Tensor, graph: bool) -> Tensor:
        """|d/dx of a random combination of the outputs|^2: in expectation the sum of their factors times |J|^2."""
        combined = delta.new_zeros(())
        for name, (values, mask) in outputs.items():
            direction = torch.randn_like(values) * factors[name] ** 0.5
            combined = combined + (values * masked(direction, mask)).sum()
        (gradient,) = torch.autograd.grad(combined, delta, create_graph=graph, retain_graph=True)
        return ctx.reduce_rows(gradient.square().sum((-2, -1)))

    def _published(self, ctx: Context) -> Tensor:
        """One token, ten directions, means over rows and padded positions, a Hessian without gradient."""
        site = ctx.sites("input")[0]
        names = list(self.states(ctx, ctx.clean))
        total = torch.zeros((), device=ctx.mask.device)
        for name in names:
            like = ctx.clean.embeds[site, "embedding"]
            delta = torch.zeros_like(like).requires_grad_()
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                view = ctx.forward(Shift({site: delta}, detach=True), dropout="independent", hidden=True)
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
        return total * ctx.count.world * _share(ctx) / len(names)

    def anatomy(self, ctx: Context) -> dict[str, float]:
        """J of every layer over its start, the least of them, and the loss that the wrong source costs."""
        norms = {name: slope for name, (slope, _) in self.norms(ctx).items()}
        factors = self._factors(ctx, norms)
        ratios = {name: float(slope) * len(factors) * factors[name] for name, slope in norms.items()}
        found = {**{f"J/{name}": ratio for name, ratio in ratios.items()}, "least_J": min(ratios.values())}
        swapped = ctx.forward.other_source()
        if swapped is not None and ctx.labelled:
            found["source_gap"] = float(ctx.reduce(ctx.task_loss(swapped)) - ctx.reduce(ctx.task_loss(ctx.clean)))
        return found


def _share(ctx: Context) -> float:
    """Rows of the whole optimizer step over rows of this batch: undoes the share that one batch has in the mean."""
    here = float(ctx.mask.reshape(len(ctx.mask), -1).any(-1).sum())
    return ctx.count.sequences / here if here else 1.0
