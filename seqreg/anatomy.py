"""What a term is really doing: numbers for `Term.anatomy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from seqreg.context import Context, Dropout, Shift, View

Numbers = dict[str, float]


def shares(ctx: Context, shift: Shift, dropout: Dropout, value: Callable[[View], Tensor]) -> Numbers:
    """Where the value of a perturbation term comes from, as shares of that value.

    noise_share: the same perturbation with the dropout masks of the clean pass; dropout_share: no perturbation, new
    masks; rounding_share: the part of the noise's value that does not shrink with its square when the perturbation is
    halved, which for a small perturbation is the error of the arithmetic. The shares need not add up to 1.
    """
    same: Dropout = "off" if dropout == "off" else "shared"
    half = replace(shift, delta={name: delta / 2 for name, delta in shift.delta.items() if isinstance(delta, Tensor)})
    total = float(value(ctx.forward(shift, dropout=dropout)))
    noise = float(value(ctx.forward(shift, dropout=same)))
    less = float(value(ctx.forward(half, dropout=same)))
    masks = float(value(ctx.forward(dropout=dropout))) if dropout == "independent" else 0.0
    rounding = max(noise - 4 / 3 * (noise - less), 0.0)
    return {
        "noise_share": _ratio(noise - min(rounding, noise), total),
        "dropout_share": _ratio(masks, total),
        "rounding_share": _ratio(min(rounding, noise), total),
    }


def size(ctx: Context, clean: View, shift: Shift) -> Numbers:
    """The perturbation against what it perturbs, as a ratio of RMS over real tokens."""
    ratios = []
    for name, delta in shift.delta.items():
        embeds, mask = clean.embeds[name, shift.at].detach(), ctx.forward.sites[name].mask
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


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
