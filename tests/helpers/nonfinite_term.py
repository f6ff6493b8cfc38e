"""A term that is not finite at chosen steps, on all ranks or on one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqreg import Cost, Evaluation, Pass, Passes, Term
from seqreg.forward import Perturbation


@dataclass(frozen=True, kw_only=True)
class Faulty(Term):
    """Zero, but at the steps `at`: there its value ("term"), the whole loss ("loss") or its gradient is not finite."""

    at: list[int]
    how: str = "term"
    rank: int | None = None

    @property
    def cost(self) -> Cost:
        return Cost(forwards=0, backwards=0)

    @property
    def _here(self) -> bool:
        return self.rank in (None, int(os.environ.get("RANK", "0")))

    def declare(self, ctx: Evaluation) -> Passes:
        if self.how != "loss" or ctx.step not in self.at:
            return Passes()
        value = float("nan") if self._here else 0.0
        shift = Perturbation({ctx.sites("input")[0]: lambda embeds: torch.full_like(embeds, value)})
        return Passes(input_shift=shift)

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Tensor:
        nothing = torch.zeros((), device=ctx.mask.device)
        if ctx.step not in self.at or self.how == "loss" or not self._here:
            return nothing
        if self.how == "gradient":
            logits = ctx.clean.logits.float()
            return (logits - logits.detach()).abs().sum().sqrt()  # 0, with a gradient of 0 times infinity
        return nothing * float("nan")
