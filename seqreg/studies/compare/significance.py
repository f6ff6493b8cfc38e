"""All numbers of a comparison, from the results of its runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from seqreg.metrics import statistics, tags
from seqreg.metrics.rouge.score import rouge
from seqreg.metrics.statistics import Difference
from seqreg.metrics.texts import greater_is_better
from seqreg.metrics.variety import spread, variety
from seqreg.studies.compare import drift
from seqreg.studies.compare.arms import SOUPS
from seqreg.studies.compare.results import MethodResults, Results
from seqreg.studies.compare.search import Search
from seqreg.workbench.scores.results import BEFORE, not_better
from seqreg.workbench.text.atomic_files import to_json, write_text

BOTH, TWO_LEVEL = "seeds and examples", "two-level bootstrap"
ONE_MODEL = "one model of all seeds, not tested"
_PAIRS = 10
"""Pairs of seeds that agreement is measured on at most."""


def measure(results: Results) -> dict[str, Any]:
    """All numbers of a comparison; `without` are methods that have no score, `chance` what intervals count.

    Only the plan's primary comparisons have a p value; the others are `described`.
    """
    base, family, seeds = results.plan.baseline, results.plan.tested, results.plan.seeds
    over_seeds = [name for name in results.plan.methods[1:] if name not in results.plan.arms or name not in SOUPS]
    tested = {name: difference(results, name) for name in over_seeds if results.methods[name].metrics}
    corrected = _corrected({name: test for name, test in tested.items() if name in family}, family)
    jobs = Counter(job.method for job in results.plan.jobs(results.folder))
    what, costs = results.costs()
    methods, start = {}, _start(results)
    for method in results.scored:
        name, pairs = method.name, len(results.common_seeds(method.name))
        methods[name] = {
            **_summary(results, name), "seeds": sorted(method.metrics), "scores": list(results.scores(name).values()),
            "failed": len(method.failed), "open": len(method.open),
            "agreement": agreement(method, results.metric == "rougeL"),
            "seconds": float(np.median(list(costs[name].values()))),
            "time": None if name in results.plan.arms else
            _relative_cost(costs[name], costs[base], results.common_seeds(name)),
            "collapse": _collapse(method, results), "planned": jobs[name], "free": name in results.plan.arms,
            "validation": results.validation(name), "choices": _choices(method),
            "unlearned": not_better(results.metric, float(np.mean(list(results.scores(name).values()))), start["mean"]),
        }  # fmt: skip
        if name in tested:
            failed = {job.seed for some in (method, results.baseline) for job, _ in some.failed}
            change = tested[name] if name in family else replace(tested[name], p=None)
            methods[name] |= {
                "difference": asdict(change), "holm": corrected.get(name), "pairs": pairs,
                "described": name not in family,
                "reachable": statistics.reachable(pairs, len(family)),
                "detectable": _detectable(results, name, tested[name].test == TWO_LEVEL) if name in family else None,
                "missing": statistics.missing(pairs, results.plan.alpha, len(family)),
                "waiting": len(seeds) - pairs - len(failed),
            }  # fmt: skip
        elif name != base:
            methods[name] |= {
                "difference": asdict(_described(results, name)), "holm": None, "pairs": pairs, "missing": 0,
            }  # fmt: skip
    first = next(iter(results.baseline.metrics.values()))
    return {
        "metric": results.metric, "greater_is_better": results.greater_is_better, "split": results.split,
        "alpha": results.plan.alpha, "tests": len(family),
        "cost": what, "examples": results.examples, "examples_needed": statistics.EXAMPLES,
        "baseline": base, "planned": len(seeds), "start": start, "methods": methods,
        "without": {
            name: {"failed": len(method.failed), "open": len(method.open), "planned": jobs[name]}
            for name, method in results.methods.items() if not method.metrics
        },
        "chance": BOTH if tested and all(test.test == TWO_LEVEL for test in tested.values()) else "seeds alone",
        "signature": first["scores"][results.split].get("signature", ""),
        "others": {key: _other(results, key) for key in results.others},
        "free": against_free_arms(results), "search": _search(results.plan.search),
        "drift": drift.measure(
            {method.name: method.metrics for method in results.scored}, base, {*SOUPS} & {*results.plan.arms}
        ),
    }  # fmt: skip


def _start(results: Results) -> dict[str, Any]:
    """The scores of the models that the runs of the baseline started from; no mean where they were not scored."""
    found = [metrics["scores"].get(BEFORE, {}) for metrics in results.baseline.metrics.values()]
    scores = [numbers[results.metric] for numbers in found if numbers.get(results.metric) is not None]
    if not scores or results.split == "average":  # it was scored on one of the sets alone
        return {"n": 0, "mean": None}
    sd = float(np.std(scores, ddof=1)) if len(scores) > 1 else None
    return {"n": len(scores), "mean": float(np.mean(scores)), "sd": sd, "scores": scores}


def _detectable(results: Results, name: str, paired: bool) -> float | None:
    """The smallest difference to the baseline that is found with 80% power; None without a spread over seeds."""
    base, seeds = results.plan.baseline, results.common_seeds(name)
    first, second = (np.array([results.scores(some)[seed] for seed in seeds]) for some in (base, name))
    if len(seeds) < 2:
        return None
    variances = [np.var(second - first, ddof=1)] if paired else [np.var(some, ddof=1) for some in (first, second)]
    sd = math.sqrt(sum(variances) / 2)  # of pairs as `detectable` takes it: their differences vary by sqrt(2) sd
    if not sd:
        return None
    return statistics.detectable(sd, len(seeds), len(results.plan.tested), alpha=results.plan.alpha, paired=paired)


def _corrected(tested: Mapping[str, Difference], planned: Sequence[str]) -> dict[str, float | None]:
    """Holm's correction for all tests that were planned: one that cannot be made yet, or never, counts as p = 1."""
    known = {name: test.p for name, test in tested.items() if test.p is not None}
    holm = dict(zip(planned, statistics.holm([known.get(name, 1.0) for name in planned]), strict=True))
    return {name: holm[name] if name in known else None for name in tested}


