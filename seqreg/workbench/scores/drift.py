"""Drift: how far a trained model is from the one that it started from, in outputs, weights and representations."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seqreg.context import Context
from seqreg.divergences import kl
from seqreg.engines.shards import full, reshard
from seqreg.forward import Pass
from seqreg.integrations.hf import context
from seqreg.integrations.hf.reference import adapted
from seqreg.smoothness import linear_cka
from seqreg.spectral_norm import folded_state
from seqreg.workbench.data.adapters import merged_state

ELEMENTS = 2**22
"""Numbers of a chunk of logits or weights: 16 megabytes in float32."""
TOKENS = 1000
"""Tokens, about, that CKA is computed from: its kernels are [tokens, tokens]."""
FEWEST = 4
"""Tokens below which there is no CKA."""


@torch.no_grad()
def measure(
    trained: nn.Module,
    start: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    examples: int,
    new: Collection[str] = (),
) -> dict[str, Any]:
    """All numbers of drift; both models on one device, dropout off, float32 without autocast.

    KL is a mean over all labelled positions of the batches (over examples, where a class is predicted), in nats, each
    after the tokens of the reference before it. Where the starting model had no head of its own, the KL is that of its
    body under the trained head, and its name begins with `body_`. A regression has no KL.

    Args:
        trained, start: `start` has plain weights, and loses its own values of `new`
        batches: with labels, of the size that the models can take at a time
        examples: in all batches together
        new: names of the parameters that were drawn when the run began, not pretrained: a new head
    """
    distance, compared = weight_distance(trained, start, new)
    state = _state(trained)
    for name, parameter in start.named_parameters():
        if name in new:
            parameter.copy_(full(state[name]))
    sums, positions, pairs, stack = torch.zeros(2, dtype=torch.float64), 0, list[tuple[Tensor, Tensor]](), ""
    for batch in batches:
        ctx, other = context(trained, batch), context(start, batch)
        views = _view(ctx), _view(other)
        if ctx.kind != "regression":
            sums += _kl_sums(*views, ctx.mask)
            positions += int(ctx.mask.sum())
        stack = next(iter(views[0].hidden))
        pairs.append(_states(ctx, *views, stack, max(1, TOKENS // examples)))
    numbers: dict[str, Any] = {"examples": examples, "positions": positions}
    if positions:
        prefix = "body_" if new else ""
        names = (f"{prefix}kl_trained_start", f"{prefix}kl_start_trained")
        numbers |= dict(zip(names, (sums / positions).tolist(), strict=True))
    first, second = (torch.cat(states) for states in zip(*pairs, strict=True))
    numbers |= {"weight_distance": distance, "parameters": compared, "new_parameters": sorted(new)}
    return numbers | {
        "cka": linear_cka(first, second) if len(first) >= FEWEST else None, "cka_of": stack, "cka_tokens": len(first)
    }  # fmt: skip


@torch.no_grad()
def mean_states(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> Tensor:
    """The last states of the first stack, the encoder where there is one, averaged over real tokens: [examples, D]."""
    means = []
    for batch in batches:
        ctx = context(model, batch)
        stack, layers = next(iter(_view(ctx).hidden.items()))
        states, mask = layers[-1].float(), ctx.token_mask(stack)
        weights = torch.ones(states.shape[:2], device=states.device) if mask is None else mask.to(states)
        means.append(((states * weights.unsqueeze(-1)).sum(1) / weights.sum(1, keepdim=True).clamp_min(1)).cpu())
    return torch.cat(means)


def _view(ctx: Context) -> Pass:
    """A pass without dropout and autocast that moves no generator and no power iteration."""
    with ctx.forward.observed() as forward, forward.full_precision():
        return forward(dropout="off", grad=False, hidden=True)


def _kl_sums(trained: Pass, start: Pass, mask: Tensor) -> Tensor:
    """KL(trained || start) and KL(start || trained), summed over the positions of a mask, in float64: [2].

    Logits are computed from the states of a few positions at a time: those of a whole batch are never there.
    """
    totals = torch.zeros(2, dtype=torch.float64)
    for ours, theirs in zip(logits_at(trained, mask), logits_at(start, mask), strict=True):
        both = torch.stack([kl(ours, theirs), kl(theirs, ours)])
        totals += both.double().sum(-1).cpu()
    return totals


def logits_at(view: Pass, mask: Tensor) -> Iterable[Tensor]:
    """The logits [n, V] of the positions of a mask, a chunk at a time."""
    projection = view.deferred
    if projection is None:
        yield from torch.split(view.logits[mask], _rows(view.logits.shape[-1]))
        return
    for states in torch.split(projection.states[mask], _rows(len(projection.weight))):
        yield replace(projection, states=states, requires_grad=False).logits()


def _rows(width: int) -> int:
    return max(1, ELEMENTS // width)


def _states(ctx: Context, trained: Pass, start: Pass, stack: str, most: int) -> tuple[Tensor, Tensor]:
    """The last states of at most so many real tokens of every example, evenly spaced, of both models: [n, D]."""
    ours, theirs = trained.hidden[stack][-1], start.hidden[stack][-1]
    mask = ctx.token_mask(stack)
    chosen = torch.zeros(ours.shape[:2], dtype=torch.bool, device=ours.device)
    for row in range(len(ours)):
        places = torch.arange(ours.shape[1]) if mask is None else mask[row].nonzero()[:, 0].cpu()
        step = max(1, math.ceil(len(places) / most))
        chosen[row, places[::step].to(ours.device)] = True
    return ours[chosen].float().cpu(), theirs[chosen].float().cpu()


def weight_distance(trained: nn.Module, start: nn.Module, left_out: Collection[str] = ()) -> tuple[float | None, int]:
    """|w - w0| / |w0| over all parameters but those left out, and how many numbers these are; float64.

    Tied weights count once, a weight that is normalised (R4F) as its value, and one with an adapter as their sum. None
    where w0 is 0.
    """
    state, moved, size, count = _state(trained), 0.0, 0.0, 0
    for name, before in start.named_parameters():
        if name in left_out:
            continue
        after, first = (torch.split(full(values.detach()).flatten(), ELEMENTS) for values in (state[name], before))
        for new, old in zip(after, first, strict=True):
            moved += float((new.double() - old.double()).square().sum())
            size += float(old.double().square().sum())
        count += before.numel()
    return (math.sqrt(moved / size) if size else None), count


def _state(model: nn.Module) -> Mapping[str, Tensor]:
    """The weights of a model as it computes: a normalised head as its value, adapters taken in; shards as they are."""
    reshard(model)
    return folded_state(model) if adapted(model) is None else merged_state(model)


def retention(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]], score: str) -> Any:
    """What a model knew of other tasks before training, and what it knows after it: loss and score of every task.

    Args:
        before, after: numbers by task, with the keys "loss" and "score"; by corpus, with "perplexity" instead
        score: what the score is called
    """
    return {
        task: {
            name: {"before": numbers[key], "after": after[task][key]}
            for key, name in (("loss", "loss"), ("score", score), ("perplexity", "perplexity"))
            if key in numbers and (key != "perplexity" or "score" not in numbers)
        }
        for task, numbers in before.items()
        if task in after
    }
