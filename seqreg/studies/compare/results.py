"""What the runs of a comparison left behind, as arrays: scores by seed, scores by example, texts, times."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqreg.errors import BadInput
from seqreg.metrics.texts import PSEUDOVALUE, greater_is_better
from seqreg.metrics.variety import VARIETY
from seqreg.studies.compare import jobs, plan
from seqreg.studies.compare.jobs import JobState
from seqreg.studies.compare.plan import ComparisonPlan, Job
from seqreg.workbench.run.record import check_collected
from seqreg.workbench.scores.results import cost, deciding, main_split, scores_examples
from seqreg.workbench.text import readers

PREDICTIONS = "predictions.jsonl"
_NOT_SCORES = ("score", "loss", "rows", "seconds", *VARIETY)
"""Numbers of a split that are not scores of their own."""
_ROUNDING = 1e-3
"""Percent by which a mean may differ because scores of examples are written with six digits."""


@dataclass
class MethodResults:
    """The finished runs of one method by seed: metrics and predictions; and its failed and open runs."""

    name: str
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    predictions: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    failed: list[tuple[Job, JobState]] = field(default_factory=list)
    open: list[tuple[Job, JobState]] = field(default_factory=list)


@dataclass
class Results:
    """All results of a comparison.

    Args:
        split: which scores are compared
        metric: the score that the verdict is about
        others: scores that are shown beside it
        texts: whether the methods generate, or tag words: every example has numbers of its own
    """

    folder: Path
    plan: ComparisonPlan
    methods: dict[str, MethodResults]
    split: str
    metric: str
    others: list[str]
    texts: bool

    @property
    def baseline(self) -> MethodResults:
        return self.methods[self.plan.baseline]

    @property
    def scored(self) -> list[MethodResults]:
        """The methods that have finished runs."""
        return [method for method in self.methods.values() if method.metrics]

    def scores(self, name: str, metric: str | None = None) -> dict[int, float]:
        """A method's score by seed, in percent."""
        key = metric or self.metric
        return {seed: metrics["scores"][self.split][key] for seed, metrics in self.methods[name].metrics.items()}

    def costs(self) -> tuple[str, dict[str, dict[int, float]]]:
        """What the runs cost: what was measured, the same for all, and its seconds by method and seed."""
        keys = [(name, seed) for name, method in self.methods.items() for seed in method.metrics]
        what, spent = cost([self.methods[name].metrics[seed] for name, seed in keys])
        seconds: dict[str, dict[int, float]] = {name: {} for name in self.methods}
        for (name, seed), value in zip(keys, spent, strict=True):
            seconds[name][seed] = value
        return what, seconds

    def validation(self, name: str) -> float:
        """The mean validation score of a method; that of the test set where there is no other."""
        splits = [metrics["scores"] for metrics in self.methods[name].metrics.values()]
        return float(np.mean([scores.get("validation", scores[self.split])["score"] for scores in splits]))

    @property
    def examples(self) -> int:
        """How many test examples every method was scored on."""
        return len(next(iter(self.baseline.predictions.values())))

    def column(self, metric: str) -> str:
        """The numbers of examples whose mean a score is: its own; its pseudo-values where it is no mean."""
        line = next(iter(self.baseline.predictions.values()))[0]
        return f"{metric}{PSEUDOVALUE}" if f"{metric}{PSEUDOVALUE}" in line else metric

    @property
    def greater_is_better(self) -> bool:
        return greater_is_better(self.metric)

    def common_seeds(self, name: str) -> list[int]:
        """Seeds that both a method and the baseline have finished."""
        return [seed for seed in self.baseline.metrics if seed in self.methods[name].metrics]

    def by_example(self, name: str, seeds: list[int], metric: str | None = None) -> NDArray[np.float64]:
        """Scores of texts or tags in percent, [seeds, examples]; of a score that is no mean their pseudo-values."""
        key, predictions = self.column(metric or self.metric), self.methods[name].predictions
        return 100 * np.array([[line[key] for line in predictions[seed]] for seed in seeds], dtype=np.float64)


def load(folder: Path, *, trust_changes: bool = False) -> Results:
    """Read everything that is finished; at least one run of the baseline must be.

    Args:
        trust_changes: read the scores of runs whose models have changed since
    """
    chosen = plan.read(folder)
    methods = {name: MethodResults(name) for name in chosen.methods}
    for job in chosen.jobs(folder):
        state, method = jobs.state(job), methods[job.method]
        record = jobs.finished_record(job)
        if record is not None:
            plan.check_record(chosen, job, record)
            method.metrics[job.seed] = check_collected(job.folder, record, trusted=trust_changes)
            method.predictions[job.seed] = _read_predictions(job.folder / PREDICTIONS)
        else:
            (method.failed if state.kind == jobs.FAILED else method.open).append((job, state))
    base = methods[chosen.baseline]
    if not base.metrics:
        raise BadInput(f"{folder}: {_why_no_baseline(base)}")
    _check_examples(folder, methods)
    seed = next(iter(base.metrics))
    scores, texts = base.metrics[seed]["scores"], scores_examples(base.metrics[seed])
    split = main_split(scores, texts)
    names = [key for key in scores[split].get("intervals", {}) if key != "score"]
    names = names or [k for k, value in scores[split].items() if k not in _NOT_SCORES and isinstance(value, float)]
    metric = deciding(base.metrics[seed], split) if texts else (names[0] if len(names) == 1 else "score")
    results = Results(folder, chosen, methods, split, metric, [key for key in names if key != metric], texts)
    _check_scores(results)
    return results


def _why_no_baseline(base: MethodResults) -> str:
    """Why there is nothing to compare with."""
    if not base.failed or base.open:
        return f"no run of {base.name} is finished yet: run the comparison first"
    _, state = base.failed[0]
    retry = "seqreg compare --retry trains them again"
    return f"all runs of {base.name} failed, so nothing can be compared; the first: {state.line}; {retry}"


def _read_predictions(path: Path) -> list[dict[str, Any]]:
    predictions = [line for _, line in readers.read(path)]
    if not predictions:
        raise BadInput(f"{path}: no predictions")
    return predictions


def _check_examples(folder: Path, methods: dict[str, MethodResults]) -> None:
    """Scores are compared example by example: all must be of the same test set."""
    first: list[Any] | None = None
    for method in methods.values():
        for seed, predictions in method.predictions.items():
            references = [line.get("reference") for line in predictions]
            first = references if first is None else first
            if references != first:
                raise BadInput(f"{folder}: {method.name}, seed {seed} was scored on other examples than the first run")


def _check_scores(results: Results) -> None:
    """Means come from one file and differences from another: both must be about the same predictions."""
    for name, method in results.methods.items() if results.texts else ():
        for seed, predictions in method.predictions.items():
            where = f"{results.folder}: {name}, seed {seed}: {PREDICTIONS} has"
            if any(results.column(results.metric) not in line for line in predictions):
                raise BadInput(f"{where} no {results.metric}")
            mean, stored = float(results.by_example(name, [seed]).mean()), results.scores(name)[seed]
            if abs(mean - stored) > _ROUNDING:
                raise BadInput(
                    f"{where} {results.metric} {mean:.2f}, metrics.json {stored:.2f} on {results.split}: was it "
                    "evaluated on another file? seqreg evaluate brings both back"
                )