def _described(results: Results, name: str, base: str = "", metric: str | None = None) -> Difference:
    """The difference of means to one model of all seeds: it has no spread over seeds, so nothing is tested."""
    means = [np.mean(list(results.scores(some, metric).values())) for some in (base or results.plan.baseline, name)]
    return Difference(float(means[1] - means[0]), None, None, ONE_MODEL)


def _choices(method: MethodResults) -> dict[str, list[Any]]:
    """How the models of a free arm were chosen, by seed: shares of the trained weights, members of a soup."""
    about = [metrics.get("soup", {}) for metrics in method.metrics.values()]
    keys = ("alpha", "members", "kept_as_trained")
    return {
        key: [facts[key] for facts in about if key in facts] for key in keys if any(key in facts for facts in about)
    }


def against_free_arms(results: Results) -> dict[str, Any]:
    """The free arm with the best validation score, and how every trained method does against it.

    These tests are a family of their own, with Holm's correction over the trained methods, the primary ones if named.
    """
    arms = [name for name in results.plan.arms if results.methods[name].metrics]
    if not arms:
        return {}
    best = (max if results.greater_is_better else min)(arms, key=results.validation)
    planned = [name for name in results.plan.trained[1:] if name in results.plan.tested]
    tested = {name: difference(results, name, base=best) for name in planned if results.methods[name].metrics}
    corrected = _corrected(tested, planned)
    return {
        "arm": best, "validation": {arm: results.validation(arm) for arm in arms},
        "methods": {name: {**asdict(test), "holm": corrected[name]} for name, test in tested.items()},
    }  # fmt: skip


def _search(search: Search) -> dict[str, Any]:
    """Budget, trials, validation scores and choices; nothing without a search."""
    if not search.budget:
        return {}
    stored = asdict(search)
    return {**{key: stored[key] for key in ("budget", "spaces", "trials", "scores", "chosen")}, "seeds": search.seeds}


def difference(results: Results, name: str, metric: str | None = None, base: str = "") -> Difference:
    """A method against the baseline or another: seeds and examples for texts, seeds for everything else."""
    base = base or results.plan.baseline
    if {name, base} & {*SOUPS} & {*results.plan.arms}:
        return _described(results, name, base, metric)
    seeds = [seed for seed in results.methods[base].metrics if seed in results.methods[name].metrics]
    if results.texts and seeds:
        return statistics.two_level(
            results.by_example(base, seeds, metric), results.by_example(name, seeds, metric), resamples=19_999
        )
    return statistics.welch(*(list(results.scores(method, metric).values()) for method in (base, name)))


