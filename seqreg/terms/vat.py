"""VAT: the perturbed output should keep to the clean one."""

from __future__ import annotations

from dataclasses import dataclass

from seqreg.ascent import AdversarialConsistency, Ascent, Grad
from seqreg.divergences import Divergence


@dataclass(frozen=True, kw_only=True)
class VAT(AdversarialConsistency):
    """Virtual adversarial training: the worst direction by power iteration, the clean output held as the target.

    Formula:
        KL(f(x).detach() || f(x + radius * g / |g|_2)),  g = grad of KL(f(x) || f(x + scale * u)) for a random unit u

    Args:
        weight: 1 in the paper
        attack: power iteration in one ball per sentence, with steps=1 as in the paper. The scale of the trial step is a
            thousandth of the norm that a sentence has at the batch's RMS, the radius of the perturbation a twentieth.
            Ours: the paper's radii are for images and other embeddings, and at a tenth the term can begin above the
            base loss

        The settings of the attack are those of `seqreg.ascent.Ascent`, the others of `AdversarialConsistency`.

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
        >>> from seqreg.ascent import Ascent
        >>> from seqreg.terms.vat import VAT
        >>> criterion = Criterion(VAT(weight=1.0), label_smoothing=0.1)
        >>> VAT(attack=Ascent(steps=2)).cost
        Cost(forwards=3, backwards=3)
    """

    attack: Ascent = Ascent(radius=0.05, norm="l2", over="sentence", rule="power")
    inner: Divergence = "kl"
    divergence: Divergence = "kl"
    grad: Grad = "perturbed"
