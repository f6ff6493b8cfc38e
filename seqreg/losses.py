"""The base losses, per position and never reduced: `Evaluation.reduce` does that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from seqreg.errors import BadInput

IGNORE = -100
Smoothing = Literal["torch", "fairseq"]
LossName = Literal["nll", "dft"]


@dataclass(frozen=True)
class Base:
    """How the base loss of a criterion is taken: see `seqreg.criterion.Criterion`."""

    label_smoothing: float = 0.0
    smoothing: Smoothing = "torch"
    per: Literal["token", "sequence"] = "token"
    loss: LossName = "nll"


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def label_smoothed_nll(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, smoothing: Smoothing = "torch"
) -> tuple[Tensor, Tensor]:
    """Label-smoothed and plain negative log-likelihood of every position.

    With e = label_smoothing and V classes the target distribution gives every class e/V and the rest to the label
    (`smoothing="torch"`, as `torch.nn.functional.cross_entropy`), or every *other* class e/(V-1) and 1-e to the
    label (`smoothing="fairseq"`).

    Args:
        logits: scores                                              # [..., V]
        labels: class ids; `IGNORE` gives 0                         # [...]

    Returns:
        (smoothed, nll), float32                                    # [...], [...]
    """
    if logits.shape[:-1] != labels.shape:
        raise BadInput(f"labels {list(labels.shape)} do not fit logits {list(logits.shape)}: one label a position")
    logp = torch.log_softmax(at_least_float32(logits), -1)
    ignored = labels == IGNORE
    nll = -logp.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1).masked_fill(ignored, 0.0)
    if label_smoothing == 0.0:
        return nll, nll
    own, spread = shares(logp.shape[-1], label_smoothing, smoothing)
    everything = -logp.sum(-1).masked_fill(ignored, 0.0)
    return own * nll + spread * everything, nll


def probability_weighted(nll: Tensor) -> Tensor:
    """DFT: p NLL, where p = exp(-NLL) is the probability of the label, held fixed: the gradient is that of -p.

    Args:
        nll: plain negative log-likelihood                          # [...]
    """
    return nll * torch.exp(-nll.detach())


def shares(size: int, label_smoothing: float, smoothing: Smoothing) -> tuple[float, float]:
    """What the label gets on top of every class, and what every class gets, of `size` classes. They add up to 1."""
    if label_smoothing == 0.0:
        return 1.0, 0.0
    spread = label_smoothing / (size if smoothing == "torch" else size - 1)
    return 1.0 - label_smoothing - (0.0 if smoothing == "torch" else spread), spread


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error of every row of a regression head: outputs [B, K], labels [B] or [B, K] -> [B]."""
    outputs = at_least_float32(outputs)
    if outputs.numel() != labels.numel():
        raise BadInput(f"labels {list(labels.shape)} do not fit outputs {list(outputs.shape)}: one number an output")
    return (outputs - labels.reshape(outputs.shape).to(outputs.dtype)).square().mean(-1)


def check_labels(labels: Tensor, size: int, fix: str) -> None:
    """Refuse class ids that no head of `size` classes can have produced; `fix` is for those that are too large."""
    bad = (labels != IGNORE) & ((labels < 0) | (labels >= size))
    if bad.any():
        where = bad.nonzero()[0].tolist()
        value = int(labels[tuple(where)])
        fix = f"padding must be {IGNORE}" if value < 0 else fix
        raise BadInput(f"labels{where} is {value}, but the head has classes 0..{size - 1}: {fix}")


def check_loss(loss: str, label_smoothing: float) -> None:
    if loss not in ("nll", "dft"):
        raise BadInput(f"loss={loss!r}: choose 'nll' or 'dft'", key="loss", value=loss, fix="choose 'nll' or 'dft'")
    if loss == "dft" and label_smoothing:
        raise BadInput(f"loss='dft' has no label smoothing: set label_smoothing={label_smoothing} to 0, or loss='nll'")


def check_smoothing(label_smoothing: float, smoothing: str) -> None:
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, (int, float)):
        raise BadInput(f"label_smoothing={label_smoothing!r}: expected a number in [0, 1)")
    if not 0.0 <= label_smoothing < 1.0:
        raise BadInput(f"label_smoothing={label_smoothing} is outside [0, 1): 0.1 is the usual value")
    if smoothing not in ("torch", "fairseq"):
        raise BadInput(f"smoothing={smoothing!r} is unknown: choose 'torch' (e/V) or 'fairseq' (e/(V-1))")
