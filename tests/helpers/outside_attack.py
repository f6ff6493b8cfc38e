"""A regularizer with an adversarial pass, as a user would write it: in a file of their own, outside the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seqreg import Ascent, Consistency, Cost, Evaluation, Pass, Passes, Term
from seqreg.objective import BaseLoss


@dataclass(frozen=True, kw_only=True)
class WorstCase(Term):
    """Agreement with the output at a nearby input where the task loss is high."""

    weight: float = 0.1
    attack: Ascent = Ascent(radius=0.05, step_size=0.05)

    @property
    def cost(self) -> Cost:
        return Cost(forwards=self.attack.steps + 1, backwards=self.attack.steps + 1)

    def declare(self, ctx: Evaluation) -> Passes:
        return Passes(self.attack.extra_pass(ctx, lambda view: BaseLoss(view).sum(ctx, ctx.mask)))

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Consistency:
        return Consistency(ctx.clean, passes[0], "mse" if ctx.kind == "regression" else "symmetric_kl")
