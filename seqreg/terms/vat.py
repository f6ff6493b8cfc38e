"""VAT: the perturbed output should keep to the clean one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seqreg.ascent import AdversarialConsistency, Grad
from seqreg.divergences import Divergence
from seqreg.noise import Norm, Over


@dataclass(frozen=True, kw_only=True)
class VAT(AdversarialConsistency):
    """Virtual adversarial training: the worst direction by power iteration, the clean output held as the target.

    Formula:
        KL(f(x).detach() || f(x + radius * g / |g|_2)),  g = grad of KL(f(x) || f(x + scale * u)) for a random unit u

    Args:
        weight: 1 in the paper
        scale: of the trial step along the random direction: a thousandth of the norm that a sentence has at the batch's
            RMS
        radius: of the perturbation: a twentieth of that norm. Ours: the paper's radii are for images and other
            embeddings, and at a tenth the term can begin above the base loss
        steps: of power iteration; 1 in the paper
        over: one ball per "sentence"

        The other settings are those of `seqreg.ascent.Ascent` and `AdversarialConsistency`.

    Cost:
        steps + 1 extra forwards, steps + 1 extra backwards (those of the ascent reach the embeddings alone);
        dropout="off" one forward more.

    Differs from:
        released implementations run the clean pass twice, and one zeroes the model's gradients inside the loss.

    References:
        Miyato et al., Virtual Adversarial Training: A Regularization Method for Supervised and Semi-Supervised
        Learning, arXiv 1704.03976

    Example:
        >>> from seqreg import Criterion
        >>> from seqreg.terms.vat import VAT
        >>> criterion = Criterion(VAT(weight=1.0), label_smoothing=0.1)
        >>> VAT(steps=2).cost
        Cost(forwards=3, backwards=3)
    """

    radius: float = 0.05
    norm: Norm = "l2"
    over: Over = "sentence"
    rule: Literal["normalised", "raw", "power"] = "power"
    projection: Literal["clip", "rescale", "none"] = "clip"
    inner: Divergence = "kl"
    divergence: Divergence = "kl"
    grad: Grad = "perturbed"
