"""Whether probabilities mean what they say: calibration errors, proper scores, temperature, risk and coverage.

Everything takes one number an example (or a token) and works in float64. Logits are only ever seen a chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from seqreg.errors import BadInput

Array = NDArray[Any]
Equal = Literal["width", "mass"]
Chunks = Callable[[], Iterable[tuple[ArrayLike, ArrayLike]]]
"""Logits [n, V] and labels [n], some examples at a time; may be asked for again."""

COLDEST, HOTTEST = 0.01, 100.0
"""Temperatures are looked for in between."""


@dataclass(frozen=True)
class Outcomes:
    """What a model said about every example, and what was true.

    Args:
        choice: the class that it gave the highest probability      # [n]
        confidence: that probability                                # [n]
        correct: whether that was the label                         # [n]
        nll: minus the log-probability of the label                 # [n]
        brier: the squared distance of its probabilities from the label, summed over classes: 0 to 2    # [n]
    """

    choice: Array
    confidence: Array
    correct: Array
    nll: Array
    brier: Array

    @classmethod
    def of(cls, logits: ArrayLike, labels: ArrayLike, temperature: float = 1.0) -> Outcomes:
        """From logits [n, V] and class ids [n].

        >>> one = Outcomes.of([[0.0, 0.0, 0.0]], [1])
        >>> one.confidence.round(3).tolist(), one.correct.tolist(), one.brier.round(3).tolist()
        ([0.333], [False], [0.667])
        """
        scores, truth = _checked(logits, labels)
        rows = np.arange(len(truth))
        scores = scores / temperature
        scores = scores - scores.max(-1, keepdims=True)
        logp = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        shares, own = np.exp(logp), logp[rows, truth]
        brier = np.square(shares).sum(-1) - 2 * np.exp(own) + 1
        choice = scores.argmax(-1)
        return cls(choice, shares.max(-1), choice == truth, -own, brier)

    @classmethod
    def joined(cls, parts: Sequence[Outcomes]) -> Outcomes:
        return cls(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)))

    def __len__(self) -> int:
        return len(self.correct)

    def __getitem__(self, chosen: Array) -> Outcomes:
        return Outcomes(*(getattr(self, one.name)[chosen] for one in fields(self)))

    def summary(self, bins: int) -> dict[str, float]:
        """All numbers; `overconfidence` is mean confidence minus accuracy, below 0 for a model that is too modest."""
        confidence, accuracy = float(self.confidence.mean()), float(self.correct.mean())
        return {
            "count": len(self), "accuracy": accuracy, "confidence": confidence,
            "overconfidence": confidence - accuracy,
            "ece": binned(self.confidence, self.correct, bins).error,
            "adaptive_ece": binned(self.confidence, self.correct, bins, "mass").error,
            "brier": float(self.brier.mean()), "nll": float(self.nll.mean()),
        }  # fmt: skip


def _checked(logits: ArrayLike, labels: ArrayLike) -> tuple[Array, Array]:
    scores, truth = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if scores.ndim != 2 or truth.shape != scores.shape[:1]:
        raise BadInput(f"logits {scores.shape}, labels {truth.shape}: expected [n, classes] and [n]")
    if not np.isfinite(scores.max(-1, initial=0.0)).all() or np.isnan(scores).any():
        raise BadInput("some logits are not finite numbers: has training diverged?")
    truth = truth.astype(np.int64)
    if not np.isfinite(scores[np.arange(len(truth)), truth]).all():
        raise BadInput("the logit of a label is minus infinity: the model calls it impossible, and its NLL is infinite")
    return scores, truth


@dataclass(frozen=True)
class Bins:
    """Examples of like confidence, those bins that have any.

    Args:
        low, high: the confidences that a bin is for                # [bins]
        count: its examples                                         # [bins]
        confidence, accuracy: their means                           # [bins]
    """

    low: Array
    high: Array
    count: Array
    confidence: Array
    accuracy: Array

    @property
    def error(self) -> float:
        """The expected calibration error: the mean over examples of |accuracy - confidence| of their bin."""
        return float((self.count * np.abs(self.accuracy - self.confidence)).sum() / self.count.sum())


def binned(confidence: ArrayLike, correct: ArrayLike, bins: int = 15, equal: Equal = "width") -> Bins:
    """Sort examples into bins by confidence.

    "width": [0, 1/bins), [1/bins, 2/bins) ... and 1 in the last (torchmetrics gives it a bin of its own). "mass": as
    many examples in each as in the others, but equal confidences stay together, so that their order does not matter.

    >>> binned([0.5, 0.75, 0.8, 0.9], [0, 1, 1, 1], bins=2, equal="mass").accuracy.tolist()
    [0.5, 1.0]
    """
    sure, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if sure.ndim != 1 or sure.shape != right.shape or not len(sure):
        raise BadInput(f"{sure.shape} confidences, {right.shape} outcomes: expected as many, at least one")
    if not ((sure >= 0) & (sure <= 1 + 1e-9)).all():
        raise BadInput("confidences are probabilities: expected numbers from 0 to 1")
    if bins < 1:
        raise BadInput(f"bins={bins}: expected a whole number from 1")
    edges = np.arange(bins + 1) / bins
    if equal == "width":
        place = np.clip(np.searchsorted(edges, sure, side="right") - 1, 0, bins - 1)
    else:
        place = np.searchsorted(np.sort(sure), sure, side="left") * bins // len(sure)
    count = np.bincount(place, minlength=bins)
    kept = count > 0
    low, high = edges[:-1], edges[1:]
    if equal == "mass":
        low, high = np.ones(bins), np.zeros(bins)
        np.minimum.at(low, place, sure)
        np.maximum.at(high, place, sure)
    means = [np.bincount(place, values, bins)[kept] / count[kept] for values in (sure, right)]
    return Bins(low[kept], high[kept], count[kept], *means)


def chance_error(
    confidence: ArrayLike, bins: int = 15, equal: Equal = "width", *, resamples: int = 200, seed: int = 0
) -> tuple[float, float]:
    """The ECE that a perfectly calibrated model would show on so few examples: its mean and its 95th percentile.

    Outcomes are drawn from the confidences themselves. An ECE below the second number is no evidence of anything.
    """
    sure, rng = np.asarray(confidence, dtype=np.float64), np.random.default_rng(seed)
    drawn = [binned(sure, rng.random(len(sure)) < sure, bins, equal).error for _ in range(resamples)]
    return float(np.mean(drawn)), float(np.quantile(drawn, 0.95))


@dataclass(frozen=True)
class Temperature:
    """What logits are best divided by, and the mean NLL on the data that it was fitted to, before and after."""

    value: float
    before: float
    after: float

    @property
    def at_end(self) -> bool:
        """Whether the best one lies outside the range that was searched: the data cannot tell it."""
        return not COLDEST * (1 + 1e-6) < self.value < HOTTEST * (1 - 1e-6)


def fit_temperature(chunks: Chunks) -> Temperature:
    """The temperature with the lowest mean NLL, which is convex in its inverse."""

    def nll(log_inverse: float) -> float:
        total, count, inverse = 0.0, 0, math.exp(log_inverse)
        for logits, labels in chunks():
            scores, truth = _checked(logits, labels)
            scores = scores * inverse
            total += float((logsumexp(scores, axis=-1) - scores[np.arange(len(truth)), truth]).sum())
            count += len(truth)
        if not count:
            raise BadInput("a temperature needs at least one example")
        return total / count

    before, ends = nll(0.0), (-math.log(HOTTEST), -math.log(COLDEST))
    best = minimize_scalar(nll, bounds=ends, method="bounded", options={"xatol": 1e-7})
    candidates = [(before, 0.0), (float(best.fun), float(best.x)), *((nll(end), end) for end in ends)]
    after, log_inverse = min(candidates)
    return Temperature(math.exp(-log_inverse), before, after)


@dataclass(frozen=True)
class Coverage:
    """Risk if a model only answers where it is surest.

    Args:
        coverage: shares of the examples that are answered          # [n]
        risk: the mean risk of those                                # [n]
        area: the mean of `risk` over all coverages; lower is better
        random: the area of a confidence that knows nothing: the mean risk
        best: the area of one that knows the risks
    """

    coverage: Array
    risk: Array
    area: float
    random: float
    best: float


def risk_coverage(confidence: ArrayLike, risk: ArrayLike) -> Coverage:
    """Risk and coverage, surest first; examples of equal confidence count as their mean, in whatever order they come.

    >>> risk_coverage([0.9, 0.8, 0.7], [0.0, 1.0, 1.0]).risk.round(3).tolist()
    [0.0, 0.5, 0.667]
    """
    sure, risks = np.asarray(confidence, dtype=np.float64), np.asarray(risk, dtype=np.float64)
    if sure.ndim != 1 or sure.shape != risks.shape or not len(sure):
        raise BadInput(f"{sure.shape} confidences, {risks.shape} risks: expected as many, at least one")
    _, group, count = np.unique(-sure, return_inverse=True, return_counts=True)
    shared = (np.bincount(group, risks) / count)[np.sort(group)]
    taken = np.arange(1, len(risks) + 1)
    curve, ideal = np.cumsum(shared) / taken, np.cumsum(np.sort(risks)) / taken
    return Coverage(taken / len(risks), curve, float(curve.mean()), float(risks.mean()), float(ideal.mean()))
