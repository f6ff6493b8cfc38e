"""R-Drop: two dropout masks should give the same output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from seqreg.context import Evaluation, Per
from seqreg.divergences import Divergence
from seqreg.forward import ExtraPass, Pass
from seqreg.objective import BaseLoss, Consistency, WeightedSum
from seqreg.term import ConsistencyTerm, Cost, Hints, Passes


@dataclass(frozen=True, kw_only=True)
class RDrop(ConsistencyTerm):
    """Regularized dropout: train on two dropout masks, and ask the two outputs to agree.

    Formula:
        L(x; mask 2)  +  alpha * (KL(p || q) + KL(q || p)) / 2,
        p and q the outputs under mask 1 (the clean pass) and mask 2

    Args:
        weight: of the whole addition; leave it at 1 to have the paper's loss
        alpha: 0.7, the authors' for BART on CNN/DM and for RoBERTa; they have 0.5 for BERT and 5 for translation
        task: how the second pass enters the task loss: "sum" adds it, as in the paper and the fairseq code; "mean"
            averages the two, as in the README's example, which halves the task loss and so doubles what alpha means;
            "none" leaves it out
        divergence: "symmetric_kl", which is halved as in the paper, or another
        per: averaged per "token" or per "sequence"
        layer: None draws new masks everywhere; a number in the layers from there on (counted from 0), which alone run
            again: cheaper, and another term, as what lies below has one mask
        where: the stack that layer counts in: "input" (the encoder, or the only stack), "encoder" or "decoder", whose
            second pass keeps the encoder's output
        preset: "fairseq_rdrop", the authors' criterion for BART on CNN/DM

    Cost:
        1 extra forward, 1 extra backward; layer=k saves the layers below k of either.

    Differs from:
        the authors' Hugging Face code takes the mean of the task loss and the sum of the KL, so that its alpha depends
        on the batch size; its RoBERTa never reaches the second task loss.

    References:
        Liang et al., R-Drop: Regularized Dropout for Neural Networks, arXiv 2106.14448

    Example:
        >>> from seqreg import Criterion
        >>> from seqreg.terms.rdrop import RDrop
        >>> criterion = Criterion(RDrop(alpha=0.7), label_smoothing=0.1)
        >>> RDrop().cost
        Cost(forwards=1, backwards=1)
    """

    alpha: float = 0.7
    task: Literal["sum", "mean", "none"] = "sum"
    divergence: Divergence = "symmetric_kl"
    per: Per = "token"
    layer: int | None = None
    where: Literal["input", "encoder", "decoder"] = "input"

    hints: ClassVar[Hints] = Hints(
        remedy="give the model dropout in its configuration, such as attention_dropout=0.1, or its adapters, "
        "lora_dropout=0.1",
        gentler="lower alpha",
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"fairseq_rdrop": {"alpha": 0.7}}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha <= 0:
            self.refuse("alpha", "expected a number > 0")
        if self.layer is not None and self.layer < 0:
            self.refuse("layer", "expected the number of a layer, from 0")
        if self.layer is None and self.where != "input":
            self.refuse("where", "it is the stack that layer counts in: set layer=0, or leave where out")

    @property
    def cost(self) -> Cost:
        return Cost(forwards=1, backwards=1)

    def declare(self, ctx: Evaluation) -> Passes:
        if self.layer is None:
            return Passes(ExtraPass())
        return Passes(ExtraPass(dict.fromkeys(ctx.sites(self.where), _no_noise), point=self.layer))

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> WeightedSum:
        clean, (second,) = ctx.clean, passes
        alpha = self.alpha / 2 if self.divergence == "symmetric_kl" else self.alpha
        tasks = {"sum": [(1.0, second)], "mean": [(0.5, second), (-0.5, clean)], "none": []}[self.task]
        agreement = Consistency(clean, second, self.divergence, per=self.per)
        if not ctx.labelled:
            return WeightedSum((alpha, agreement))
        return WeightedSum((alpha, agreement), *((factor, BaseLoss(view)) for factor, view in tasks))


def _no_noise(states: Tensor, dtype: object = None) -> Tensor:
    return states.new_zeros(())
