"""The scores of GLUE by their official definition: fractions, from class ids or numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqreg.errors import BadInput

Array = NDArray[Any]


def accuracy(predictions: Array, labels: Array) -> float:
    """Share of equal class ids."""
    return float((predictions == labels).mean())


def f1(predictions: Array, labels: Array) -> float:
    """F1 of class 1, as MRPC and QQP report it; 0 where there is neither such a label nor such a prediction."""
    hits = int(((predictions == 1) & (labels == 1)).sum())
    wrong = int(((predictions == 1) != (labels == 1)).sum())
    return 2 * hits / (2 * hits + wrong) if hits + wrong else 0.0


def matthews(predictions: Array, labels: Array) -> float:
    """Matthews' correlation, also of more than two classes; 0 where one side has a single class."""
    classes = np.union1d(predictions, labels)
    truth = labels[:, None] == classes  # [rows, classes]
    guess = predictions[:, None] == classes
    rows = len(labels)
    right = int((truth & guess).sum())
    truths, guesses = truth.sum(0).astype(np.float64), guess.sum(0).astype(np.float64)
    above = right * rows - float(truths @ guesses)
    below = float((rows**2 - guesses @ guesses) * (rows**2 - truths @ truths))
    return above / below**0.5 if below > 0 else 0.0


def pearson(predictions: Array, labels: Array) -> float:
    """Pearson's correlation; 0 where one side is constant."""
    a, b = predictions - predictions.mean(), labels - labels.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size else 0.0


def spearman(predictions: Array, labels: Array) -> float:
    """Pearson's correlation of ranks; equal values share the mean of their ranks."""
    return pearson(_ranks(predictions), _ranks(labels))


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = (ends - (counts - 1) / 2)[inverse]
    return ranks


METRICS: Mapping[str, Callable[[Array, Array], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def classification(
    names: Sequence[str],
    predictions: Any,
    labels: Any,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Scores by name, and their bootstrap intervals over examples.

    >>> classification(["accuracy", "f1"], [1, 0, 1, 1], [1, 0, 0, 1], resamples=0)[0]
    {'accuracy': 0.75, 'f1': 0.8}
    """
    for name in names:
        if name not in METRICS:
            raise BadInput(f"metric {name!r}: choose from {', '.join(METRICS)}")
    predicted, true = np.asarray(predictions), np.asarray(labels)
    if predicted.shape != true.shape or predicted.ndim != 1 or not len(true):
        raise BadInput(f"{predicted.shape} predictions, {true.shape} labels: expected as many, at least one")
    if not np.isfinite(predicted).all():
        raise BadInput("some predictions are not finite numbers: has training diverged?")
    scores = {name: METRICS[name](predicted, true) for name in names}
    dice = np.random.default_rng(seed)
    drawn: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(resamples):
        chosen = dice.integers(len(true), size=len(true))
        for name in names:
            drawn[name].append(METRICS[name](predicted[chosen], true[chosen]))
    tail = (1 - confidence) / 2
    intervals = {
        name: (float(np.quantile(values, tail)), float(np.quantile(values, 1 - tail)))
        for name, values in drawn.items()
        if values
    }
    return scores, intervals
