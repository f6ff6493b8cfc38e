"""The linear probe: its objective, its penalty, and what it does with features that say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from seqreg.errors import BadInput
from seqreg.metrics.logistic import PENALTIES, fit, fit_probe


def blobs(rows: int, classes: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=rows)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    return centres[labels] + 1.5 * rng.normal(size=(rows, width)), labels


@pytest.mark.parametrize("penalty", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_the_minimum_of_the_stated_objective(classes: int, penalty: float) -> None:
    """Mean NLL + penalty / 2 |weights|² has no gradient at the solution."""
    x, y = blobs(300, classes, 12)
    fitted = fit(x, y, penalty)
    error = fitted.predict_proba(x) - np.eye(classes)[y]
    error = error[:, 1:] if classes == 2 else error
    slope = x.T @ error / len(y) + penalty * fitted.coef_.T
    assert np.abs(slope).max() < 1e-5
    assert np.abs(error.mean(0)).max() < 1e-5


def test_the_penalty_is_that_of_the_lowest_loss_on_rows_held_out() -> None:
    x, y = blobs(120, 3, 60)
    found = fit_probe(x, y)
    order = np.random.default_rng(0).permutation(120)
    out, rest = order[:24], order[24:]
    z = (x - x.mean(0)) / x.std(0)
    losses = {p: -fit(z[rest], y[rest], p).predict_log_proba(z[out])[np.arange(24), y[out]].mean() for p in PENALTIES}
    assert found.penalty == min(losses, key=losses.__getitem__)
    assert (found.predict(x) == fit(z, y, found.penalty).predict(z)).all()
    assert (fit_probe(x, y).classifier.coef_ == found.classifier.coef_).all()


def test_rounding_is_not_taken_for_a_feature() -> None:
    """Labels hidden in the eighth digit of otherwise constant features are not found."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=200)
    x = np.stack([rng.normal(size=200), 1e-8 * y], axis=1)
    assert (fit_probe(x, y).predict(x) == y).mean() < 0.7
    assert len(set(fit_probe(np.ones((200, 3)), y).predict(np.ones((4, 3))))) == 1


def test_a_class_that_only_held_out_examples_have() -> None:
    x, y = blobs(40, 2, 4)
    held = np.random.default_rng(0).permutation(40)[:8]
    y[held[0]] = 2
    assert set(fit_probe(x, y).classifier.classes_) == {0, 1, 2}


def test_faults_are_named() -> None:
    for x, y, message in (
        (np.ones((4, 2)), [0, 1, 0, 1], "4 examples are too few"),
        (np.full((9, 2), np.nan), [0, 1] * 4 + [0], "not finite"),
        (np.ones((9, 2)), [0] * 8, "expected"),
        (np.ones((9, 2)), [0] * 9, "all of one class"),
    ):
        with pytest.raises(BadInput, match=message):
            fit_probe(x, y)
