"""FreeLB: train on adversarial inputs, all along the ascent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from seqreg import diagnostics
from seqreg.ascent import ADVERSARIAL, Ascent
from seqreg.context import Evaluation
from seqreg.forward import Pass
from seqreg.objective import BaseLoss, WeightedSum
from seqreg.term import Cost, Hints, Passes, Term

PAPER: Mapping[str, Any] = {"scale": 0.1, "spread": "sentence", "step_size": 0.1, "radius": 0.3, "relative": False}
ROAST: Mapping[str, Any] = {
    "steps": 1,
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
class FreeLB(Term):
    """Enhanced adversarial training: the mean task loss over the points of an ascent, in place of the clean loss.

    Formula:
        (1/K) sum over t < K of  L(x + d_t)  -  L(x),   d_{t+1} = project(d_t + step_size * g_t / |g_t|_2),
        so that at weight 1 the whole loss is the adversarial mean, and at weight w it is (1 - w) clean + w adversarial

    Args:
        weight: 1 is the paper; a Warmup or StartAt schedule goes over from clean to adversarial training
        attack: its steps are K, the points of the ascent; 2 or 3 in the authors' scripts. step_size and radius are a
            hundredth of the norm of the sentence's embeddings, scale a thousandth of their RMS. Ours: the authors'
            absolute sizes are for RoBERTa-large, and a model with smaller embeddings unlearns under them.
            spread="sentence" makes the start U(-scale, scale) / sqrt(length * dimensions)
        last: also train at the point that the last step leads to: K ascents, K + 1 points
        preset: "paper", absolute l2 norms of a whole sentence as in the authors' script for RoBERTa-large on MNLI: step
            0.1, start 0.1 spread over the sentence, radius 0.3; "freelb", the same in the authors' fairseq code, which
            has `last`; "roast", the attack of RoAST (arXiv 2312.04032) and half of the loss at either end of it: one
            step of 0.1 in every token's largest entry, on the output of the embeddings' LayerNorm, from a start of 1e-5

        The settings of the attack are those of `seqreg.ascent.Ascent`.

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
        >>> from seqreg.ascent import Ascent
        >>> from seqreg.terms.freelb import FreeLB
        >>> criterion = Criterion(FreeLB(attack=Ascent(steps=3), weight=Warmup(1.0, steps=500)))
        >>> FreeLB(preset="freelb").cost
        Cost(forwards=3, backwards=4)
    """

    last: bool = False
    attack: Ascent = Ascent(noise="uniform", steps=2, step_size=0.01, radius=0.01, norm="l2", over="sentence")

    hints: ClassVar[Hints] = replace(ADVERSARIAL, needs_labels=True)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"attack": PAPER},
        "freelb": {"attack": {**PAPER, "inject": "word"}, "last": True},
        "roast": {"attack": ROAST, "last": True},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attack.rule == "power":
            self.attack.refuse("rule", "choose 'normalised' or 'raw'")

    @property
    def points(self) -> int:
        return self.attack.steps + 1 if self.last else self.attack.steps

    @property
    def cost(self) -> Cost:
        quiet = 1 if self.attack.dropout == "off" else 0
        return Cost(self.points + quiet, 2 * self.points - (2 if self.weight == 1 else 1))

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """As for other adversarial terms; `rise` is the loss at the end of the ascent over the clean loss."""
        attack = self.attack
        clean = ctx.reference(attack.dropout)
        ascent = attack.ascend(ctx, clean, lambda view: BaseLoss(view).sum(ctx, ctx.mask))
        shift = attack.shift(ascent.final)
        end = ctx.forward(shift, dropout=attack.dropout)
        rise = float(BaseLoss(end).value(ctx) / BaseLoss(clean).value(ctx))
        return {**attack.diagnostics(ascent), **diagnostics.size(ctx, clean, shift), "rise": rise}

    def declare(self, ctx: Evaluation) -> Passes:
        return Passes(own=self.attack.dropout, ascends=True)

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> WeightedSum:
        attack = self.attack
        deltas, bounds = attack.init_delta(ctx, ctx.reference(attack.dropout))
        total = torch.zeros((), device=ctx.mask.device)
        unit = float(ctx.weights(ctx.base.per).max()) or 1.0  # a step follows the sum over positions, not their mean
        training = torch.is_grad_enabled()
        for point in range(self.points):
            live = {name: delta.detach().requires_grad_() for name, delta in deltas.items()}
            with torch.enable_grad():
                view = ctx.forward(attack.shift(live), dropout=attack.dropout)
                loss = BaseLoss(view).value(ctx, retain_graph=point < self.points - 1)
                wanted = loss / unit
            total = total + (loss if training else loss.detach()) / self.points
            if point < self.points - 1:
                gradients = torch.autograd.grad(wanted, list(live.values()), retain_graph=training)
                deltas = {
                    name: attack.step(delta, gradient, bounds[name], last=False)
                    for (name, delta), gradient in zip(deltas.items(), gradients, strict=True)
                }
        return WeightedSum((-1.0, BaseLoss(ctx.clean)), rest=total)
