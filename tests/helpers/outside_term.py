"""A regularizer as a user would write one: in a file of their own, outside the package."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from seqreg import Cost, Evaluation, Term


@dataclass(frozen=True, kw_only=True)
class ConfidencePenalty(Term):
    """Negative entropy of the outputs (Pereyra et al., arXiv 1701.06548)."""

    weight: float = 0.1

    @property
    def cost(self) -> Cost:
        return Cost(forwards=0, backwards=0)

    def __call__(self, ctx: Evaluation) -> Tensor:
        logp = ctx.clean.logits.float().log_softmax(-1)
        return ctx.reduce((logp.exp() * logp).sum(-1))
