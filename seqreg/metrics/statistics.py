"""Statistics of scores over seeds: summaries, intervals, tests, corrections.

Scores of a method are random twice over: other seeds give another model, other test examples another mean. A test that
takes one seed of each method and resamples examples asks whether two *models* differ; nearly always they do. Whether
two *methods* differ needs several seeds, and a test that counts both kinds of chance: `two_level`.

Everything draws from a generator of its own, and gives the same numbers for the same input.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from seqreg.errors import BadInput
from seqreg.metrics.bootstrap import resampled_means

Array = NDArray[np.float64]
Interval = tuple[float, float]

_EXACT = 20_000
"""Permutations up to which all of them are looked at."""

EXAMPLES = 20
"""Test examples below which a difference is not judged: resampling a handful of them rejects too often
(`python -m tests.metrics.simulate --examples`)."""


@dataclass(frozen=True)
class Summary:
    """Scores over seeds. `sd` has n - 1 below; it and the intervals need at least two seeds.

    Args:
        interval: of the mean, by the BCa bootstrap: too short for a handful of seeds
        student: of the mean, by Student's distribution
        sd_interval: of the sd, by the chi-square distribution
    """

    n: int
    mean: float
    sd: float | None
    median: float
    max: float
    interval: Interval | None
    student: Interval | None
    sd_interval: Interval | None


@dataclass(frozen=True)
class Difference:
    """How much higher the second is than the first, with an interval that is consistent with p, and how it was got."""

    difference: float
    interval: Interval | None
    p: float | None
    test: str


def summary(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Summary:
    """n, mean, sd, median, max, the BCa and Student's interval of the mean, and the chi-square interval of the sd.

    >>> summary([1.0, 2.0, 3.0]).sd
    1.0
    """
    x = _finite(values)
    n, mean, median, largest = len(x), float(x.mean()), float(np.median(x)), float(x.max())
    if n < 2:
        return Summary(n, mean, None, median, largest, None, None, None)
    sd, tail = float(x.std(ddof=1)), (1 - confidence) / 2
    low, high = (sd * math.sqrt((n - 1) / float(stats.chi2.ppf(end, n - 1))) for end in (1 - tail, tail))
    interval, student_interval = bca(x, confidence=confidence, seed=seed), student(x, confidence)
    return Summary(n, mean, sd, median, largest, interval, student_interval, (low, high))


def student(values: Sequence[float] | Array, confidence: float = 0.95) -> Interval:
    """Student's interval of the mean: exact for normal values, however few.

    >>> low, high = student([1.0, 2.0, 3.0])
    >>> round(low, 2), round(high, 2)
    (-0.48, 4.48)
    """
    x = _finite(values)
    if len(x) < 2:
        raise BadInput(f"{len(x)} values: an interval needs at least two")
    reach = float(stats.t.ppf((1 + confidence) / 2, len(x) - 1)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()) - reach, float(x.mean()) + reach


def bca(values: Sequence[float] | Array, *, confidence: float = 0.95, resamples: int = 9999, seed: int = 0) -> Interval:
    """The bias-corrected and accelerated bootstrap interval of the mean; a point where all values are equal.

    >>> bca([4.0, 4.0, 4.0])
    (4.0, 4.0)
    """
    x = _finite(values)
    if len(x) < 2:
        raise BadInput(f"{len(x)} values: an interval needs at least two")
    if np.ptp(x) == 0:  # scipy gives nan
        return float(x.mean()), float(x.mean())
    options: dict[str, Any] = {"n_resamples": resamples, "method": "BCa", "rng": np.random.default_rng(seed)}
    ends = stats.bootstrap((x,), np.mean, confidence_level=confidence, **options).confidence_interval
    return float(ends.low), float(ends.high)


def two_level(
    first: Array, second: Array, *, confidence: float = 0.95, resamples: int = 9999, seed: int = 0
) -> Difference:
    """The difference of two methods over seeds and examples, by a bootstrap of both, paired by both.

    Both arguments are scores [seeds, examples], row s of the same seed, column e of the same example. With D their
    difference, a_s its row means and b_e its column means around the mean of all, a resample is

        D* = mean + k / c * mean of resampled a  +  r * mean of resampled b

    with fresh draws of seeds and of examples. Three corrections make it hold its level with few seeds:

    - k = sqrt(n / (n - 1)): n resampled deviations vary too little by this factor (0.89 for 5 seeds);
    - c, drawn anew for each resample, is the root of a chi-square variable of n - 1 degrees of freedom over them: the
      variance between seeds was itself estimated from n seeds. Without it the interval is a normal one where Student's
      belongs, which is the difference between 1.96 and 2.78 for 5 seeds;
    - r = sqrt(1 - s2 / (n * variance of b)), at least 0, with s2 the variance left over by rows and columns: column
      means of n seeds hold noise of the seeds, which is in the rows' part already and would count twice.

    p is the share of resamples that are at least as far from the mean as 0 is; the interval is the mean plus and minus
    the distance that a share `confidence` of them stays within. `python -m tests.metrics.simulate` shows the level.
    """
    d = _paired(first, second)
    n, count = d.shape
    mean = float(d.mean())
    if n < 2:
        return Difference(mean, None, None, "two-level bootstrap")
    rows, columns = d.mean(1) - mean, d.mean(0) - mean
    left = float(((d - mean - rows[:, None] - columns) ** 2).sum()) / max((n - 1) * (count - 1), 1)
    between = float((columns**2).sum()) / max(count - 1, 1)
    r = math.sqrt(max(0.0, 1 - left / (n * between))) if between > 0 else 0.0
    rng = np.random.default_rng(seed)
    c = np.sqrt(rng.chisquare(n - 1, resamples) / (n - 1))
    part = math.sqrt(n / (n - 1)) * resampled_means(rows[None], resamples, rng)[0] / c
    drift = np.abs(part + r * resampled_means(columns[None], resamples, rng)[0])
    reach = float(np.quantile(drift, confidence))
    p = (1 + int((drift >= abs(mean) - 1e-12).sum())) / (resamples + 1)
    return Difference(mean, (mean - reach, mean + reach), p, "two-level bootstrap")


def welch(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> Difference:
    """Welch's t test over seeds. Without any spread there is no t, and the exact permutation test decides.

    >>> welch([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]).difference
    1.0
    """
    x, y = _finite(first), _finite(second)
    mean = float(y.mean() - x.mean())
    if min(len(x), len(y)) < 2:
        return Difference(mean, None, None, "Welch")
    if np.ptp(x) == 0 and np.ptp(y) == 0:
        return Difference(mean, (mean, mean), permutation(x, y).p, "permutation")
    with warnings.catch_warnings():  # where one side has no spread: its variance is 0, and exactly known
        warnings.filterwarnings("ignore", "Precision loss occurred", RuntimeWarning)
        test = stats.ttest_ind(y, x, equal_var=False)
    ends = test.confidence_interval(confidence)
    return Difference(mean, (float(ends.low), float(ends.high)), float(test.pvalue), "Welch")


def paired(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> Difference:
    """The mean difference of pairs with Student's interval, and without a test.

    >>> paired([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]).interval
    (1.0, 1.0)
    """
    d = _finite(second) - _finite(first)
    return Difference(float(d.mean()), student(d, confidence) if len(d) > 1 else None, None, "paired")


def permutation(
    first: Sequence[float] | Array, second: Sequence[float] | Array, *, resamples: int = 9999, seed: int = 0
) -> Difference:
    """The permutation test of the difference of means over seeds: exact where there are few permutations.

    >>> round(permutation([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]).p, 4) == round(2 / 252, 4)
    True
    """
    x, y = _finite(first), _finite(second)
    mean = float(y.mean() - x.mean())
    if np.ptp(np.concatenate([x, y])) == 0:
        return Difference(mean, None, 1.0, "permutation")
    exact = math.comb(len(x) + len(y), len(x)) <= _EXACT
    pair: Any = (y, x)
    test = stats.permutation_test(
        pair, lambda a, b, axis: a.mean(axis) - b.mean(axis), vectorized=True,
        n_resamples=_EXACT if exact else resamples, rng=np.random.default_rng(seed),
    )  # fmt: skip
    return Difference(mean, None, float(test.pvalue), "exact permutation" if exact else "permutation")


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's correction: p values that can be compared with one alpha, however many there are; None stays None.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    least = 0.0
    for rank, (p, place) in enumerate(known):
        least = max(least, min(1.0, (len(known) - rank) * p))
        corrected[place] = least
    return corrected


def reachable(seeds: int, tests: int = 1) -> float:
    """The smallest p, corrected for `tests`, that `seeds` seeds per method can give when only their order counts.

    If one method is better with every seed than the other with any, this is how rare that is among all ways to deal the
    2 n scores to two methods. Tests that lean on normality can go below it; a verdict that only they allow rests on the
    normality, which a handful of seeds cannot show.

    >>> round(reachable(5), 4), round(reachable(4, tests=4), 3)
    (0.0079, 0.114)
    """
    return min(1.0, tests * 2 / math.comb(2 * seeds, seeds)) if seeds else 1.0


def missing(seeds: int, alpha: float, tests: int = 1) -> int:
    """How many more seeds per method are needed before `reachable` is at most alpha.

    >>> missing(3, 0.05, tests=4)
    2
    """
    enough = next(n for n in range(1, 1000) if reachable(n, tests) <= alpha)
    return max(0, enough - seeds)


def detectable(
    sd: float, seeds: int, tests: int = 1, *, alpha: float = 0.05, power: float = 0.8, paired: bool = False
) -> float | None:
    """The smallest difference that is found with this power although Holm's correction is at its strictest.

    That is where no other method of the `tests` differs: p must then be at most alpha / tests. Exact for normal scores
    of equal spread; None for a single seed, which shows nothing.

    Welch's t has its numerator and two things that vary in its denominator: the sum of the two sample variances, a
    chi-square variable of 2 (n - 1) degrees of freedom, and the share B of one of them, a beta variable, independent
    of the sum, which decides the degrees of freedom (n - 1) / (B^2 + (1 - B)^2) that Welch's test takes. The power is
    the mean of a normal tail over both.

    Args:
        sd: of the scores of a method over seeds
        seeds: of every method
        paired: Student's test of the differences by seed instead; those of independent runs vary by sqrt(2) sd

    >>> round(detectable(0.9, 10, tests=9), 2)
    1.65
    """
    if seeds < 2:
        return None
    n, tail = seeds - 1, alpha / tests / 2
    freedom = n if paired else 2 * n
    sums = np.sqrt(stats.chi2.ppf(_middles(400), freedom) / freedom)
    share = np.full(1, 0.5) if paired else stats.beta.ppf(_middles(200), n / 2, n / 2)
    critical = stats.t.isf(tail, n if paired else n / (share**2 + (1 - share) ** 2))
    bounds = np.outer(critical, sums)

    def missing_power(effect: float) -> float:
        return float(np.mean(stats.norm.sf(bounds - effect) + stats.norm.cdf(-bounds - effect))) - power

    return float(optimize.brentq(missing_power, 0, 10 * float(np.max(critical)) + 10)) * sd * math.sqrt(2 / seeds)


def _middles(count: int) -> Array:
    """The middles of `count` equal parts of the numbers from 0 to 1, to average over a distribution."""
    middles: Array = (np.arange(count) + 0.5) / count
    return middles


def _paired(first: Array, second: Array) -> Array:
    x, y = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 2 or not x.size:
        raise BadInput(
            f"scores of shape {x.shape} and {y.shape}: expected the same seeds and examples, [seeds, examples]"
        )
    d: Array = y - x
    if not np.isfinite(d).all():
        raise BadInput("some scores are not finite numbers")
    return d


def _finite(values: Sequence[float] | Array) -> Array:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x) or not np.isfinite(x).all():
        raise BadInput(f"{x.tolist()!r:.60}: expected a list of finite numbers, at least one")
    return x
