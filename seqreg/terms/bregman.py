"""Bregman proximal point: do not move far from where you were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from seqreg.context import Evaluation, Per
from seqreg.divergences import Divergence
from seqreg.errors import BadInput
from seqreg.forward import Dropout
from seqreg.losses import at_least_float32
from seqreg.objective import Consistency
from seqreg.term import Cost, Term
from seqreg.weight_average import float_copies, is_average_of, trained_parameters, update_average


@dataclass(frozen=True, kw_only=True)
class Bregman(Term):
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
        parameters, in float32. The average is part of `Criterion.state_dict`; the trainers save and resume it.

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
    starts_at_zero: ClassVar[bool] = True

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

    @property
    def pass_dropout(self) -> Dropout:
        return self.dropout

    def __call__(self, ctx: Evaluation) -> Consistency:
        own = ctx.reference(self.dropout)
        average = self.average(ctx)
        view = ctx.forward(dropout=self.dropout, grad=False, weights=average)
        held: Literal["second"] = "second"
        return Consistency(own, view, self.divergence, held, self.per)

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """distance: how far the weights are from their average, |w - w'| / |w|."""
        average = self.average(ctx)
        trained = trained_parameters(ctx.forward.module)
        own = {name: at_least_float32(parameter.detach()) for name, parameter in trained.items()}
        apart = sum(float((own[name] - average[name]).square().sum()) for name in own)
        whole = sum(float(weight.square().sum()) for weight in own.values())
        return {"distance": (apart / whole) ** 0.5 if whole else 0.0}

    @torch.no_grad()
    def average(self, ctx: Evaluation) -> dict[str, Tensor]:
        """The averaged weights, brought up to date if an optimizer step was made since they were last used."""
        trained = trained_parameters(ctx.forward.module)
        if ctx.step is None:
            raise BadInput(f"{self.name} averages once an optimizer step: pass context(..., step=step)")
        now = torch.tensor(ctx.step)
        kept = ctx.memory.get(self.name)
        if kept is None:
            kept = ctx.memory[self.name] = {f"w/{name}": copy for name, copy in float_copies(trained).items()}
            kept |= {"step": now, "updates": torch.tensor(0)}
        elif kept["step"] != now:
            average = self._stored_average(kept, trained)
            passed = max(int(now - kept["step"]), 1)
            beta = (self.beta if int(kept["updates"]) < self.switch else self.beta_late) ** passed
            update_average(average, trained, beta)
            kept |= {f"w/{name}": value for name, value in average.items()}
            kept["updates"] += passed
            kept["step"] = now
        return {name: kept[f"w/{name}"] for name in trained}

    def _stored_average(self, kept: Mapping[str, Tensor], trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        average = {key[2:]: value for key, value in kept.items() if key.startswith("w/")}
        if not is_average_of(average, trained):
            raise BadInput(
                f"{self.name}: the trained parameters are not those that its average is of: begin a new criterion"
            )
        return average