def bounds(score: str) -> tuple[float, float]:
    """The least and the most that a score can be, in percent.

    >>> bounds("rougeL"), bounds("matthews"), bounds("wer")
    ((0.0, 100.0), (-100.0, 100.0), (0.0, inf))
    """
    if not greater_is_better(score):
        return 0.0, math.inf
    return (-100.0 if score in ("score", "matthews", "pearson", "spearman") else 0.0), 100.0


def _summary(results: Results, name: str, metric: str | None = None) -> dict[str, Any]:
    found = asdict(statistics.summary(list(results.scores(name, metric).values())))
    low, high = bounds(metric or results.metric)
    for key in ("interval", "student"):  # of a handful of seeds: it may reach beyond what the score can be
        if found[key] is not None:
            found[key] = tuple(float(np.clip(end, low, high)) for end in found[key])
    return found


def _other(results: Results, key: str) -> dict[str, Any]:
    """Another score: described, with intervals, and without a verdict, for that would need a larger correction."""
    base = results.plan.baseline
    return {
        name: {
            **_summary(results, name, key),
            "difference": None if name == base else asdict(difference(results, name, key)),
        }
        for name in (method.name for method in results.scored)
    }


def _relative_cost(costs: Mapping[int, float], base: Mapping[int, float], seeds: Sequence[int]) -> float | None:
    """What a run costs over what the baseline's does, median over seeds."""
    ratios = [costs[seed] / base[seed] for seed in seeds if base[seed]]
    return float(np.median(ratios)) if ratios else None


def _collapse(method: MethodResults, results: Results) -> dict[str, Any]:
    """How varied the predictions of a method are, mean over seeds, and with how many seeds they have collapsed."""
    seeds = []
    for lines in method.predictions.values():
        predictions, references = ([line.get(key) for line in lines] for key in ("prediction", "reference"))
        if results.metric in tags.METRICS:
            seeds.append(
                variety(*(tags.flat([str(text) for text in some]) for some in (predictions, references)), texts=False)
            )
        elif isinstance(predictions[0], float):
            seeds.append(spread(predictions, references))
        else:
            seeds.append(variety(predictions, references, texts=results.texts))
    means = {key: float(np.mean([seed[key] for seed in seeds])) for key in seeds[0] if key != "collapsed"}
    return {**means, "collapsed": sum(bool(seed["collapsed"]) for seed in seeds), "of": len(seeds)}


def agreement(method: MethodResults, texts: bool) -> dict[str, float] | None:
    """How alike two seeds of a method predict, mean over pairs: share of equal predictions; of `texts` ROUGE-L too.

    None for a single seed, and for numbers, which are never quite equal.
    """
    if any(isinstance(lines[0]["prediction"], float) for lines in method.predictions.values()):
        return None
    predictions = [[str(line["prediction"]) for line in lines] for lines in method.predictions.values()]
    pairs = list(combinations(predictions, 2))[:_PAIRS]
    if not pairs:
        return None
    equal = [np.array([one == other for one, other in zip(*pair, strict=True)]) for pair in pairs]
    shares = {"equal": 100 * float(np.mean([same.mean() for same in equal]))}
    if texts:  # equal texts count as 1: also two that are empty
        scores = [rouge(*pair, kinds=("rougeL",), resamples=1).scores["rougeL"][:, 2] for pair in pairs]
        alike = [float(np.where(same, 1.0, score).mean()) for same, score in zip(equal, scores, strict=True)]
        shares["rougeL"] = 100 * float(np.mean(alike))
    return shares


def write_examples(results: Results, path: Path) -> None:
    """Scores of every example, so that anybody can test again; of a regression the predictions."""
    first = next(iter(results.baseline.predictions.values()))
    key = results.column(results.metric) if results.texts else "correct" if "correct" in first[0] else "prediction"
    lines = []
    for place in range(len(first)):
        scores = {
            method.name: {str(seed): predictions[place][key] for seed, predictions in method.predictions.items()}
            for method in results.scored
        }
        lines.append(to_json({"index": place, "score": key, "methods": scores}) + "\n")
    write_text(path, "".join(lines))
