"""The linear probe beside scikit-learn's, and what it does with features that say nothing."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from seqreg.errors import BadInput
from seqreg.metrics.logistic import PENALTIES, fit, read


def blobs(rows: int, classes: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(seed)
    labels = dice.integers(classes, size=rows)
    centres = np.random.default_rng(99).normal(size=(classes, width))
    return centres[labels] + 1.5 * dice.normal(size=(rows, width)), labels


@pytest.mark.parametrize("penalty", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("classes", [3, 5])
def test_the_same_as_scikit_learn(classes: int, penalty: float) -> None:
    x, y = blobs(300, classes, 12)
    ours = fit(x, y, classes, penalty)
    theirs = LogisticRegression(C=1 / (penalty * len(y)), tol=1e-10, max_iter=10000).fit(x, y)
    assert np.abs(ours.weights.T - theirs.coef_).max() < 1e-4
    other, truth = blobs(500, classes, 12, seed=1)
    assert (ours.predict(other) == theirs.predict(other)).all()
    expected = -theirs.predict_log_proba(other)[np.arange(500), truth].mean()
    assert ours.loss(other, truth) == pytest.approx(expected, abs=1e-6)


def test_two_classes_too() -> None:
    """scikit-learn has one vector w for two classes; ours are w/2 and -w/2, so that the same penalty weighs half."""
    x, y = blobs(200, 2, 8)
    ours = fit(x, y, 2, 0.02)
    theirs = LogisticRegression(C=1 / (0.01 * len(y)), tol=1e-10, max_iter=10000).fit(x, y)
    assert np.abs((ours.weights[:, 1] - ours.weights[:, 0]) - theirs.coef_[0]).max() < 1e-4


def test_the_penalty_is_that_of_the_lowest_loss_on_rows_held_out() -> None:
    x, y = blobs(120, 3, 60)
    found = read(x, y, 3)
    order = np.random.default_rng(0).permutation(120)
    out, rest = order[:24], order[24:]
    z = (x - x.mean(0)) / x.std(0)
    losses = {p: fit(z[rest], y[rest], 3, p).loss(z[out], y[out]) for p in PENALTIES}
    assert found.penalty == min(losses, key=losses.__getitem__)
    assert (found.predict(x) == fit(z, y, 3, found.penalty).predict(z)).all()
    assert (read(x, y, 3).classifier.weights == found.classifier.weights).all()


def test_rounding_is_not_taken_for_a_feature() -> None:
    """Labels hidden in the eighth digit of otherwise constant features are not found."""
    dice = np.random.default_rng(0)
    y = dice.integers(2, size=200)
    x = np.stack([dice.normal(size=200), 1e-8 * y], axis=1)
    assert (read(x, y, 2).predict(x) == y).mean() < 0.7
    assert len(set(read(np.ones((200, 3)), y, 2).predict(np.ones((4, 3))))) == 1


def test_faults_are_named() -> None:
    with pytest.raises(BadInput, match="4 rows are too few"):
        read(np.ones((4, 2)), [0, 1, 0, 1], 2)
    with pytest.raises(BadInput, match="not finite"):
        fit(np.full((9, 2), np.nan), [0] * 9, 2, 1.0)
    with pytest.raises(BadInput, match="expected"):
        fit(np.ones((9, 2)), [0] * 8, 2, 1.0)
