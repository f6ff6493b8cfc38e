"""SiFT: adversarial smoothness on normalised embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from seqreg.ascent import AdversarialConsistency, Ascent, Grad
from seqreg.divergences import Divergence
from seqreg.schedules import Weight


@dataclass(frozen=True, kw_only=True)
class SiFT(AdversarialConsistency):
    """Scale-invariant fine-tuning: perturb embeddings after normalising them, so that their size does not matter.

    Formula:
        KL both ways between f(e) and f(LayerNorm(e_hat + d)), each left side held fixed, e_hat = (e - mean(e)) / std(e)
        of every token, at the d that ascent finds within |d|_inf <= radius

    Args:
        weight: 0.1, the largest tried on SST-2 and pronunciation, and not shown to do harm (docs/results/defaults.md).
            DeBERTa's scripts have 5 (3 for the smallest model) for a perturbation that is mostly random; with ours that
            begins at several times the base loss, and a small model unlearns
        attack: its sizes are in units of the normalised embeddings, whose RMS is 1: step_size and radius a twentieth of
            that (ours; DeBERTa adds 1e-4 to a start of 1e-2 and has no ball). With inject="normalised", embeddings
            without a LayerNorm (PEGASUS, T5, Marian, M2M100 and most causal language models) are divided by the RMS of
            each token instead, which is our extension
        preset: "deberta", the released code, with its weight of 5

        The settings of the attack are those of `seqreg.ascent.Ascent`, the others of `AdversarialConsistency`.

    Cost:
        steps + 1 extra forwards, steps + 1 extra backwards (those of the ascent reach the embeddings alone);
        dropout="off" one more of each.

    Differs from:
        DeBERTa's perturbation stays mostly its random start; its value is two cross-entropies, so that it is not 0
        where the outputs agree; on a regression head it is identically 0; and it cannot perturb two stacks.

    References:
        He et al., DeBERTa: Decoding-enhanced BERT with Disentangled Attention, arXiv 2006.03654

    Example:
        >>> from seqreg import Criterion
        >>> from seqreg.terms.sift import SiFT
        >>> criterion = Criterion(SiFT(), label_smoothing=0.1)
        >>> SiFT(preset="deberta").divergence
        'symmetric_ce'
    """

    weight: Weight = 0.1
    attack: Ascent = Ascent(step_size=0.05, radius=0.05, inject="normalised", relative=False)
    inner: Divergence = "kl"
    grad: Grad = "students"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "deberta": {
            "weight": 5.0,
            "attack": {
                "noise": "clamped",
                "scale": 1e-2,
                "step_size": 1e-4,
                "projection": "none",
                "stabiliser": 1e-6,
                "dropout": "independent",
                "embedding_grad": False,
            },
            "divergence": "symmetric_ce",
            "grad": "both",
            "padding": True,
        },
    }
