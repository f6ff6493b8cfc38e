"""Bregman proximal point: do not move far from where you were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from seqreg.context import Evaluation, Per
from seqreg.divergences import Divergence
from seqreg.forward import Dropout, ExtraPass, Pass
from seqreg.objective import Consistency
from seqreg.overrides import MovingAverage, distance
from seqreg.term import ConsistencyTerm, Cost, Hints, Passes


@dataclass(frozen=True, kw_only=True)
class Bregman(ConsistencyTerm):
    """Bregman proximal point optimization with momentum: agree with a moving average of your own past weights.

    Formula:
        KL(f(x; w) || f(x; w')) + KL(f(x; w') || f(x; w)),   w' <- beta * w' + (1 - beta) * w  once an optimizer step

    Args:
        weight: of the term. Where a schedule skips steps, the average makes up for them at once, by beta^steps
        beta: momentum of the average for the first `switch` updates. 0.99 and then 0.999 are the values we recall of
            the paper; we could not check them
        beta_late: momentum from then on
        switch: when; a tenth of the training steps is what we recall
        dropout: masks of the average's pass: "shared" with the clean pass, "independent" or "off"
        divergence: "symmetric_kl", or "mse" on a regression head
        per: averaged per "token" or per "sequence"

    Cost:
        1 extra forward without a graph, no backward (dropout="off": 2 and 1). Memory: one extra copy of the trainable
        parameters, in float32; under FSDP2 a copy of this rank's shards. The average is part of
        `Criterion.state_dict`; the trainers save and resume it.

    Differs from:
        no public implementation of SMART has this half.

    References:
        Jiang et al., SMART, arXiv 1911.03437, section on Bregman proximal point optimization

    Example:
        >>> from seqreg import Criterion
        >>> from seqreg.terms.bregman import Bregman
        >>> from seqreg.terms.smart import SMART
        >>> criterion = Criterion(SMART(), Bregman(switch=1000))
    """

    beta: float = 0.99
    beta_late: float = 0.999
    switch: int = 1000
    dropout: Dropout = "shared"
    divergence: Divergence = "symmetric_kl"
    per: Per = "token"

    stateful: ClassVar[bool] = True
    hints: ClassVar[Hints] = Hints(starts_at_zero=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting in ("beta", "beta_late"):
            if not 0 < getattr(self, setting) < 1:
                self.refuse(setting, "expected a number in (0, 1): at 0 the average is the model itself")
        if self.switch < 0:
            self.refuse("switch", "expected a whole number >= 0")

    @property
    def cost(self) -> Cost:
        return Cost(2, 1) if self.dropout == "off" else Cost(1, 0)

    def declare(self, ctx: Evaluation) -> Passes:
        return Passes(ExtraPass(dropout=self.dropout, grad=False, weights=partial(self.average, ctx)))

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Consistency:
        return Consistency(ctx.reference(self.dropout), passes[0], self.divergence, "second", self.per)

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """distance: how far the weights are from their average, |w - w'| / |w|."""
        return {"distance": distance(ctx.forward.trained(), self.average(ctx))}

    def average(self, ctx: Evaluation) -> dict[str, Tensor]:
        """The averaged weights, brought up to date if an optimizer step was made since they were last used."""
        keep = MovingAverage(self.beta, self.beta_late, self.switch)
        return keep(ctx.memory, self.name, ctx.forward.trained(), ctx.step, module=ctx.forward.module)
