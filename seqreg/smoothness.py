"""How smooth and how rich a model's representations are: estimates for terms and for monitors.

All on a `Context`, so for any model; monitors run off the training path and change no result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqreg.context import Context, Evaluation
from seqreg.errors import BadInput
from seqreg.forward import Pass, Perturbation
from seqreg.fused.head import Projection
from seqreg.fused.squared_norm import squared_norm
from seqreg.losses import Base, at_least_float32
from seqreg.noise import rms, sample
from seqreg.objective import BaseLoss

Layers = Literal["all", "encoder", "decoder", "logits"]
States = dict[str, tuple[Tensor, Tensor | None]]
"""Outputs by layer: values [B, S, D] or [B, C], and the mask of the positions that count."""
Norms = dict[str, tuple[Tensor, Tensor | None]]
"""Squared norms of the Jacobian and, where asked for, the Hessian of every layer: means over rows."""

POINT = 1e-12
"""Variance over mean square below which representations in float32 are one point and rounding."""


def states(ctx: Context, view: Pass, layers: Layers = "all", *, before_head: bool = False) -> States:
    """The outputs of the chosen layers.

    Args:
        before_head: in place of logits what they would be computed from, where a language-model head does so
    """
    layer_outputs: States = {}
    for stack, outputs in view.hidden.items():
        if layers in ("all", stack):
            mask = ctx.token_mask(stack)
            layer_outputs |= {f"{stack}.{i}": (output, mask) for i, output in enumerate(outputs, start=1)}
    if layers in ("all", "logits"):
        projection = view.deferred if before_head else None
        output = view.logits if projection is None else projection.states
        layer_outputs["logits"] = (output, ctx.mask if output.dim() == 3 else None)
    if not layer_outputs:
        raise BadInput(f"layers={layers!r}: this model has {' and '.join(view.hidden)}")
    return {name: (at_least_float32(values), mask) for name, (values, mask) in layer_outputs.items()}


def masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """0 where nothing counts; what a model appends to its input does not count."""
    if mask is None or values.dim() == 2:
        return values
    return values * pad(mask, (0, values.shape[1] - mask.shape[1])).unsqueeze(-1)


def differences(
    ctx: Evaluation,
    *,
    epsilon: float = 0.01,
    unit: float | None = None,
    hessian: bool = False,
    layers: Layers = "all",
    name: str = "smoothness",
) -> Norms:
    """|J|^2 of every layer with respect to the input embeddings, and rms(x)^2 |H|^2, by finite differences.

    One Gaussian direction v gives |(f(x + ev) - f(x)) / e|^2; with a second one, w, the mixed second difference gives
    the Hessian. (The symmetric one, H[v, v], estimates another number: 2 |H|^2 and the square of its trace.) Every pass
    replays the dropout masks of the clean one, without which the difference is of dropout; under autocast all passes
    are made in float32.

    Args:
        epsilon: length of the difference, as a share of `unit`
        unit: rms(x); that of this batch by default
    """
    with _exact(ctx, name) as clean:
        site = ctx.sites("input")[0]
        embeds = clean.embeds[site, "embedding"]
        mask = ctx.real(site, embeds)
        unit = unit or float(rms(embeds, mask)) or 1.0
        size = unit * epsilon

        head = clean.deferred if ctx.fused else None

        def of(view: Pass) -> States:
            return states(ctx, view, layers, before_head=head is not None)

        def at(delta: Tensor) -> States:
            return of(ctx.forward(Perturbation({site: delta}), dropout="shared", hidden=True))

        v = sample("normal", embeds, 1.0, mask)
        w = sample("normal", embeds, 1.0, mask) if hessian else None
        base, along = of(clean), at(size * v)
        across, both = (None, None) if w is None else (at(size * w), at(size * (v + w)))
        norms: Norms = {}
        for layer, (f, layer_mask) in base.items():
            before_head = head if layer == "logits" else None
            slope = _rows(ctx, (along[layer][0] - f) / size, layer_mask, before_head)
            bend = None
            if across is not None and both is not None:
                second = ((both[layer][0] - along[layer][0]) - (across[layer][0] - f)) / size**2
                bend = _rows(ctx, second, layer_mask, before_head) * unit**2
            norms[layer] = (slope, bend)
        return norms


def source_gap(ctx: Evaluation) -> float | None:
    """How much the loss grows, without dropout, when every row reads another row's source; None where undefined.

    A seq2seq model that ignores its source has a gap of 0.
    """
    swapped = ctx.forward.other_source()
    if swapped is None or not ctx.labelled:
        return None
    straight = ctx.forward(dropout="off", grad=False)
    return float(BaseLoss(swapped).value(ctx) - BaseLoss(straight).value(ctx))


@contextlib.contextmanager
def _exact(ctx: Evaluation, name: str) -> Iterator[Pass]:
    """The clean view in float32 arithmetic, and the same arithmetic for the passes inside."""
    if not ctx.full_precision_weights:
        raise BadInput(
            f"{name}: differences are lost in {ctx.weight_dtype}: keep the weights in float32 and use autocast"
        )
    if ctx.clean.dtype in (None, ctx.weight_dtype):
        yield ctx.clean if ctx.clean.hidden else ctx.forward(dropout="shared", hidden=True)
    else:
        with ctx.forward.full_precision():
            yield ctx.forward(dropout="shared", hidden=True)


def _rows(ctx: Evaluation, values: Tensor, mask: Tensor | None, head: Projection | None) -> Tensor:
    """The mean over rows of the squares of what counts; of the logits that a head would make of it."""
    if head is not None:
        return squared_norm(values[ctx.mask], head.weight, ctx.weights("sequence")[ctx.mask], head.gather)
    squares = masked(values, mask).square()
    return ctx.reduce_rows(squares.reshape(len(squares), -1).sum(-1))


def tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """The states of the real tokens, one per row: [N, D]."""
    if values.dim() == 2 or mask is None:
        return values.reshape(-1, values.shape[-1])
    return values[pad(mask, (0, values.shape[1] - mask.shape[1]))]


def linear_cka(first: Tensor, second: Tensor) -> float:
    """Linear centred kernel alignment of two sets of representations of the same tokens, debiased: [N, D] and [N, E].

    1 for representations that are equal up to rotation and scale, 0 where one of them has collapsed to a point. The
    HSIC estimates leave out the diagonal, or any two wide representations of few tokens would look alike.
    """
    if len(first) < 4:
        raise BadInput(f"{len(first)} tokens are too few to compare representations: at least 4")
    sizes = [x.double().square().mean() for x in (first, second)]
    centred = [x.double() - x.double().mean(0) for x in (first, second)]
    if any(x.square().mean() <= POINT * size for x, size in zip(centred, sizes, strict=True)):
        return 0.0
    a, b = (_without_diagonal(x) for x in centred)
    return float(_hsic(a, b) / (_hsic(a, a) * _hsic(b, b)).clamp_min(1e-300).sqrt())


def _without_diagonal(x: Tensor) -> Tensor:
    kernel = x @ x.t()
    return kernel - torch.diag(kernel.diagonal())


def _hsic(a: Tensor, b: Tensor) -> Tensor:
    n = len(a)
    whole = (a * b).sum() + a.sum() * b.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (a.sum(0) * b.sum(0)).sum()
    return whole / (n * (n - 3))


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of the normalised singular values of centred representations [N, D]: 1 to min(N, D).

    1 for representations that have collapsed to a point: what rounding leaves of their differences has any rank.
    """
    size, values = values.double().square().mean(), values.double() - values.double().mean(0)
    if values.square().mean() <= POINT * size:
        return 1.0
    singular = torch.linalg.svdvals(values)
    share = singular / singular.sum().clamp_min(1e-300)
    return float(torch.exp(-(share * share.clamp_min(1e-300).log()).sum()))


@torch.no_grad()
def observe(
    ctx: Context, reference: Mapping[str, Tensor] | None = None, *, base: Base | None = None
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Jacobian norm, effective rank and, against a `reference`, CKA of every layer, and this model's own reference.

    Where it is said how the `base` loss is taken, for seq2seq models also `source_gap`. Weights in lower precision have
    no Jacobian by differences.
    """
    numbers: dict[str, float] = {}
    with ctx.observed() as observed:
        evaluation = Evaluation(observed, base, hidden=True)
        representations = {
            name: tokens(values, mask).cpu()
            for name, (values, mask) in states(evaluation, evaluation.clean, before_head=True).items()
        }
        if ctx.full_precision_weights:
            numbers = {f"jacobian/{name}": float(slope) for name, (slope, _) in differences(evaluation).items()}
        gap = None if base is None else source_gap(evaluation)
        if gap is not None:
            numbers["source_gap"] = gap
    for name, values in representations.items():
        if name != "logits":
            numbers[f"rank/{name}"] = effective_rank(values)
            if reference is not None and name in reference:
                numbers[f"cka/{name}"] = linear_cka(reference[name], values)
    return numbers, representations
