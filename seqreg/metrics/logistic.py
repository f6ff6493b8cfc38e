"""Multinomial logistic regression: what a linear classifier can read from fixed features. Float64, deterministic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import logsumexp, softmax

from seqreg.errors import BadInput

Array = NDArray[np.float64]

PENALTIES = tuple(10.0**power for power in range(-5, 2))
"""From hardly any to a great deal; one is chosen on rows that were held out."""

DEAD = 1e-6
"""A feature that varies less than so much of the most varying one is rounding, and not stretched to look like more."""


@dataclass(frozen=True)
class Logistic:
    """A linear classifier: class scores are `features @ weights + bias`."""

    weights: Array  # [features, classes]
    bias: Array  # [classes]

    def scores(self, features: Any) -> Array:
        found: Array = np.asarray(features, dtype=np.float64) @ self.weights + self.bias
        return found

    def predict(self, features: Any) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.scores(features).argmax(-1)
        return found

    def loss(self, features: Any, labels: Any) -> float:
        """Mean negative log-likelihood."""
        scores = self.scores(features)
        return float((logsumexp(scores, axis=-1) - scores[np.arange(len(scores)), labels]).mean())


def fit(features: Any, labels: Any, classes: int, penalty: float) -> Logistic:
    """Minimise mean negative log-likelihood + penalty / 2 |weights|²; the bias is free. By L-BFGS, from 0."""
    x, y = np.asarray(features, dtype=np.float64), np.asarray(labels)
    if x.ndim != 2 or y.shape != x.shape[:1] or not len(y):
        raise BadInput(f"features {list(x.shape)}, labels {list(y.shape)}: expected [rows, features] and [rows]")
    if not np.isfinite(x).all():
        raise BadInput("some features are not finite numbers: has training diverged?")
    truth = np.eye(classes)[y]  # [rows, classes]

    def objective(flat: Array) -> tuple[float, Array]:
        weights, bias = flat[:-classes].reshape(-1, classes), flat[-classes:]
        scores = x @ weights + bias
        loss = (logsumexp(scores, axis=-1) - (scores * truth).sum(-1)).mean() + penalty / 2 * (weights**2).sum()
        error = (softmax(scores, axis=-1) - truth) / len(x)
        return float(loss), np.concatenate([(x.T @ error + penalty * weights).ravel(), error.sum(0)])

    start = np.zeros((x.shape[1] + 1) * classes)
    options: Any = {"maxiter": 2000, "maxfun": 4000, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-7}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options=options).x
    return Logistic(found[:-classes].reshape(-1, classes), found[-classes:])


@dataclass(frozen=True)
class Reading:
    """A classifier that was fitted to standardised features, and the penalty that was chosen for it."""

    classifier: Logistic
    mean: Array
    scale: Array
    penalty: float

    def predict(self, features: Any) -> NDArray[np.int64]:
        return self.classifier.predict((np.asarray(features, dtype=np.float64) - self.mean) * self.scale)


def read(features: Any, labels: Any, classes: int, *, held: float = 0.2, seed: int = 0) -> Reading:
    """Choose the penalty by the loss on held-out rows, then fit to all rows.

    Args:
        held: share of the rows that the penalty is chosen on, by a fixed shuffle
    """
    x, y = np.asarray(features, dtype=np.float64), np.asarray(labels)
    if len(y) < 5:
        raise BadInput(f"{len(y)} rows are too few to fit a linear probe: at least 5")
    mean, spread = x.mean(0), x.std(0)
    scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > DEAD * max(spread.max(), 1e-300))
    z = (x - mean) * scale
    order = np.random.default_rng(seed).permutation(len(y))
    cut = max(1, round(held * len(y)))
    out, rest = order[:cut], order[cut:]
    losses = [fit(z[rest], y[rest], classes, penalty).loss(z[out], y[out]) for penalty in PENALTIES]
    penalty = PENALTIES[int(np.argmin(losses))]
    return Reading(fit(z, y, classes, penalty), mean, scale, penalty)
