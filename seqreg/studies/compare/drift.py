"""Drift and retention of the methods of a comparison: numbers by method, and their table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from seqreg.metrics import statistics
from seqreg.metrics.statistics import Difference
from seqreg.studies.common.findings import Table
from seqreg.workbench.scores.results import DRIFT, drift_numbers

TITLE = "Drift and retention, described and not tested; differences are paired by seed"
BEFORE = " before"
"""How the names of numbers end that belong to the starting model: the same for all methods."""
Metrics = Mapping[str, Any]
"""Contents of a run's metrics.json."""


def numbers_of(metrics: Metrics) -> dict[str, float]:
    """Drift and retention of one run by name, as far as they were measured."""
    numbers = {DRIFT[key]: value for key, value in drift_numbers(metrics).items()}
    for task, pairs in metrics.get("retention", {}).items():
        for name, pair in pairs.items():
            before, after = pair["before"], pair["after"]
            if before is not None and after is not None:
                label = f"{task}: {name}"
                numbers |= {
                    f"{label}{BEFORE}": before,
                    f"{label} after": after,
                    f"{label} change": after - before,
                }
    return numbers


def measure(
    runs: Mapping[str, Mapping[int, Metrics]], baseline: str, one_model: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Every number by method: n, mean, sd and intervals over runs, and the difference to the baseline.

    Args:
        runs: of every method, of whatever kind it is: the metrics of its runs by seed
        one_model: methods that are one model of all seeds, which no seed of the baseline is paired with
    """
    numbers = {method: {seed: numbers_of(run) for seed, run in some.items()} for method, some in runs.items()}
    names = dict.fromkeys(name for some in numbers.values() for run in some.values() for name in run)
    measured = {}
    for name in names:
        values = {
            method: {seed: run[name] for seed, run in some.items() if name in run} for method, some in numbers.items()
        }
        measured[name] = _by_method(values, baseline, one_model)
    return measured


def _by_method(
    values: Mapping[str, Mapping[int, float]], baseline: str, one_model: Collection[str]
) -> dict[str, Any]:  # fmt: skip
    """One number by method; methods without it are left out."""
    described, base = {}, values.get(baseline, {})
    for method, some in values.items():
        if some:
            compared = method != baseline and base
            difference = asdict(_difference(base, some, method in one_model)) if compared else None
            described[method] = {**asdict(statistics.summary(list(some.values()))), "difference": difference}
    return described


def _difference(base: Mapping[int, float], some: Mapping[int, float], one_model: bool) -> Difference:
    """Paired by the seeds that both have; the difference of means where there are none."""
    seeds = [] if one_model else [seed for seed in base if seed in some]
    if seeds:
        return statistics.paired([base[seed] for seed in seeds], [some[seed] for seed in seeds])
    means = [float(np.mean(list(numbers.values()))) for numbers in (base, some)]
    return Difference(means[1] - means[0], None, None, "of means")


def tables(measured: Mapping[str, Mapping[str, Any]], baseline: str) -> list[Table]:
    """The table of what `measure` gives; none where no run has such numbers."""
    columns = ["number", "method", "seeds", "mean", "sd", "95% interval", f"minus {baseline}", "95% interval of it"]
    rows = [
        [
            name,
            "(start)" if name.endswith(BEFORE) else method,
            stats["n"],
            _digits(stats["mean"]),
            _digits(stats["sd"]),
            _pair(stats["student"]),
        ]
        + ([_digits(plus["difference"], "+"), _pair(plus["interval"])] if (plus := stats["difference"]) else ["", ""])
        for name, methods in measured.items()
        for method, stats in methods.items()
        if not name.endswith(BEFORE) or method == baseline
    ]
    return [Table(TITLE, columns, rows)] if rows else []


def short_tables(measured: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """The same for a terminal: a line per method, with half of the 95% interval of every mean."""
    names = [name for name in measured if not name.endswith((BEFORE, " after"))]
    methods = dict.fromkeys(method for name in names for method in measured[name])
    rows = [[method, *(_mean(measured[name].get(method)) for name in names)] for method in methods]
    return [Table(TITLE, ["method", *names], rows)] if rows else []


def _mean(stats: Mapping[str, Any] | None) -> str:
    if stats is None:
        return ""
    ends = stats["student"]
    return f"{stats['mean']:.3g}" + ("" if ends is None else f" ± {(ends[1] - ends[0]) / 2:.2g}")


def _digits(value: float | None, sign: str = "") -> str:
    """Four digits that count: drift is small where scores are large."""
    return "" if value is None else f"{value:{sign}.4g}"


def _pair(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{_digits(ends[0])} to {_digits(ends[1])}"
