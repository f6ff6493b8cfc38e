"""The loss that the fused path computes, in plain PyTorch: all logits at once, gradients by autograd.

For every summand the loss has sum over positions of weight * value, where the value is

    base loss      (1 - e) NLL(label) + e mean over classes of NLL(class)     (smoothing="torch")
    consistency    divergence(softmax(first logits), softmax(second logits))

and logits = states @ head.T + bias. Positions of weight 0 do not count, whatever they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from seqreg.divergences import DIVERGENCES
from seqreg.forward import Pass
from seqreg.fused.loss import Summand
from seqreg.losses import Base
from seqreg.objective import BaseLoss, Consistency


def loss(summands: Sequence[Summand], labels: Tensor, base: Base) -> Tensor:
    total = torch.zeros(())
    for summand in summands:
        if isinstance(summand.part, BaseLoss):
            values = _base_loss(_logits(summand.part.view), labels, base)
        else:
            assert isinstance(summand.part, Consistency)
            values = _consistency(summand.part)
        assert summand.weight is not None
        total = total + (values.masked_fill(summand.weight == 0, 0.0) * summand.weight.to(values.dtype)).sum()
    return total


def _logits(view: Pass) -> Tensor:
    head = view.projection
    if head is None:
        return view.logits
    return head.states @ head.weight.t() + (0.0 if head.bias is None else head.bias)


def _base_loss(logits: Tensor, labels: Tensor, base: Base) -> Tensor:
    nll = -functional.log_softmax(logits, -1)  # [B, T, V]
    classes, e = nll.shape[-1], base.label_smoothing
    on_others = e / (classes if base.smoothing == "torch" else classes - 1)
    on_label = 1.0 - e + (on_others if base.smoothing == "torch" else 0.0)
    label = nll.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return on_label * label + on_others * (nll.sum(-1) - label)


def _consistency(part: Consistency) -> Tensor:
    first, second = _logits(part.first), _logits(part.second)
    if part.detach == "teachers":
        return DIVERGENCES["kl"](first.detach(), second) + DIVERGENCES["kl"](second.detach(), first)
    first = first.detach() if part.detach == "first" else first
    second = second.detach() if part.detach == "second" else second
    return DIVERGENCES[part.divergence](first, second)
