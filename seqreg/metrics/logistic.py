"""The linear probe: what a logistic regression can read from fixed features. Float64, deterministic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from seqreg.errors import BadInput

Array = NDArray[np.float64]

PENALTIES = tuple(10.0**power for power in range(-5, 2))
"""From hardly any to a great deal; one is chosen on examples that were held out."""

DEAD = 1e-6
"""A feature that varies less than so much of the most varying one is rounding, and not stretched to look like more."""


@dataclass(frozen=True)
class Probe:
    """A classifier that was fitted to standardised features, and the penalty that was chosen for it."""

    classifier: LogisticRegression
    mean: Array
    scale: Array
    penalty: float

    def predict(self, features: Any) -> NDArray[np.int64]:
        labels: NDArray[np.int64] = self.classifier.predict(_standardised(features, self.mean, self.scale))
        return labels


def fit(features: Array, labels: NDArray[np.int64], penalty: float) -> LogisticRegression:
    """Minimise mean negative log-likelihood + penalty / 2 |weights|²; the bias is free. By L-BFGS, from 0."""
    inverse = 1 / (penalty * len(labels))
    return LogisticRegression(C=inverse, tol=1e-6, max_iter=20_000).fit(features, labels)


def fit_probe(features: Any, labels: Any, *, held: float = 0.2, seed: int = 0) -> Probe:
    """Choose the penalty by the loss on held-out examples, then fit to all of them.

    Args:
        held: share of the examples that the penalty is chosen on, by a fixed shuffle
    """
    x, y = np.asarray(features, dtype=np.float64), np.asarray(labels)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise BadInput(
            f"features {list(x.shape)}, labels {list(y.shape)}: expected [examples, features] and [examples]"
        )
    if len(y) < 5:
        raise BadInput(f"{len(y)} examples are too few to fit a linear probe: at least 5")
    if not np.isfinite(x).all():
        raise BadInput("some features are not finite numbers: has training diverged?")
    order = np.random.default_rng(seed).permutation(len(y))
    cut = max(1, round(held * len(y)))
    out, rest = order[:cut], order[cut:]
    if len(np.unique(y[rest])) < 2:
        raise BadInput(f"{len(rest)} examples to fit a linear probe to are all of one class: at least two are needed")
    mean, spread = x.mean(0), x.std(0)
    scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > DEAD * max(spread.max(), 1e-300))
    z = _standardised(x, mean, scale)
    losses = [_held_out_loss(fit(z[rest], y[rest], penalty), z[out], y[out]) for penalty in PENALTIES]
    penalty = PENALTIES[int(np.argmin(losses))]
    return Probe(fit(z, y, penalty), mean, scale, penalty)


def _standardised(features: Any, mean: Array, scale: Array) -> Array:
    z: Array = (np.asarray(features, dtype=np.float64) - mean) * scale
    return z


def _held_out_loss(classifier: LogisticRegression, features: Array, labels: NDArray[np.int64]) -> float:
    known = np.isin(labels, classifier.classes_)  # of a class that no other example has, nothing can be learned
    if not known.any():
        return 0.0
    return float(log_loss(labels[known], classifier.predict_proba(features[known]), labels=classifier.classes_))
