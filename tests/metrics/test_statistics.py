"""The statistics of comparisons: against scipy, against arithmetic by hand, and against simulated truth."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from seqreg.errors import BadInput
from seqreg.metrics import statistics
from tests.metrics import simulate

SCORES = [41.2, 40.1, 43.9, 42.0, 41.7, 40.8]
OTHERS = [42.9, 43.1, 42.2, 44.0, 43.3]


def test_a_summary_by_hand() -> None:
    found = statistics.summary(SCORES)
    mean = sum(SCORES) / 6
    sd = math.sqrt(sum((one - mean) ** 2 for one in SCORES) / 5)
    assert (found.n, found.max) == (6, 43.9)
    assert found.mean == pytest.approx(mean)
    assert found.sd == pytest.approx(sd)
    assert found.median == pytest.approx((41.2 + 41.7) / 2)
    assert found.sd_interval == pytest.approx((sd * math.sqrt(5 / 12.832502), sd * math.sqrt(5 / 0.83121161)))
    assert found.student == pytest.approx(stats.t.interval(0.95, 5, mean, sd / math.sqrt(6)))
    assert found.interval == statistics.bca(SCORES)
    alone = statistics.summary([4.0])
    assert (alone.sd, alone.interval, alone.student, alone.sd_interval) == (None, None, None, None)


def test_bca_by_efrons_formula() -> None:
    """Bias from the share of resamples below the mean, acceleration from the jackknife, then two quantiles."""
    rng = np.random.default_rng(5)
    x = rng.lognormal(size=12)
    means = x[rng.integers(0, 12, (200_000, 12))].mean(1)
    z0 = stats.norm.ppf((means < x.mean()).mean() + (means == x.mean()).mean() / 2)
    left_out = np.array([np.delete(x, i).mean() for i in range(12)])
    away = left_out.mean() - left_out
    a = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    ends = [stats.norm.cdf(z0 + (z0 + z) / (1 - a * (z0 + z))) for z in (-1.959964, 1.959964)]
    assert statistics.bca(x, resamples=100_000) == pytest.approx(tuple(np.quantile(means, ends)), abs=0.02)
    assert statistics.bca(x) == statistics.bca(x)
    assert statistics.bca([3.0, 3.0]) == (3.0, 3.0)
    with pytest.raises(BadInput, match="1 values: an interval needs at least two"):
        statistics.bca([3.0])


def test_welch_by_hand() -> None:
    found = statistics.welch(SCORES, OTHERS)
    x, y = np.array(SCORES), np.array(OTHERS)
    a, b = x.var(ddof=1) / 6, y.var(ddof=1) / 5
    t, df = (y.mean() - x.mean()) / math.sqrt(a + b), (a + b) ** 2 / (a**2 / 5 + b**2 / 4)
    reach = stats.t.ppf(0.975, df) * math.sqrt(a + b)
    assert found.p == pytest.approx(2 * stats.t.sf(abs(t), df))
    assert found.interval == pytest.approx((found.difference - reach, found.difference + reach))


def test_welch_without_spread_or_seeds() -> None:
    flat = statistics.welch([1.0] * 5, [2.0] * 5)
    assert flat.test == "permutation"
    assert flat.p == pytest.approx(2 / 252)
    assert statistics.welch([1.0] * 5, [1.0] * 5).p == 1.0
    assert statistics.welch([1.0], [2.0, 3.0]).p is None
    half = statistics.welch([0.5] * 4, [0.6, 0.7, 0.8])  # a one-sample test, and no warning
    assert half.p == pytest.approx(stats.ttest_1samp([0.6, 0.7, 0.8], 0.5).pvalue)


def test_permutation_looks_at_every_way_to_deal() -> None:
    both = np.array(SCORES + OTHERS)
    seen = abs(np.mean(OTHERS) - np.mean(SCORES))
    dealt = [both[list(chosen)].mean() - np.delete(both, list(chosen)).mean() for chosen in combinations(range(11), 6)]
    higher, lower = (np.mean([sign * one >= seen - 1e-12 for one in dealt]) for sign in (1, -1))
    found = statistics.permutation(SCORES, OTHERS)
    assert found.test == "exact permutation"
    assert found.p == pytest.approx(min(1, 2 * min(higher, lower)), abs=1e-9)
    many = statistics.permutation(np.arange(20.0), np.arange(20.0) + 9)
    assert many.test == "permutation"
    assert many.p == statistics.permutation(np.arange(20.0), np.arange(20.0) + 9).p < 0.01


def test_holm_by_its_definition() -> None:
    ps = [0.01, 0.04, None, 0.03, 0.005]
    assert statistics.holm(ps) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert statistics.holm([0.6, 0.9]) == [1.0, 1.0]
    rng = np.random.default_rng(0)
    for ps in rng.random((20, 6)) ** 3:  # reject in steps, until one is kept
        for alpha in (0.01, 0.05, 0.2):
            rejected = set()
            for rank, place in enumerate(np.argsort(ps)):
                if ps[place] > alpha / (6 - rank):
                    break
                rejected.add(place)
            assert rejected == {i for i, p in enumerate(statistics.holm(list(ps))) if p is not None and p <= alpha}


def test_reachable_p_is_that_of_the_permutation_test() -> None:
    for n in (2, 3, 4, 5):
        best = statistics.permutation(np.arange(n), np.arange(n) + 100.0)
        assert statistics.reachable(n) == pytest.approx(best.p)
        assert statistics.reachable(n) == pytest.approx(stats.mannwhitneyu(range(n), range(100, 100 + n)).pvalue)
    assert statistics.reachable(3, tests=100) == 1.0
    assert statistics.missing(5, 0.05, tests=4) == 0
    assert statistics.missing(4, 0.05, tests=4) == 1
    assert statistics.missing(0, 0.05) == 4


def test_two_level_has_the_variance_of_both_kinds_of_chance() -> None:
    """Its interval is Student's for seeds alone, and the normal one for examples alone."""
    rng = np.random.default_rng(3)
    first, seeds = np.zeros((5, 400)), rng.normal(1, 0.5, 5)
    found = statistics.two_level(first, np.repeat(seeds[:, None], 400, 1), resamples=100_000)
    reach = stats.t.ppf(0.975, 4) * seeds.std(ddof=1) / math.sqrt(5)
    assert found.interval is not None
    assert found.interval[1] - found.difference == pytest.approx(reach, rel=0.05)
    examples = rng.normal(1, 5, 400)
    found = statistics.two_level(first, np.repeat(examples[None], 5, 0), resamples=100_000)
    assert found.interval is not None
    assert found.interval[1] - found.difference == pytest.approx(1.96 * examples.std() / 20, rel=0.02)


