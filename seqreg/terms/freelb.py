"""FreeLB: train on adversarial inputs, all along the ascent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from seqreg import diagnostics
from seqreg.ascent import Adversarial
from seqreg.context import Evaluation
from seqreg.noise import Noise, Norm, Over
from seqreg.objective import BaseLoss, WeightedSum
from seqreg.term import Cost

PAPER: Mapping[str, Any] = {"scale": 0.1, "spread": "sentence", "step_size": 0.1, "radius": 0.3, "relative": False}
ROAST: Mapping[str, Any] = {
    "steps": 1,
    "last": True,
    "inject": "layernorm",
    "scale": 1e-5,
    "step_size": 0.1,
    "radius": 0.1,
    "relative": False,
    "norm": "linf",
    "over": "token",
    "projection": "none",
    "dropout": "independent",
    "embedding_grad": False,
}


@dataclass(frozen=True, kw_only=True)
class FreeLB(Adversarial):
    """Enhanced adversarial training: the mean task loss over the points of an ascent, in place of the clean loss.

    Formula:
        (1/K) sum over t < K of  L(x + d_t)  -  L(x),   d_{t+1} = project(d_t + step_size * g_t / |g_t|_2),
        so that at weight 1 the whole loss is the adversarial mean, and at weight w it is (1 - w) clean + w adversarial

    Args:
        weight: 1 is the paper; a Warmup or StartAt schedule goes over from clean to adversarial training
        steps: K, the points of the ascent; 2 or 3 in the authors' scripts
        step_size, radius: a hundredth of the norm of the sentence's embeddings; scale: a thousandth of their RMS. Ours:
            the authors' absolute sizes are for RoBERTa-large, and a model with smaller embeddings unlearns under them
        spread: "sentence" makes the start U(-scale, scale) / sqrt(length * dimensions)
        last: also train at the point that the last step leads to: K ascents, K + 1 points
        preset: "paper", absolute l2 norms of a whole sentence as in the authors' script for RoBERTa-large on MNLI: step
            0.1, start 0.1 spread over the sentence, radius 0.3; "freelb", the same in the authors' fairseq code, which
            has `last`; "roast", the attack of RoAST (arXiv 2312.04032) and half of the loss at either end of it: one
            step of 0.1 in every token's largest entry, on the output of the embeddings' LayerNorm, from a start of 1e-5

        The other settings are those of `seqreg.ascent.Ascent`.

    Cost:
        steps extra forwards, 2 steps - 2 extra backwards (of which steps - 1 reach the embeddings alone); with `last`,
        steps + 1 and 2 steps. At a weight other than 1, the clean pass has a backward too. All graphs are held until
        backward.

    Differs from:
        the authors' code calls backward inside the loss; here the clean pass is run too, because the criterion's base
        loss needs it.

    References:
        Zhu et al., FreeLB: Enhanced Adversarial Training for Natural Language Understanding, arXiv 1909.11764

    Example:
        >>> from seqreg import Criterion, Warmup
        >>> from seqreg.terms.freelb import FreeLB
        >>> criterion = Criterion(FreeLB(steps=3, weight=Warmup(1.0, steps=500)))
        >>> FreeLB(preset="freelb").cost
        Cost(forwards=3, backwards=4)
    """

    noise: Noise = "uniform"
    steps: int = 2
    step_size: float = 0.01
    radius: float = 0.01
    norm: Norm = "l2"
    over: Over = "sentence"
    last: bool = False

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": PAPER,
        "freelb": {**PAPER, "inject": "word", "last": True},
        "roast": ROAST,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule == "power":
            self.refuse("rule", "choose 'normalised' or 'raw'")

    @property
    def points(self) -> int:
        return self.steps + 1 if self.last else self.steps

    @property
    def cost(self) -> Cost:
        quiet = 1 if self.dropout == "off" else 0
        return Cost(self.points + quiet, 2 * self.points - (2 if self.weight == 1 else 1))

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """As for other adversarial terms; `rise` is the loss at the end of the ascent over the clean loss."""
        clean = ctx.reference(self.dropout)
        ascent = self.ascend(ctx, clean, lambda view: BaseLoss(view).sum(ctx, ctx.mask))
        shift = self.shift(ascent.final)
        end = ctx.forward(shift, dropout=self.dropout)
        rise = float(BaseLoss(end).value(ctx) / BaseLoss(clean).value(ctx))
        return {**self.ascent_diagnostics(ascent), **diagnostics.size(ctx, clean, shift), "rise": rise}

    def __call__(self, ctx: Evaluation) -> WeightedSum:
        deltas, bounds = self.init_delta(ctx, ctx.reference(self.dropout))
        total = torch.zeros((), device=ctx.mask.device)
        unit = float(ctx.weights(ctx.base.per).max()) or 1.0  # a step follows the sum over positions, not their mean
        training = torch.is_grad_enabled()
        for point in range(self.points):
            live = {name: delta.detach().requires_grad_() for name, delta in deltas.items()}
            with torch.enable_grad():
                view = ctx.forward(self.shift(live), dropout=self.dropout)
                loss = BaseLoss(view).value(ctx, retain_graph=point < self.points - 1)
                wanted = loss / unit
            total = total + (loss if training else loss.detach()) / self.points
            if point < self.points - 1:
                gradients = torch.autograd.grad(wanted, list(live.values()), retain_graph=training)
                deltas = {
                    name: self.step(delta, gradient, bounds[name], last=False)
                    for (name, delta), gradient in zip(deltas.items(), gradients, strict=True)
                }
        return WeightedSum((-1.0, BaseLoss(ctx.clean)), rest=total)
