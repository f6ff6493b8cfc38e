"""A term that is not finite at chosen steps, on all ranks or on one."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from seqreg import Cost, Evaluation, Term
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

    def input_shift(self, ctx: Evaluation, weight: float) -> Perturbation | None:
        if self.how != "loss" or ctx.step not in self.at:
            return None
        value = float("nan") if self._here else 0.0
        return Perturbation({ctx.sites("input")[0]: lambda embeds: torch.full_like(embeds, value)})

    def __call__(self, ctx: Evaluation) -> Tensor:
        nothing = torch.zeros((), device=ctx.mask.device)
        if ctx.step not in self.at or self.how == "loss" or not self._here:
            return nothing
        if self.how == "gradient":
            logits = ctx.clean.logits.float()
            return (logits - logits.detach()).abs().sum().sqrt()  # 0, with a gradient of 0 times infinity
        return nothing * float("nan")
