"""UEGR, forward stage: adversarial samples under several dropout rates should give one output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

import torch

from seqreg.ascent import ADVERSARIAL, Ascent
from seqreg.context import Evaluation
from seqreg.divergences import js_of
from seqreg.errors import BadInput
from seqreg.forward import ExtraPass, Pass, Perturbation
from seqreg.objective import BaseLoss, WeightedSum
from seqreg.term import Cost, Hints, Passes, Term


@dataclass(frozen=True, kw_only=True)
class UEGR(Term):
    """Our reading of UEGR's forward stage: adversarial samples under several dropout rates, made to agree.

    Only the abstract of the paper and summaries of it were at hand, and no code of it is public. What they say:
    adversarial samples; several forward passes with adaptive dropout, whose number and range are studied; a
    Jensen-Shannon divergence over the passes' outputs besides the adversarial losses. What is ours: everything below.

    Formula:
        (1/K) sum over k of L(x + d; dropout p_k) + alpha * JS(P_1 .. P_K)  -  L(x),
        d = radius * g / |g|_2, g = grad of L(x) with respect to the embeddings of the sentence,
        p_k from `low` to `high` in equal steps,  JS = (1/K) sum over k of KL(P_k || mean of P)

    Args:
        weight: 1 makes the whole loss that of the adversarial passes; less mixes in the clean loss
        passes: K
        low, high: the range of dropout rates
        alpha: of the divergence
        attack: its radius is a hundredth of the norm of the sentence's embeddings; at a tenth a small model unlearns

        The backward stage is `seqreg.selective_update.StochasticUpdate`, or the harder `SelectiveUpdate`.

    Cost:
        passes + 1 extra forwards, passes extra backwards (one of them reaches the embeddings alone). At a weight other
        than 1, the clean pass has a backward too.

    Differs from:
        nothing public to differ from.

    References:
        UEGR, arXiv 2503.16550

    Example:
        >>> from seqreg import Criterion
        >>> from seqreg.selective_update import StochasticUpdate
        >>> from seqreg.terms.uegr import UEGR
        >>> criterion, update = Criterion(UEGR(passes=2)), StochasticUpdate(alpha=0.6, beta=1.0)
        >>> UEGR(passes=4).cost
        Cost(forwards=5, backwards=4)
    """

    passes: int = 2
    low: float = 0.05
    high: float = 0.2
    alpha: float = 1.0
    attack: Ascent = Ascent(radius=0.01, norm="l2", over="sentence", rule="power")

    hints: ClassVar[Hints] = replace(ADVERSARIAL, needs_labels=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.passes <= 1000:
            self.refuse("passes", "expected a whole number >= 2, and at most 1000: one pass agrees with itself")
        if not 0 <= self.low <= self.high < 1:
            self.refuse("low", f"expected 0 <= low <= high < 1, and high is {self.high}")
        if self.alpha < 0:
            self.refuse("alpha", "expected a number >= 0")
        if self.attack.steps != 1 or self.attack.rule != "power":
            self.attack.refuse("steps", "the attack is a single normalised step: leave steps and rule alone")

    @property
    def cost(self) -> Cost:
        return Cost(self.passes + 1, self.passes if self.weight == 1 else self.passes + 1)

    def rates(self) -> list[float]:
        return [self.low + k * (self.high - self.low) / (self.passes - 1) for k in range(self.passes)]

    def declare(self, ctx: Evaluation) -> Passes:
        if ctx.kind == "regression":
            raise BadInput(f"{self.name}: a regression head has no distributions to agree: leave the term out")
        if ctx.forward.recomputes:
            raise BadInput(f"{self.name}: gradient checkpointing forgets its dropout rates: switch checkpointing off")
        worst = cache(partial(self.worst, ctx))
        return Passes(*(ExtraPass(perturbation=worst, rate=rate, ascends=True) for rate in self.rates()))

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> WeightedSum:
        agreement = ctx.reduce(js_of([view.logits for view in passes]))
        tasks = [(1.0 / self.passes, BaseLoss(view)) for view in passes]
        return WeightedSum(*tasks, (-1.0, BaseLoss(ctx.clean)), rest=self.alpha * agreement)

    def worst(self, ctx: Evaluation, clean: Pass) -> Perturbation:
        """One step from the clean input along the gradient of the task loss."""
        start, bounds = self.attack.init_delta(ctx, ctx.clean)
        live = {name: torch.zeros_like(delta).requires_grad_() for name, delta in start.items()}
        with torch.enable_grad():
            loss = BaseLoss(ctx.forward(self.attack.shift(live), dropout="shared")).sum(ctx, ctx.mask)
            gradients = torch.autograd.grad(loss, list(live.values()))
        deltas = {
            name: self.attack.step(live[name].detach(), gradient, bounds[name], last=True)
            for name, gradient in zip(live, gradients, strict=True)
        }
        return self.attack.shift(deltas)