def test_two_level_is_antisymmetric_repeatable_and_needs_two_seeds() -> None:
    first, second = simulate.WORLDS[0].draw(np.random.default_rng(0))
    there, back = statistics.two_level(first, second), statistics.two_level(second, first)
    assert there == statistics.two_level(first, second)
    assert there.difference == pytest.approx(-back.difference)
    assert there.p == back.p
    assert (there.p <= 0.05) == (there.interval[0] > 0 or there.interval[1] < 0)
    assert statistics.two_level(first[:1], second[:1]).p is None
    assert statistics.two_level(first, first).p == 1.0


def test_bad_scores_are_refused() -> None:
    with pytest.raises(BadInput, match="expected the same seeds and examples"):
        statistics.two_level(np.zeros((2, 3)), np.zeros((3, 3)))
    with pytest.raises(BadInput, match="not finite"):
        statistics.two_level(np.zeros((2, 3)), np.full((2, 3), np.nan))
    with pytest.raises(BadInput, match="expected a list of finite numbers"):
        statistics.summary([])


@pytest.mark.parametrize("world", simulate.WORLDS[:1] + simulate.WORLDS[4:5], ids=lambda world: world.name)
def test_two_level_rejects_a_true_null_at_its_level(world: simulate.World) -> None:
    """500 comparisons of equally good methods: 5% of false alarms; one seed and a paired bootstrap have far more."""
    found = simulate.rates(world, comparisons=500, resamples=799)
    assert 0.03 <= found["two-level"] <= 0.07
    assert found["one seed, paired"] >= 0.14


def test_two_level_finds_what_is_there() -> None:
    world, rng = simulate.WORLDS[0], np.random.default_rng(2)
    draws = [world.draw(rng) for _ in range(60)]
    found = [statistics.two_level(first, second + 2.0, resamples=999).p for first, second in draws]
    assert np.mean([p is not None and p <= 0.05 for p in found]) > 0.9


def test_students_interval_holds_the_mean_and_bca_misses_it_with_few_seeds() -> None:
    found = simulate.coverage(5, draws=300, resamples=499)
    assert 0.92 <= found["Student"] <= 0.98
    assert found["BCa"] < 0.88


def test_verdicts_need_as_many_test_examples_as_the_bound_says() -> None:
    """The bound of a verdict; 400 comparisons show a true 5% as 3% to 7%."""
    worst = [simulate.level(world, 400, 499) for world in simulate.few_examples(2)]
    assert max(worst) > 0.12
    for world in simulate.few_examples(statistics.EXAMPLES):
        assert simulate.level(world, 400, 499) < 0.085, world.name
    assert simulate.classes_level(statistics.EXAMPLES, comparisons=400) < 0.085


def test_pseudovalues_of_an_error_rate_hold_the_level() -> None:
    world = simulate.World("examples matter", 5, 200, seed=0.02, method=12.0)
    rates = simulate.corpus_level(world, comparisons=120)
    assert rates["two-level, pseudo-values"] <= 0.10
    assert rates["Welch"] > 0.10  # which takes the test set for fixed


@pytest.mark.parametrize(("seeds", "tests"), [(3, 1), (5, 1), (5, 4), (10, 9)])
def test_the_detectable_difference_is_found_four_times_in_five(seeds: int, tests: int) -> None:
    """Simulated comparisons, judged by Welch's test and Holm's correction: one method differs, the others do not."""
    sd, count, rng = 0.9, 10_000, np.random.default_rng(0)
    effect = statistics.detectable(sd, seeds, tests)
    assert effect is not None
    base = rng.normal(0, sd, (count, 1, seeds))
    others = rng.normal(0, sd, (count, tests, seeds))
    others[:, 0] += effect
    ps = stats.ttest_ind(others, base, axis=2, equal_var=False).pvalue
    found = np.mean([(statistics.holm(list(row))[0] or 0) <= 0.05 for row in ps])
    assert found == pytest.approx(0.8, abs=0.02)


def test_a_paired_detectable_difference_is_found_four_times_in_five() -> None:
    effect, rng = statistics.detectable(0.9, 5, 2, paired=True), np.random.default_rng(0)
    assert effect is not None
    ps = stats.ttest_1samp(rng.normal(effect, 0.9 * np.sqrt(2), (4000, 5)), 0, axis=1).pvalue
    assert np.mean(ps <= 0.05 / 2) == pytest.approx(0.8, abs=0.03)
    assert statistics.detectable(1.0, 1) is None
