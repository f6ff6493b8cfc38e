"""GLUE's scores against scikit-learn and scipy."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from seqreg.errors import BadInput
from seqreg.metrics.classification import classification, f1, matthews, pearson, spearman


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_classes_equal_scikit_learn(classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, guess = rng.integers(classes, size=(2, 57))
    scores, _ = classification(["accuracy", "matthews"], guess, truth, resamples=0)
    assert scores["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(truth, guess), abs=1e-15)
    assert scores["matthews"] == pytest.approx(sklearn.metrics.matthews_corrcoef(truth, guess), abs=1e-12)
    if classes == 2:
        assert f1(guess, truth) == pytest.approx(sklearn.metrics.f1_score(truth, guess), abs=1e-15)


@pytest.mark.parametrize("seed", range(20))
def test_numbers_equal_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth, guess = rng.integers(0, 6, 83) * 1.0, rng.normal(size=83).round(1)  # with ties
    assert pearson(guess, truth) == pytest.approx(scipy.stats.pearsonr(guess, truth).statistic, abs=1e-12)
    assert spearman(guess, truth) == pytest.approx(scipy.stats.spearmanr(guess, truth).statistic, abs=1e-12)


def test_what_is_undefined_is_zero() -> None:
    same, mixed = np.zeros(4), np.array([0, 1, 0, 1])
    assert matthews(same, mixed) == 0
    assert f1(same, same) == 0
    assert pearson(same, mixed) == 0
    assert spearman(same, mixed) == 0


def test_intervals_hold_the_score_and_narrow_with_more_examples() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for size in (100, 1600):
        truth = rng.integers(2, size=size)
        guess = np.where(rng.random(size) < 0.8, truth, 1 - truth)
        scores, intervals = classification(["accuracy"], guess, truth)
        low, high = intervals["accuracy"]
        assert low < scores["accuracy"] < high
        widths.append(high - low)
    assert widths[0] == pytest.approx(4 * widths[1], rel=0.4)


def test_bad_input() -> None:
    with pytest.raises(BadInput, match="at least one"):
        classification(["accuracy"], [], [])
    with pytest.raises(BadInput, match="as many"):
        classification(["accuracy"], [1, 0], [1])
    with pytest.raises(BadInput, match="'acuracy'"):
        classification(["acuracy"], [1], [1])
    with pytest.raises(BadInput, match="not finite"):
        classification(["pearson"], [float("nan"), 1.0], [1.0, 2.0])


def test_what_is_slow_to_import_is_imported_where_it_is_used() -> None:
    code = "import sys, seqreg.metrics.classification; print('scipy.stats' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
