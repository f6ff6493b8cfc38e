"""What the trainings of a comparison left behind, as arrays: scores by seed, scores by example, texts, times."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqreg.errors import BadInput
from seqreg.metrics.rouge.score import rouge
from seqreg.metrics.variety import VARIETY
from seqreg.studies.compare import comparison, jobs
from seqreg.studies.compare.comparison import Job, Plan
from seqreg.studies.compare.jobs import State
from seqreg.workbench.data import readers as tables
from seqreg.workbench.scores.results import cost, main_split, scores_of

PREDICTIONS = "predictions.jsonl"
_BESIDE = ("score", "loss", "rows", "seconds", *VARIETY)
"""Numbers of a split that are not scores of their own."""
_ROUNDING = 1e-3
"""Percent by which a mean may differ because scores of examples are written with six digits."""
_PAIRS = 10
"""Pairs of seeds that agreement is measured on at most."""


@dataclass
class Method:
    """One method: its finished trainings by seed."""

    name: str
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    rows: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    failed: list[tuple[Job, State]] = field(default_factory=list)
    open: list[tuple[Job, State]] = field(default_factory=list)


@dataclass
class Gathered:
    """All of a comparison.

    Args:
        split: which scores are compared
        metric: the score that the verdict is about
        others: scores that are shown beside it
        texts: whether the methods generate
    """

    folder: Path
    plan: Plan
    methods: dict[str, Method]
    split: str
    metric: str
    others: list[str]
    texts: bool

    def scores(self, name: str, metric: str | None = None) -> dict[int, float]:
        """A method's score by seed, in percent."""
        key = metric or self.metric
        return {seed: found["scores"][self.split][key] for seed, found in self.methods[name].metrics.items()}

    def costs(self) -> tuple[str, dict[str, dict[int, float]]]:
        """What the trainings cost: what was measured, the same for all, and its seconds by method and seed."""
        keys = [(name, seed) for name, method in self.methods.items() for seed in method.metrics]
        what, spent = cost([self.methods[name].metrics[seed] for name, seed in keys])
        found: dict[str, dict[int, float]] = {name: {} for name in self.methods}
        for (name, seed), value in zip(keys, spent, strict=True):
            found[name][seed] = value
        return what, found

    @property
    def examples(self) -> int:
        """How many test examples every method was scored on."""
        return len(next(rows for method in self.methods.values() for rows in method.rows.values()))

    def common(self, name: str) -> list[int]:
        """Seeds that both a method and the baseline have finished."""
        return [seed for seed in self.methods[self.plan.baseline].metrics if seed in self.methods[name].metrics]

    def by_example(self, name: str, seeds: list[int], metric: str | None = None) -> NDArray[np.float64]:
        """Scores of generated texts in percent, [seeds, examples]."""
        key, rows = metric or self.metric, self.methods[name].rows
        return 100 * np.array([[row[key] for row in rows[seed]] for seed in seeds], dtype=np.float64)


def gather(folder: Path) -> Gathered:
    """Read everything that is finished; at least one training of the baseline must be."""
    chosen = comparison.read(folder)
    methods = {name: Method(name) for name in chosen.methods}
    for job in chosen.jobs(folder):
        found, method = jobs.state(job), methods[job.method]
        record = jobs.record_of(job)
        if record is not None:
            comparison.check_filed(chosen, job, record)
            method.metrics[job.seed] = scores_of(job.folder)
            method.rows[job.seed] = _rows(job.folder / PREDICTIONS)
        elif found.kind == jobs.FAILED:
            method.failed.append((job, found))
        else:
            method.open.append((job, found))
    base = methods[chosen.baseline]
    if not base.metrics:
        raise BadInput(f"{folder}: {_why_none(base)}")
    _same_examples(folder, methods)
    seed = next(iter(base.metrics))
    scores, texts = base.metrics[seed]["scores"], "rougeL" in base.rows[seed][0]
    split = main_split(scores, texts)
    names = [key for key in scores[split].get("intervals", {}) if key != "score"]
    names = names or [key for key, value in scores[split].items() if key not in _BESIDE and isinstance(value, float)]
    metric = "rougeL" if texts else (names[0] if len(names) == 1 else "score")
    whole = Gathered(folder, chosen, methods, split, metric, [key for key in names if key != metric], texts)
    _same_scores(whole)
    return whole


def _why_none(base: Method) -> str:
    """Why there is nothing to compare with."""
    if not base.failed or base.open:
        return f"no training of {base.name} is finished yet: run the comparison first"
    _, state = base.failed[0]
    return f"all trainings of {base.name} failed, so nothing can be compared; the first: {state.line} (--retry)"


def _rows(path: Path) -> list[dict[str, Any]]:
    found = [row for _, row in tables.read(path)]
    if not found:
        raise BadInput(f"{path}: no predictions")
    return found


def _same_examples(folder: Path, methods: dict[str, Method]) -> None:
    """Scores are compared example by example: all must be of the same test set."""
    first: list[Any] | None = None
    for method in methods.values():
        for seed, rows in method.rows.items():
            references = [row.get("reference") for row in rows]
            first = references if first is None else first
            if references != first:
                raise BadInput(f"{folder}: {method.name}, seed {seed} was scored on other examples than the first run")


def _same_scores(found: Gathered) -> None:
    """Means come from one file and differences from another: both must be about the same predictions."""
    for name, method in found.methods.items() if found.texts else ():
        for seed, rows in method.rows.items():
            if any(found.metric not in row for row in rows):
                raise BadInput(f"{found.folder}: {name}, seed {seed}: {PREDICTIONS} has no {found.metric}")
            mean, said = float(found.by_example(name, [seed]).mean()), found.scores(name)[seed]
            if abs(mean - said) > _ROUNDING:
                raise BadInput(
                    f"{found.folder}: {name}, seed {seed}: {PREDICTIONS} has {found.metric} {mean:.2f}, metrics.json "
                    f"{said:.2f} on {found.split}: was it evaluated on another file? seqreg evaluate brings both back"
                )


def _alike(ones: list[str], others: list[str]) -> float:
    """Mean ROUGE-L of texts with each other, 1 for those that are equal: also for two that are empty."""
    scores = rouge(ones, others, kinds=("rougeL",), resamples=1).scores["rougeL"][:, 2]
    return float(np.where([one == other for one, other in zip(ones, others, strict=True)], 1.0, scores).mean())


def agreement(method: Method, texts: bool) -> dict[str, float] | None:
    """How alike two seeds of a method predict, mean over pairs: share of equal predictions; of texts ROUGE-L too.

    None for a single seed, and for numbers, which are never quite equal.
    """
    if any(isinstance(row["prediction"], float) for rows in method.rows.values() for row in rows[:1]):
        return None
    said = [[str(row["prediction"]) for row in rows] for rows in method.rows.values()]
    pairs = list(combinations(said, 2))[:_PAIRS]
    if not pairs:
        return None
    same = float(np.mean([np.mean([one == other for one, other in zip(*pair, strict=True)]) for pair in pairs]))
    found = {"equal": 100 * same}
    if texts:
        found["rougeL"] = 100 * float(np.mean([_alike(*pair) for pair in pairs]))
    return found
