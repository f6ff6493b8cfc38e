"""NEFTune: noise on the embeddings while training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from seqreg import diagnostics
from seqreg.context import Evaluation, Where
from seqreg.errors import BadInput
from seqreg.forward import Pass, PassRequest, Perturbation
from seqreg.noise import arithmetic_dtype, rms, sample, too_small
from seqreg.schedules import weight_at
from seqreg.term import Cost, Hints, Passes, Term


@dataclass(frozen=True, kw_only=True)
class NEFTune(Term):
    """Noisy embedding fine-tuning: the training input itself is noised, by an amount that shrinks with its length.

    Formula:
        L(x + z) in place of L(x),  z ~ U(-1, 1) * weight * alpha / sqrt(length * dimensions),
        its RMS before the weight at most max_ratio * RMS(x)

    Args:
        weight: multiplies the noise, so that Warmup or StartAt can bring it in; at most 1
        alpha: 5 to 15 in the paper
        max_ratio: the most that the noise's RMS may be of the embeddings' RMS; None for no bound, as in the paper.
            Ours: where dimensions are few and texts short, alpha=5 is as large as the embeddings themselves
        where: "input" (the encoder, or the only stack), "encoder", "decoder" or "both"
        padding: count padding in the length and noise it, as transformers does
        preset: "paper", without the bound; "hf_neftune", what transformers' neftune_noise_alpha does where it works

    Cost:
        nothing: the one pass that is made anyway is noised. Its part of the loss is 0 by construction. Other terms are
        measured around the noised input.

    Differs from:
        transformers' hook never fires on encoder-decoders, silently; it divides by the padded length and noises the
        padding.

    References:
        Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, arXiv 2310.05914

    Example:
        >>> from seqreg import Criterion
        >>> from seqreg.terms.neftune import NEFTune
        >>> criterion = Criterion(NEFTune(alpha=15))
        >>> NEFTune().cost
        Cost(forwards=0, backwards=0)
    """

    alpha: float = 5.0
    max_ratio: float | None = 0.1
    where: Where = "input"
    padding: bool = False

    hints: ClassVar[Hints] = Hints(starts_at_zero=True, needs_labels=True)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"max_ratio": None},
        "hf_neftune": {"max_ratio": None, "padding": True},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha <= 0:
            self.refuse("alpha", "expected a number > 0; the paper uses 5 to 15")
        if self.max_ratio is not None and self.max_ratio <= 0:
            self.refuse("max_ratio", "expected a number > 0, or nothing for no bound")

    @property
    def cost(self) -> Cost:
        return Cost(forwards=0, backwards=0)

    def declare(self, ctx: Evaluation) -> Passes:
        return Passes(input_shift=self._noise(ctx))

    def _noise(self, ctx: Evaluation) -> Perturbation:
        weight = weight_at(self.weight, ctx.step)
        if weight > 1:
            raise BadInput(f"{self.name}: weight={weight:g} would enlarge the noise: raise alpha, and do not use Every")

        def noise(embeds: Tensor, site: str) -> Tensor:
            mask = None if self.padding else ctx.real(site, embeds)
            rows, length, width = embeds.shape
            real = torch.full((rows, 1), float(length)) if mask is None else mask.sum(-1, keepdim=True).float()
            lengths = ctx.forward.sites[site].lengths  # of the documents in packed rows
            real = real if lengths is None or self.padding else lengths
            bound = self.alpha / (real.to(embeds.device).clamp_min(1) * width).sqrt().unsqueeze(-1)
            tokens = ctx.real(site, embeds) if self.max_ratio is not None else mask
            if self.max_ratio is not None:  # the RMS of U(-b, b) is b / sqrt(3)
                bound = bound.clamp_max(self.max_ratio * math.sqrt(3) * float(rms(embeds, tokens)))
            if complaint := too_small(float(bound.max()), embeds, tokens, arithmetic_dtype(embeds)):
                ctx.notes[self.name] = f"{complaint} (alpha, max_ratio)"
            return sample("uniform", embeds, weight * bound, mask)

        return Perturbation({name: partial(noise, site=name) for name in ctx.sites(self.where)})

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """See `seqreg.diagnostics.size`."""
        plain = ctx.forward.run(PassRequest())  # the clean pass is noised already
        return diagnostics.size(ctx, plain, self._noise(ctx))

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Tensor:
        return torch.zeros((), device=ctx.mask.device)
