"""Calibration, against torchmetrics, scikit-learn, scipy and slow loops."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.metrics import brier_score_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from seqreg.errors import BadInput
from seqreg.metrics.calibration import (
    COLDEST,
    HOTTEST,
    Outcomes,
    binned,
    chance_error,
    fit_temperature,
    risk_coverage,
)

Draw = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
TORCHMETRICS = importlib.import_module("torchmetrics.functional.classification.calibration_error")
sizes = st.integers(1, 60)
seeds = st.integers(0, 10**6)


def drawn(rows: int, classes: int = 4, temperature: float = 1.0, seed: int = 0) -> Draw:
    """Logits, and labels that are drawn from them at a temperature."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, classes)) * 3
    return logits, (logits / temperature + rng.gumbel(size=logits.shape)).argmax(-1)


def softmax(logits: Any) -> Any:
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


@pytest.mark.parametrize("bins", [1, 4, 10, 15, 100])
def test_ece_equals_torchmetrics(bins: int) -> None:
    logits, labels = drawn(3000)
    one = Outcomes.of(logits, labels)
    found = binned(one.confidence, one.correct, bins).error
    exact = TORCHMETRICS._ce_compute(torch.tensor(one.confidence), torch.tensor(one.correct), bins)
    assert found == pytest.approx(float(exact), abs=1e-12)
    public = multiclass_calibration_error(torch.tensor(softmax(logits)), torch.tensor(labels), 4, n_bins=bins)
    assert found == pytest.approx(float(public), abs=1e-6)  # which goes on in float32


@pytest.mark.parametrize("bins", [2, 4, 8, 16])
def test_ece_equals_torchmetrics_on_the_edges_of_bins(bins: int) -> None:
    rng = np.random.default_rng(bins)
    sure = rng.integers(8, 16, size=400) / 16  # all are edges of 16 bins, and none is 1
    correct = rng.random(400) < 0.6
    exact = TORCHMETRICS._ce_compute(torch.tensor(sure), torch.tensor(correct), bins)
    found = binned(sure, correct, bins).error
    assert found == pytest.approx(float(exact), abs=1e-12)
    shares = np.stack([sure, 1 - sure], -1)
    labels = torch.tensor(np.where(correct, 0, 1))
    public = multiclass_calibration_error(torch.tensor(shares)[sure > 0.5], labels[sure > 0.5], 2, n_bins=bins)
    clear = binned(sure[sure > 0.5], correct[sure > 0.5], bins).error
    assert clear == pytest.approx(float(public), abs=1e-6)


def test_certainty_is_in_the_last_bin_and_decimals_are_on_their_edges() -> None:
    found = binned([1.0, 0.95, 0.3], [0, 1, 1], 10)
    assert found.count.tolist() == [1, 2]
    assert found.low.tolist() == [0.3, 0.9]
    assert found.error == pytest.approx((0.7 + 2 * abs(0.5 - 0.975)) / 3)


