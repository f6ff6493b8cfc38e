"""R3F: the output should not change when the embeddings are moved a little at random."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from seqreg import diagnostics
from seqreg.context import Context, Per, Where
from seqreg.divergences import Divergence
from seqreg.errors import BadInput
from seqreg.forward import Dropout, ExtraPass, Pass, Perturbation
from seqreg.noise import Noise, arithmetic_dtype, rms, sample, too_small
from seqreg.objective import Consistency
from seqreg.schedules import Weight
from seqreg.term import Cost, Term


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
        weight: 0.1, the least that the authors search on GLUE (0.1, 0.5, 1 and 5), and about what generation takes: it
            counts per token here, per sentence in fairseq, whose default is 1
        scale: standard deviation (normal) or bound (uniform) of the noise; 1e-5 in the paper; 0 leaves dropout alone to
            tell the passes apart, which is R-Drop
        noise: "normal" or "uniform"; the paper uses both. "clamped" is normal, cut at two standard deviations
        relative: multiply the scale by the RMS of the batch's embeddings
        where: "input" (the encoder, or the only stack), "encoder", "decoder" or "both"
        inject: "scaled" adds the noise to what the stack consumes; "word" to the word embeddings before the model
            multiplies them by sqrt(D) (PEGASUS, mBART, Marian ...), which multiplies the noise too
        dropout: masks of the noised pass: "independent" of the clean pass, "shared" with it, or "off" in both
        divergence: "symmetric_kl" (the paper), "kl" of noised from clean, "reverse_kl", "js", or "mse" of raw outputs
        grad: the sides that learn: "both" (the paper's formula); "clean" leaves out the noised backward, the 2 forwards
            and 1 backward that the paper counts, and drops half of the gradient: where p and q are close, the two
            halves are equal on average under independent dropout, so that it is about that of half the weight;
            "noised" drops the other half
        per: averaged per "token", per "sequence" (summed over its tokens), or as "fairseq" does; see `Context.reduce`
        padding: also noise and count padded positions, as fairseq does
        rows: a random share of the rows is noised, and counted for all: cheaper, unbiased, of more variance
        tokens: likewise a random share of the tokens; saves the head's work alone
        unresolved: "error" or "warn" when the noise is below the resolution of the arithmetic
        preset: "fairseq" reproduces label_smoothed_cross_entropy_r3f, with its weight of 1

    Cost:
        1 extra forward, 1 extra backward; dropout="off" 2 and 2; grad="clean" saves the noised backward.

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

    weight: Weight = 0.1
    scale: float = 1e-5
    noise: Noise = "normal"
    relative: bool = False
    where: Where = "input"
    inject: Literal["scaled", "word"] = "scaled"
    dropout: Dropout = "independent"
    divergence: Divergence = "symmetric_kl"
    grad: Literal["both", "clean", "noised"] = "both"
    per: Per = "token"
    padding: bool = False
    rows: float = 1.0
    tokens: float = 1.0
    unresolved: Literal["error", "warn"] = "error"

    remedy: ClassVar[str] = "raise scale, such as scale=0.1 with relative=True"
    gentler: ClassVar[str] = "lower weight or scale"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fairseq": {"weight": 1.0, "inject": "word", "per": "fairseq", "padding": True, "unresolved": "warn"},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale < 0:
            self.refuse("scale", "expected a number >= 0; the paper uses 1e-5")
        if self.scale == 0 and self.dropout != "independent":
            self.refuse("scale", "without noise and with one dropout mask the term is 0: leave it out")
        for setting in ("rows", "tokens"):
            if not 0 < getattr(self, setting) <= 1:
                self.refuse(setting, "expected a share, more than 0 and at most 1")
        if self.rows < 1 and self.dropout == "shared":
            self.refuse("rows", "dropout masks are shared by all rows: use dropout='independent', or tokens=")

    @property
    def cost(self) -> Cost:
        forwards = 2 if self.dropout == "off" else 1
        if self.grad == "clean":
            return Cost(forwards, forwards - 1)
        return Cost(forwards, 1 if self.grad == "noised" else forwards)

    def extra(self, ctx: Context) -> ExtraPass | None:
        if self.dropout != "independent" or self.grad == "clean" or (self.relative and self.rows < 1):
            return None  # the RMS is that of all rows, which noise for some has to know
        rows = self._rows(ctx)
        return ExtraPass(
            Perturbation({site: partial(self._noise, ctx, site, rows) for site in ctx.sites(self.where)}), rows
        )

    def __call__(self, ctx: Context) -> Consistency:
        clean, noised = ctx.reference(self.dropout), ctx.made_for(self)
        if noised is None:
            rows = self._rows(ctx)
            shift = self._shift(ctx, clean, rows)
            noised = ctx.forward(shift, dropout=self.dropout, grad=self.grad != "clean", rows=rows)
        return replace(self._agreement(clean, noised), sample=self._sample(ctx, noised.rows))

    def _rows(self, ctx: Context) -> Tensor | None:
        """The rows that are noised; None for all."""
        batch = ctx.forward.rows
        if self.rows == 1:
            return None
        if batch is None:
            self.refuse("rows", "this model cannot be given some rows of a batch: use tokens=, or Every")
        return torch.randperm(batch)[: max(1, round(self.rows * batch))].sort().values.to(ctx.mask.device)

    def _sample(self, ctx: Context, rows: Tensor | None) -> Tensor | None:
        """What makes up for the rows and tokens that were left out."""
        if rows is None and self.tokens == 1:
            return None
        kept = torch.ones(ctx.mask.shape, device=ctx.mask.device)
        if rows is not None:
            kept = torch.zeros_like(kept).index_fill(0, rows, len(kept) / len(rows))
        if self.tokens < 1:
            kept = kept * (torch.rand_like(kept) < self.tokens) / self.tokens
        return kept

    def _agreement(self, clean: Pass, noised: Pass) -> Consistency:
        held: dict[str, Literal["none", "first", "second"]] = {"both": "none", "noised": "first", "clean": "second"}
        return Consistency(clean, noised, self.divergence, held[self.grad], self.per, self.padding)

    def diagnostics(self, ctx: Context) -> dict[str, float]:
        """See `seqreg.diagnostics`."""
        clean = ctx.reference(self.dropout)
        shift = self._shift(ctx, clean)
        return {
            **diagnostics.size(ctx, clean, shift),
            **diagnostics.sources(ctx, clean, shift, self.dropout, lambda a, b: self._agreement(a, b).value(ctx)),
        }

    def _shift(self, ctx: Context, clean: Pass, rows: Tensor | None = None) -> Perturbation:
        embeds = {site: clean.embeds[site, "embedding"] for site in ctx.sites(self.where)}
        embeds = embeds if rows is None else {site: found[rows] for site, found in embeds.items()}
        return Perturbation({site: self._noise(ctx, site, rows, found, clean.dtype) for site, found in embeds.items()})

    def _noise(
        self, ctx: Context, name: str, rows: Tensor | None, embeds: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        site, mask = ctx.forward.sites[name], ctx.real(name, embeds, rows)
        absolute = site.scale if self.inject == "word" else 1.0  # what the model scales, it scales noise and RMS alike
        scale = self.scale * (self._size(ctx, name, embeds, rows) if self.relative else absolute)
        complaint = too_small(scale, embeds, mask, dtype or arithmetic_dtype(embeds)) if self.scale else None
        if complaint and self.unresolved == "error":
            raise BadInput(f"{self.name}: {complaint}")
        if complaint:
            ctx.notes[self.name] = complaint
        return sample(self.noise, embeds, scale, None if self.padding else mask)

    def _size(self, ctx: Context, name: str, embeds: Tensor, rows: Tensor | None) -> float:
        """The RMS of the batch's embeddings, also where only some rows are noised: theirs would depend on the draw."""
        whole = embeds if rows is None else ctx.reference(self.dropout).embeds[name, "embedding"]
        return float(rms(whole, ctx.real(name, whole)))
