"""ALUM: virtual adversarial training for language models, switched on after a plain start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from seqreg.ascent import RESCALED_ASCENT, AdversarialConsistency, Grad
from seqreg.divergences import Divergence


@dataclass(frozen=True, kw_only=True)
class ALUM(AdversarialConsistency):
    """Adversarial training for large neural language models: VAT in the linf ball of every token, as a curriculum.

    Formula:
        KL both ways between f(x) and f(x + d), each left side held fixed, at the d that ascent on KL(f(x) || f(x + d))
        finds within |d|_inf <= radius

    Args:
        weight: mt-dnn's author advises 10 for pre-training and 1 for fine-tuning. The curriculum is a schedule:
            StartAt(1.0, start=...) trains plainly first
        attack: its step_size and radius are a tenth of the embeddings' RMS (ours)
        preset: "alum_v02", the released code (mt-dnn, branch v0.2)

        The settings of the attack are those of `seqreg.ascent.Ascent`, the others of `AdversarialConsistency`.

    Cost:
        steps + 1 extra forwards, steps + 1 extra backwards (those of the ascent reach the embeddings alone);
        dropout="off" one more of each.

    Differs from:
        the released code follows the raw gradient and rescales to norm 1; its script never switches the term on, and
        with it switched on it raises TypeError.

    References:
        Liu et al., Adversarial Training for Large Neural Language Models, arXiv 2004.08994

    Example:
        >>> from seqreg import Criterion, StartAt
        >>> from seqreg.terms.alum import ALUM
        >>> criterion = Criterion(ALUM(weight=StartAt(1.0, start=1000)))
        >>> ALUM(preset="alum_v02").attack.embedding_grad
        False
    """

    inner: Divergence = "kl"
    grad: Grad = "students"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "alum_v02": {"attack": {**RESCALED_ASCENT, "embedding_grad": False}, "inner_per": "token"},
    }
