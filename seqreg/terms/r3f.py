"""R3F: the output should not change when the embeddings are moved a little at random."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from seqreg import anatomy
from seqreg.context import Context, Dropout, Per, Shift, View, Where
from seqreg.criterion import Agreement, Cost, Term
from seqreg.divergences import Divergence
from seqreg.errors import BadInput
from seqreg.noise import Noise, rms, sample, too_small


@dataclass(frozen=True, kw_only=True)
class R3F(Term):
    """Robust representations through regularized fine-tuning: agree with yourself under embedding noise.

    Formula:
        KL(f(x) || f(x + z)) + KL(f(x + z) || f(x)),  z ~ N(0, scale^2) or U(-scale, scale)

    What it measures: with dropout="independent", as in every published number, the two passes also differ in their
    dropout masks, and at the published scale of 1e-5 that difference is practically the whole value: the term is then
    dropout variance, not sensitivity to noise. For noise alone use dropout="shared" (the same masks in both passes) or
    "off", with a scale that matters: scale=0.1, relative=True is a tenth of the embeddings' RMS.

    Args:
        weight: the paper searches 0.1 to 5 on GLUE; 0.01 to 1 is usual for generation
        scale: standard deviation (normal) or bound (uniform) of the noise; 1e-5 in the paper
        noise: "normal" or "uniform"; the paper uses both
        relative: multiply the scale by the RMS of the batch's embeddings
        where: "input" (the encoder, or the only stack), "encoder", "decoder" or "both"
        inject: "scaled" adds the noise to what the stack consumes; "word" to the word embeddings before the model
            multiplies them by sqrt(D) (PEGASUS, mBART, Marian ...), which multiplies the noise too
        dropout: masks of the noised pass: "independent" of the clean pass, "shared" with it, or "off" in both
        divergence: "symmetric_kl" (the paper), "kl" of noised from clean, "reverse_kl", "js", or "mse" of raw outputs
        detach: the side held fixed: "none" (the paper), "clean" or "noised"
        per: averaged per "token", per "sequence" (summed over its tokens), or as "fairseq" does; see `Context.reduce`
        padding: also noise and count padded positions, as fairseq does
        unresolved: "error" or "warn" when the noise is below the resolution of the arithmetic
        preset: "fairseq" reproduces label_smoothed_cross_entropy_r3f

    Cost:
        1 extra forward, 1 extra backward; dropout="off" 2 and 2; detach="noised" saves the noised backward.

    Differs from:
        fairseq counts padded target positions and divides by rows, so that its weight grows with the padded length;
        on RoBERTa it computes the noise and never applies it.

    References:
        Aghajanyan et al., Better Fine-Tuning by Reducing Representational Collapse, arXiv 2008.03156

    Example:
        >>> from seqreg import Criterion
        >>> from seqreg.terms.r3f import R3F
        >>> criterion = Criterion(R3F(weight=0.1), label_smoothing=0.1)
        >>> R3F(preset="fairseq", scale=1e-3).per
        'fairseq'
    """

    scale: float = 1e-5
    noise: Noise = "normal"
    relative: bool = False
    where: Where = "input"
    inject: Literal["scaled", "word"] = "scaled"
    dropout: Dropout = "independent"
    divergence: Divergence = "symmetric_kl"
    detach: Literal["none", "clean", "noised"] = "none"
    per: Per = "token"
    padding: bool = False
    unresolved: Literal["error", "warn"] = "error"

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fairseq": {"inject": "word", "per": "fairseq", "padding": True, "unresolved": "warn"},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale <= 0:
            self.refuse("scale", "expected a number > 0; the paper uses 1e-5")

    @property
    def cost(self) -> Cost:
        forwards = 2 if self.dropout == "off" else 1
        if self.detach == "noised":
            return Cost(forwards, forwards - 1)
        return Cost(forwards, 1 if self.detach == "clean" else forwards)

    def __call__(self, ctx: Context) -> Agreement:
        clean = ctx.reference(self.dropout)
        noised = ctx.forward(self._shift(ctx, clean), dropout=self.dropout, grad=self.detach != "noised")
        return self._agreement(clean, noised)

    def _agreement(self, clean: View, noised: View) -> Agreement:
        held: dict[str, Literal["none", "first", "second"]] = {"none": "none", "clean": "first", "noised": "second"}
        return Agreement(clean, noised, self.divergence, held[self.detach], self.per, self.padding)

    def anatomy(self, ctx: Context) -> dict[str, float]:
        """See `seqreg.anatomy`."""
        clean = ctx.reference(self.dropout)
        shift = self._shift(ctx, clean)
        return {
            **anatomy.size(ctx, clean, shift),
            **anatomy.shares(ctx, clean, shift, self.dropout, lambda a, b: self._agreement(a, b).value(ctx)),
        }

    def _shift(self, ctx: Context, clean: View) -> Shift:
        return Shift({site: self._delta(ctx, site, clean) for site in ctx.sites(self.where)})

    def _delta(self, ctx: Context, name: str, clean: View) -> Tensor:
        site, embeds = ctx.forward.sites[name], clean.embeds[name, "embedding"]
        mask = ctx.real(name, embeds)
        absolute = site.scale if self.inject == "word" else 1.0  # what the model scales, it scales noise and RMS alike
        scale = self.scale * (float(rms(embeds, mask)) if self.relative else absolute)
        complaint = too_small(scale, embeds, mask, clean.dtype)
        if complaint and self.unresolved == "error":
            raise BadInput(f"{self.name}: {complaint}")
        if complaint:
            warnings.warn(f"{self.name}: {complaint}", stacklevel=2)
        return sample(self.noise, embeds, scale, None if self.padding else mask)
