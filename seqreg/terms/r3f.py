"""R3F: the output should not change when the embeddings are moved a little at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from seqreg import diagnostics
from seqreg.context import Evaluation, Per, Where
from seqreg.divergences import Divergence
from seqreg.errors import BadInput
from seqreg.forward import Dropout, ExtraPass, Pass
from seqreg.noise import Noise, rms, sample, too_small
from seqreg.objective import Consistency
from seqreg.schedules import Weight
from seqreg.term import ConsistencyTerm, Cost, Hints, Passes


@dataclass(frozen=True, kw_only=True)
class R3F(ConsistencyTerm):
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
        layer: None adds the noise to the embeddings; a number to the input of that layer, `hidden_states[layer]` in
            transformers: only the layers from there on run again, and new dropout masks are drawn there alone. Cheaper,
            and another term: what lies below is not asked to be smooth. States have other sizes than embeddings: use
            relative=True
        inject: "scaled" adds the noise to what the stack consumes; "word" to the word embeddings before the model
            multiplies them by sqrt(D) (PEGASUS, mBART, Marian ...), which multiplies the noise too
        dropout: masks of the noised pass: "independent" of the clean pass, "shared" with it, or "off" in both
        divergence: "symmetric_kl" (the paper), "kl" of noised from clean, "reverse_kl", "js", or "mse" of raw outputs
        grad: the sides that learn: "both" (the paper's formula); "clean" leaves out the noised backward, the 2 forwards
            and 1 backward that the paper counts, and drops half of the gradient: where p and q are close, the two
            halves are equal on average under independent dropout, so that it is about that of half the weight;
            "noised" drops the other half
        per: averaged per "token", per "sequence" (summed over its tokens), or as "fairseq" does: `Evaluation.reduce`
        padding: also noise and count padded positions, as fairseq does
        example_fraction: a random share of the examples is noised, and counts for all: cheaper, unbiased, more variance
        token_fraction: likewise a random share of the tokens; saves the head's work alone
        unresolved: "error" or "warn" when the noise is below the resolution of the arithmetic
        preset: "fairseq" reproduces label_smoothed_cross_entropy_r3f, with its weight of 1

    Cost:
        1 extra forward, 1 extra backward; dropout="off" 2 and 2; grad="clean" saves the noised backward; layer=k the
        layers below k of either.

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
    layer: int | None = None
    inject: Literal["scaled", "word"] = "scaled"
    dropout: Dropout = "independent"
    divergence: Divergence = "symmetric_kl"
    grad: Literal["both", "clean", "noised"] = "both"
    per: Per = "token"
    padding: bool = False
    example_fraction: float = 1.0
    token_fraction: float = 1.0
    unresolved: Literal["error", "warn"] = "error"

    hints: ClassVar[Hints] = Hints(
        remedy="raise scale, such as scale=0.1 with relative=True, or give adapters lora_dropout=0.1",
        gentler="lower weight or scale",
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fairseq": {"weight": 1.0, "inject": "word", "per": "fairseq", "padding": True, "unresolved": "warn"},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale < 0:
            self.refuse("scale", "expected a number >= 0; the paper uses 1e-5")
        if self.scale == 0 and self.dropout != "independent":
            self.refuse("scale", "without noise and with one dropout mask the term is 0: leave it out")
        for setting in ("example_fraction", "token_fraction"):
            if not 0 < getattr(self, setting) <= 1:
                self.refuse(setting, "expected a share, more than 0 and at most 1")
        if self.layer is not None:
            self._check_layer(self.layer)
        if self.example_fraction < 1 and self.dropout == "shared":
            fix = "dropout masks are shared by all examples: use dropout='independent', or token_fraction="
            self.refuse("example_fraction", fix)

    def _check_layer(self, layer: int) -> None:
        if layer < 0:
            self.refuse("layer", "expected the number of a layer, from 0")
        if self.where == "both":
            self.refuse("layer", "noise is added in one stack: use where='encoder' or where='decoder'")
        if self.inject == "word":
            self.refuse("layer", "word embeddings are below all layers: use inject='scaled'")
        if self.example_fraction < 1:
            self.refuse("layer", "what lies below is of all examples: use token_fraction=, or example_fraction=1")

    @property
    def cost(self) -> Cost:
        forwards = 2 if self.dropout == "off" else 1
        if self.grad == "clean":
            return Cost(forwards, forwards - 1)
        return Cost(forwards, 1 if self.grad == "noised" else forwards)

    def declare(self, ctx: Evaluation) -> Passes:
        return Passes(self._noised(ctx, cache(partial(self._rows, ctx))))

    def _noised(self, ctx: Evaluation, rows: Callable[[], Tensor | None]) -> ExtraPass:
        return ExtraPass(
            {site: partial(self._noise, ctx, site, rows) for site in ctx.sites(self.where)},
            rows=rows,
            dropout=self.dropout,
            grad=self.grad != "clean",
            point="embedding" if self.layer is None else self.layer,
            after_clean=self.relative and self.example_fraction < 1,  # the RMS is that of all examples
        )

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Consistency:
        (noised,) = passes
        consistency = self._consistency(ctx.reference(self.dropout), noised)
        return replace(consistency, sample=self._sample(ctx, noised.rows))

    def _rows(self, ctx: Evaluation) -> Tensor | None:
        """The rows that are noised; None for all."""
        batch = ctx.forward.batch_size
        if self.example_fraction == 1:
            return None
        if batch is None:
            fix = "this model cannot be given some examples of a batch: use token_fraction=, or Every"
            self.refuse("example_fraction", fix)
        return torch.randperm(batch)[: max(1, round(self.example_fraction * batch))].sort().values.to(ctx.mask.device)

    def _sample(self, ctx: Evaluation, rows: Tensor | None) -> Tensor | None:
        """What makes up for the rows and tokens that were left out."""
        if rows is None and self.token_fraction == 1:
            return None
        kept = torch.ones(ctx.mask.shape, device=ctx.mask.device)
        if rows is not None:
            kept = torch.zeros_like(kept).index_fill(0, rows, len(kept) / len(rows))
        if self.token_fraction < 1:
            kept = kept * (torch.rand_like(kept) < self.token_fraction) / self.token_fraction
        return kept

    def _consistency(self, clean: Pass, noised: Pass) -> Consistency:
        held: dict[str, Literal["none", "first", "second"]] = {"both": "none", "noised": "first", "clean": "second"}
        return Consistency(clean, noised, self.divergence, held[self.grad], self.per, self.padding)

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """See `seqreg.diagnostics`."""
        clean = ctx.reference(self.dropout)
        shift = ctx.draw(self._noised(ctx, lambda: None))
        return {
            **diagnostics.size(ctx, clean, shift),
            **diagnostics.sources(ctx, clean, shift, self.dropout, lambda a, b: self._consistency(a, b).value(ctx)),
        }

    def _noise(
        self,
        ctx: Evaluation,
        name: str,
        drawn: Callable[[], Tensor | None],
        embeds: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        rows = drawn()
        site, mask = ctx.forward.sites[name], ctx.real(name, embeds, rows)
        absolute = site.scale if self.inject == "word" else 1.0  # what the model scales, it scales noise and RMS alike
        scale = self.scale * (self._size(ctx, name, embeds, rows) if self.relative else absolute)
        complaint = too_small(scale, embeds, mask, dtype) if self.scale else None
        if complaint and self.unresolved == "error":
            fix = f"scale=0.1 relative=True; in a recipe terms.{self.name}.scale=0.1 terms.{self.name}.relative=true"
            raise BadInput(f"{self.name}: {complaint}: {fix}")
        if complaint:
            ctx.notes[self.name] = complaint
        return sample(self.noise, embeds, scale, None if self.padding else mask)

    def _size(self, ctx: Evaluation, name: str, embeds: Tensor, rows: Tensor | None) -> float:
        """The RMS of the batch's embeddings, also where only some rows are noised: theirs would depend on the draw."""
        whole = embeds if rows is None else ctx.reference(self.dropout).embeds[name, "embedding"]
        return float(rms(whole, ctx.real(name, whole)))
