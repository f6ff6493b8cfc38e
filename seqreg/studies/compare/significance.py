"""All numbers of a comparison, from what its trainings left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from seqreg.metrics import statistics
from seqreg.metrics.statistics import Difference, Summary
from seqreg.metrics.variety import spread, variety
from seqreg.studies.compare.results import Gathered, agreement
from seqreg.workbench.text.atomic_files import to_json, write_text

BOTH, TWO_LEVEL = "seeds and examples", "two-level bootstrap"


def measure(found: Gathered) -> dict[str, Any]:
    """All numbers of a comparison; `without` are methods that have no score, `chance` what intervals count."""
    planned = found.plan.methods[1:]
    tested = {name: difference(found, name) for name in planned if found.methods[name].metrics}
    corrected = _corrected(tested, planned)
    what, costs = found.costs()
    methods = {}
    for name, method in found.methods.items():
        if not method.metrics:
            continue
        pairs = len(found.common(name))
        methods[name] = {
            **asdict(_summary(found, name)),
            "seeds": sorted(method.metrics),
            "scores": list(found.scores(name).values()),
            "failed": len(method.failed),
            "open": len(method.open),
            "agreement": agreement(method, found.texts),
            "seconds": float(np.median(list(costs[name].values()))),
            "time": _ratio(found, name, costs),
            "collapse": _collapse(found, name),
        }
        if name in tested:
            methods[name] |= {
                "difference": asdict(tested[name]), "holm": corrected[name], "pairs": pairs,
                "reachable": statistics.reachable(pairs, len(planned)),
                "missing": statistics.missing(pairs, found.plan.alpha, len(planned)),
                "waiting": len(found.plan.seeds) - pairs - len(_failed(found, name)),
            }  # fmt: skip
    return {
        "metric": found.metric, "split": found.split, "alpha": found.plan.alpha, "tests": len(planned),
        "cost": what, "examples": found.examples, "examples_needed": statistics.EXAMPLES,
        "baseline": found.plan.baseline, "planned": len(found.plan.seeds), "methods": methods,
        "without": {
            name: {"failed": len(method.failed), "open": len(method.open)}
            for name, method in found.methods.items() if not method.metrics
        },
        "chance": BOTH if all(one.test == TWO_LEVEL for one in tested.values()) else "seeds alone",
        "signature": next(iter(found.methods[found.plan.baseline].metrics.values()))["scores"][found.split].get(
            "signature", ""
        ),
        "others": {key: _other(found, key) for key in found.others},
    }  # fmt: skip


def _corrected(tested: Mapping[str, Difference], planned: Sequence[str]) -> dict[str, float | None]:
    """Holm's correction for all tests that were planned: one that cannot be made yet, or never, counts as p = 1."""
    known = {name: one.p for name, one in tested.items() if one.p is not None}
    found = dict(zip(planned, statistics.holm([known.get(name, 1.0) for name in planned]), strict=True))
    return {name: found[name] if name in known else None for name in tested}


def _failed(found: Gathered, name: str) -> set[int]:
    """Seeds that failed with a method or with the baseline."""
    return {job.seed for one in (name, found.plan.baseline) for job, _ in found.methods[one].failed}


def difference(found: Gathered, name: str, metric: str | None = None) -> Difference:
    """A method against the baseline: seeds and examples for texts, seeds for everything else."""
    base, seeds = found.plan.baseline, found.common(name)
    if found.texts and seeds:
        return statistics.two_level(
            found.by_example(base, seeds, metric), found.by_example(name, seeds, metric), resamples=19_999
        )
    scores = [list(found.scores(one, metric).values()) for one in (base, name)]
    return statistics.welch(scores[0], scores[1])


def _summary(found: Gathered, name: str, metric: str | None = None) -> Summary:
    return statistics.summary(list(found.scores(name, metric).values()))


def _other(found: Gathered, key: str) -> dict[str, Any]:
    """Another score: described, with intervals, and without a verdict, for that would need a larger correction."""
    rows = {}
    for name, method in found.methods.items():
        if method.metrics:
            plus = difference(found, name, key) if name != found.plan.baseline else None
            rows[name] = {**asdict(_summary(found, name, key)), "difference": asdict(plus) if plus else None}
    return rows


def _ratio(found: Gathered, name: str, costs: Mapping[str, Mapping[int, float]]) -> float | None:
    """What a training costs over what the baseline's does, median over seeds."""
    mine, base = costs[name], costs[found.plan.baseline]
    ratios = [mine[seed] / base[seed] for seed in found.common(name) if base[seed]]
    return float(np.median(ratios)) if ratios else None


def _collapse(found: Gathered, name: str) -> dict[str, Any]:
    """How varied the predictions of a method are, mean over seeds, and with how many seeds they have collapsed."""
    seeds = [_varied(rows, found.texts) for rows in found.methods[name].rows.values()]
    means = {key: float(np.mean([one[key] for one in seeds])) for key in seeds[0] if key != "collapsed"}
    return {**means, "collapsed": sum(bool(one["collapsed"]) for one in seeds), "of": len(seeds)}


def _varied(rows: Sequence[Mapping[str, Any]], texts: bool) -> dict[str, float]:
    said, truth = ([row.get(key) for row in rows] for key in ("prediction", "reference"))
    if isinstance(said[0], float):
        return spread(said, truth)
    return variety(said, truth, texts=texts)


def write_examples(found: Gathered, path: Path) -> None:
    """Scores of every example, so that anybody can test again; of a regression the predictions."""
    methods = [method for method in found.methods.values() if method.rows]
    first = next(iter(methods[0].rows.values()))
    key = found.metric if found.texts else "correct" if "correct" in first[0] else "prediction"
    lines = []
    for place in range(len(first)):
        scores = {m.name: {str(seed): rows[place][key] for seed, rows in m.rows.items()} for m in methods}
        lines.append(to_json({"index": place, "score": key, "methods": scores}) + "\n")
    write_text(path, "".join(lines))
