"""What a term is really doing: numbers for `Term.diagnostics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from seqreg.context import Evaluation
from seqreg.forward import Dropout, Pass, Perturbation

Numbers = dict[str, float]


def sources(
    ctx: Evaluation, clean: Pass, shift: Perturbation, dropout: Dropout, value: Callable[[Pass, Pass], Tensor]
) -> Numbers:
    """Where the value of a perturbation term comes from: the value of one cause alone, over that of all together.

    noise_over_value: the same perturbation with the dropout masks of the clean pass, in float32; dropout_over_value: no
    perturbation, new masks; rounding_over_value: what lower precision adds to the noise's value. Each is a ratio of two
    draws, no share: it can be above 1, and they need not add up to 1. A model whose own weights are in lower precision
    has no float32 pass to compare with, and no rounding_over_value.
    """
    same: Dropout = "off" if dropout == "off" else "shared"
    forward, new_masks = ctx.forward, dropout == "independent"
    nothing = float(value(clean, clean))  # not 0 for a divergence that contains entropies
    total = float(value(clean, forward(shift, dropout=dropout))) - nothing
    noise = exact = float(value(clean, forward(shift, dropout=same))) - nothing
    masks = float(value(clean, forward(_without_noise(shift), dropout=dropout))) - nothing if new_masks else 0.0
    numbers = {"dropout_over_value": _ratio(masks, total)}
    if ctx.full_precision_weights:
        if clean.dtype not in (None, ctx.weight_dtype):
            with forward.full_precision():
                base = forward(dropout=same)
                exact = float(value(base, forward(shift, dropout=same))) - float(value(base, base))
        numbers["rounding_over_value"] = _ratio(abs(noise - exact), total)
    return {"noise_over_value": _ratio(exact, total), **numbers}


def _without_noise(shift: Perturbation) -> Perturbation | None:
    """A pass that begins where this perturbation is added, and adds nothing."""
    return replace(shift, delta=dict.fromkeys(shift.delta, torch.zeros_like)) if isinstance(shift.point, int) else None


def size(ctx: Evaluation, clean: Pass, shift: Perturbation) -> Numbers:
    """The perturbation against what it perturbs, as a ratio of RMS over real tokens."""
    ratios = []
    for name, delta in shift.delta.items():
        embeds, mask = clean.embeds[name, shift.point].detach(), ctx.token_mask(name)
        moved = delta(embeds) if callable(delta) else delta
        if mask is not None:
            embeds, moved = embeds[mask], moved[mask]
        ratios.append(_ratio(float(moved.float().square().mean().sqrt()), float(embeds.float().square().mean().sqrt())))
    return {"delta_over_embedding": max(ratios)}


def cosine(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Of two perturbations, over all their sites."""
    a = torch.cat([first[name].flatten().double() for name in first])
    b = torch.cat([second[name].flatten().double() for name in first])
    return _ratio(float(a @ b), float(a.norm() * b.norm()))


def _ratio(part: float, total: float) -> float:
    return part / total if total else 0.0