@given(sizes, st.integers(1, 20), seeds, st.sampled_from([1, 2, 6]))
def test_equal_mass_against_a_slow_loop(rows: int, bins: int, seed: int, digits: int) -> None:
    rng = np.random.default_rng(seed)
    sure, correct = rng.random(rows).round(digits), rng.random(rows) < 0.5  # one digit: many are equal
    groups: dict[int, list[int]] = {}
    for index in range(rows):
        surer_than = sum(other < sure[index] for other in sure)
        groups.setdefault(int(surer_than) * bins // rows, []).append(index)
    slow = sum(abs(sum(sure[i] for i in g) - sum(int(correct[i]) for i in g)) for g in groups.values()) / rows
    found = binned(sure, correct, bins, "mass")
    assert found.error == pytest.approx(slow, abs=1e-12)
    order = rng.permutation(rows)
    assert binned(sure[order], correct[order], bins, "mass").error == pytest.approx(found.error, abs=1e-12)
    assert found.count.sum() == rows
    if len(set(sure)) == rows >= bins:
        assert found.count.max() - found.count.min() <= 1


def test_brier_equals_scikit_learn_and_the_plain_formula() -> None:
    logits, labels = drawn(200, classes=2)
    shares = softmax(logits)
    found = Outcomes.of(logits, labels).brier.mean()
    assert found / 2 == pytest.approx(brier_score_loss(labels, shares[:, 1]), abs=1e-14)
    assert found == pytest.approx(brier_score_loss(labels, shares[:, 1], scale_by_half=False), abs=1e-14)
    logits, labels = drawn(50, classes=5)
    shares = softmax(logits)
    slow = [sum((p - (c == y)) ** 2 for c, p in enumerate(row)) for row, y in zip(shares, labels, strict=True)]
    assert Outcomes.of(logits, labels).brier == pytest.approx(slow, abs=1e-14)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_nll_by_hand(temperature: float) -> None:
    logits, labels = drawn(40)
    slow = [
        math.log(sum(math.exp(z / temperature) for z in row)) - row[y] / temperature
        for row, y in zip(logits, labels, strict=True)
    ]
    assert Outcomes.of(logits, labels, temperature).nll == pytest.approx(slow, abs=1e-12)
    assert Outcomes.of(logits + 1e4, labels, temperature).nll == pytest.approx(slow, abs=1e-9)  # no overflow


@pytest.mark.parametrize("planted", [0.4, 1.0, 2.5, 6.0])
def test_a_planted_temperature_is_found(planted: float) -> None:
    logits, labels = drawn(20_000, temperature=planted, seed=1)
    found = fit_temperature(lambda: [(logits[:7000], labels[:7000]), (logits[7000:], labels[7000:])])
    assert found.value == pytest.approx(planted, rel=0.05)
    assert found.after <= found.before
    exact = minimize_scalar(
        lambda t: Outcomes.of(logits, labels, t).nll.mean(), bounds=(0.1, 15), method="bounded", options={"xatol": 1e-9}
    )
    assert found.value == pytest.approx(exact.x, rel=1e-5)
    assert found.after == pytest.approx(exact.fun, abs=1e-12)


@settings(max_examples=150)
@given(sizes, st.integers(2, 5), seeds, st.sampled_from([1e-3, 0.3, 5.0, 200.0]))
def test_a_fit_never_makes_things_worse(rows: int, classes: int, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(size=(rows, classes)) * scale, rng.integers(classes, size=rows)
    found = fit_temperature(lambda: [(logits, labels)])
    assert COLDEST - 1e-12 <= found.value <= HOTTEST + 1e-9
    assert found.after <= found.before
    assert found.after == pytest.approx(Outcomes.of(logits, labels, found.value).nll.mean(), abs=1e-9)
    for other in (0.06, 0.5, 1.0, 2.0, 19.0):
        assert found.after <= Outcomes.of(logits, labels, other).nll.mean() + 1e-7 * max(1, scale)


def test_a_temperature_that_data_cannot_tell_is_at_an_end() -> None:
    logits, _ = drawn(100)
    assert fit_temperature(lambda: [(logits, logits.argmax(-1))]).at_end
    assert fit_temperature(lambda: [(logits, logits.argmin(-1))]).at_end
    assert not fit_temperature(lambda: [drawn(100)]).at_end


def test_overconfidence_is_seen_and_cured() -> None:
    logits, labels = drawn(20_000, temperature=2.0, seed=3)
    before, after = (Outcomes.of(logits, labels, t).summary(15) for t in (1.0, 2.0))
    floor, most = chance_error(Outcomes.of(logits, labels).confidence)
    assert before["overconfidence"] > 0.1
    assert before["ece"] > 5 * most
    assert abs(after["overconfidence"]) < 0.01
    assert after["ece"] < 2 * chance_error(Outcomes.of(logits, labels, 2.0).confidence)[1]
    assert floor < most
    assert before["accuracy"] == after["accuracy"]


@given(st.integers(1, 6), seeds)
def test_risk_and_coverage_against_a_slow_loop(rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sure, risk = rng.integers(0, 3, size=rows) / 2, rng.random(rows)
    curves = []
    for order in itertools.permutations(range(rows)):  # all orders that put the surest first
        if all(sure[a] >= sure[b] for a, b in itertools.pairwise(order)):
            curves.append([sum(risk[i] for i in order[:k]) / k for k in range(1, rows + 1)])
    found = risk_coverage(sure, risk)
    assert found.risk == pytest.approx(np.mean(curves, 0), abs=1e-12)
    assert found.area == pytest.approx(np.mean(curves), abs=1e-12)
    assert found.best <= found.area + 1e-12
    assert found.random == pytest.approx(risk.mean())
    assert risk_coverage(-risk, risk).area == pytest.approx(found.best)


@given(st.lists(sizes, min_size=1, max_size=4), seeds)
def test_parts_join_to_the_whole(parts: list[int], seed: int) -> None:
    logits, labels = drawn(sum(parts), seed=seed)
    ends = np.cumsum(parts)[:-1]
    pieces = zip(np.split(logits, ends), np.split(labels, ends), strict=True)
    joined, whole = Outcomes.joined([Outcomes.of(*piece) for piece in pieces]), Outcomes.of(logits, labels)
    assert joined.nll == pytest.approx(whole.nll, rel=1e-12)
    assert joined[joined.correct].brier == pytest.approx(whole.brier[whole.correct], rel=1e-12, abs=1e-15)


def test_bad_input_is_refused() -> None:
    with pytest.raises(BadInput, match="expected as many"):
        binned([0.5], [1, 0])
    with pytest.raises(BadInput, match="from 0 to 1"):
        binned([1.5], [1])
    with pytest.raises(BadInput, match="bins=0"):
        binned([0.5], [1], 0)
    with pytest.raises(BadInput, match="not finite"):
        Outcomes.of([[float("nan"), 0.0]], [0])
    with pytest.raises(BadInput, match="at least one example"):
        fit_temperature(list)
    with pytest.raises(BadInput, match="expected as many"):
        risk_coverage([], [])


def test_classes_that_are_impossible_weigh_nothing() -> None:
    rng = np.random.default_rng(0)
    logits, labels = 3 * rng.normal(size=(50, 4)), rng.integers(4, size=50)
    wider = np.concatenate([logits, np.full((50, 1), -np.inf)], axis=1)
    fitted = [fit_temperature(lambda given=given: [(given, labels)]).value for given in (wider, logits)]
    assert fitted[0] == pytest.approx(fitted[1], rel=1e-9)
    assert Outcomes.of(wider, labels).nll == pytest.approx(Outcomes.of(logits, labels).nll, rel=1e-12)
    with pytest.raises(BadInput, match="the logit of a label is minus infinity"):
        Outcomes.of(wider, np.full(50, 4))
