"""How far two outputs are apart: per position, float32, never reduced.

Each function takes two tensors of logits [..., V] and gives [...]. They are written so that every summand is
non-negative and of second order in the difference, because the regularizers live where the two sides nearly agree:
summing `p * (log p - log q)` there loses the answer by cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from seqreg.losses import at_least_float32

Divergence = Literal["symmetric_kl", "kl", "reverse_kl", "js", "mse", "symmetric_ce", "stable_kl"]


def _log_probabilities(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    return torch.log_softmax(at_least_float32(first), -1), torch.log_softmax(at_least_float32(second), -1)


def kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(p || q) = sum p (log p - log q) for p = softmax(first), q = softmax(second).

    The summand is p d - p + q with d = log p - log q, which adds nothing to the sum and cannot cancel; near d = 0 it
    is p (expm1(-d) + d).
    """
    return _kl(*_log_probabilities(first, second))


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    return kl_summand(logp.exp(), logq.exp(), logp - logq).sum(-1)


def kl_summand(p: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """What KL(p || q) adds up over the classes, of d = log p - log q."""
    near = d.clamp(-1.0, 1.0)
    return torch.where(d.abs() < 1.0, p * (torch.expm1(-near) + near), p * d - p + q)


def reverse_kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(q || p)."""
    return kl(second, first)


def symmetric_kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(p || q) + KL(q || p) = sum (p - q)(log p - log q)."""
    logp, logq = _log_probabilities(first, second)
    return ((logp.exp() - logq.exp()) * (logp - logq)).sum(-1)


def js(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon: (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2.

    With d = log p - log q and t = tanh(d/2) = (p - q)/(p + q) the summand is m (t d + log(1 - t^2)) / 2.
    """
    logp, logq = _log_probabilities(first, second)
    d = logp - logq
    near, t = d.clamp(-1.0, 1.0), torch.tanh(d / 2)
    small = t * d + torch.log1p(-torch.tanh(near / 2).square())
    size = d.abs()
    large = t * d - size - 2 * torch.log1p(torch.exp(-size)) + 2 * math.log(2)
    m = (logp.exp() + logq.exp()) / 2
    return (m * torch.where(size < 1.0, small, large) / 2).sum(-1)


def js_of(logits: Sequence[Tensor]) -> Tensor:
    """Jensen-Shannon of any number of distributions: the mean of KL(p_k || m), m the mean of all p_k."""
    logs = torch.stack([torch.log_softmax(at_least_float32(one), -1) for one in logits])
    middle = torch.logsumexp(logs, 0) - math.log(len(logits))
    return _kl(logs, middle.expand_as(logs)).mean(0)


def mse(first: Tensor, second: Tensor) -> Tensor:
    """Mean squared difference of the raw outputs; the only divergence a regression head has."""
    return (at_least_float32(first) - at_least_float32(second)).square().mean(-1)


def symmetric_ce(first: Tensor, second: Tensor) -> Tensor:
    """DeBERTa's "symmetric-kl": two cross-entropies, each with its teacher held fixed.

    Its gradient is that of the symmetric KL with teachers held fixed; its value has the entropies added, so that it is
    not 0 where the two sides agree.
    """
    logp, logq = _log_probabilities(first, second)
    return -(logq.detach().exp() * logp + logp.detach().exp() * logq).sum(-1)


def stable_kl(first: Tensor, second: Tensor) -> Tensor:
    """mt-dnn's inner loss: 2 sum q (logit q - logit p), the log-ratio held fixed. Not a KL; gradient to q alone."""
    logp, logq = _log_probabilities(first, second)
    odds = [-((1 / (log.detach().exp() + 1e-6)) - 1 + 1e-6).log() for log in (logp, logq)]
    return 2 * (logq.exp() * (odds[1] - odds[0])).sum(-1)


DIVERGENCES: dict[Divergence, Callable[[Tensor, Tensor], Tensor]] = {
    "symmetric_kl": symmetric_kl,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "mse": mse,
    "symmetric_ce": symmetric_ce,
    "stable_kl": stable_kl,
}
