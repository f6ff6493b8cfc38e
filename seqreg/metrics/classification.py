"""The scores of GLUE by their official definition: fractions, from class ids or numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqreg.errors import BadInput
from seqreg.metrics import bootstrap

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
    truth = labels[:, None] == classes  # [examples, classes]
    guess = predictions[:, None] == classes
    n = len(labels)
    right = int((truth & guess).sum())
    truths, guesses = truth.sum(0).astype(np.float64), guess.sum(0).astype(np.float64)
    above = right * n - float(truths @ guesses)
    below = float((n**2 - guesses @ guesses) * (n**2 - truths @ truths))
    return above / below**0.5 if below > 0 else 0.0


def pearson(predictions: Array, labels: Array) -> float:
    """Pearson's correlation; 0 where one side is constant."""
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    return float(np.corrcoef(predictions, labels)[0, 1])


def spearman(predictions: Array, labels: Array) -> float:
    """Pearson's correlation of ranks; equal values share the mean of their ranks."""
    from scipy.stats import rankdata  # slow to import, so only where it is used

    return pearson(rankdata(predictions), rankdata(labels))


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
    if not resamples:
        return scores, {}
    indices = itertools.chain.from_iterable(bootstrap.resamples(len(true), resamples, np.random.default_rng(seed)))
    draws = np.array([[METRICS[name](predicted[chosen], true[chosen]) for name in names] for chosen in indices]).T
    return scores, dict(zip(names, bootstrap.percentile_intervals(draws, confidence), strict=True))
