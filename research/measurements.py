"""Numbers of single runs, by method and seed, from the files that commands leave; and what they say about methods."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from seqreg.metrics import statistics
from seqreg.metrics.classification import spearman
from seqreg.metrics.statistics import Difference

Files = Mapping[str, Any]
"""The JSON files of a step, by their paths in its folder."""
Numbers = dict[str, dict[str, dict[int, float]]]
"""What was measured -> method -> seed -> value."""
_RESAMPLES = 9999


def numbers(command: str, files: Files, methods: Sequence[str], measures: Sequence[str]) -> Numbers:
    """All numbers of a step that its measures name; all that there are if they name none."""
    found: Numbers = {}
    for name, method, seed, value in _NUMBERS[command](files, methods, measures):
        wanted = not measures or is_one(name, measures)
        if wanted and value is not None and np.isfinite(value):
            found.setdefault(name, {}).setdefault(method, {})[seed] = float(value)
    order = {method: place for place, method in enumerate(methods)}
    return {
        name: dict(sorted(values.items(), key=lambda item: order.get(item[0], len(order))))
        for name, values in found.items()
    }


Found = Iterator[tuple[str, str, int, Any]]


def _of_runs(files: Files, methods: Sequence[str], measures: Sequence[str]) -> Found:
    """Dotted keys of metrics.json; nothing unless some are named."""
    for path, metrics in files.items():
        method, seed, *rest = [*path.split("/"), ""]
        if rest[:1] == ["metrics.json"] and method in methods:
            for name, value in flat(metrics):
                if is_one(name, measures):
                    yield name, method, _seed(seed), value


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in nested mappings, by dotted key."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def _seed(folder: str) -> int:
    return int(folder.removeprefix("seed-"))


def _by_seed(files: Files, kind: str) -> Iterator[tuple[int, Any, list[str]]]:
    """The finding of every seed, and the methods of its models in their order: those of the folders in its command."""
    for path, finding in files.items():
        seed, _, name = path.partition("/")
        if name == f"{kind}.json":
            words = [word for word in shlex.split(finding["command"]) if word.endswith(f"/{seed}")]
            yield _seed(seed), finding["values"], [word.split("/")[-2] for word in words]


def _of_probe(files: Files, methods: Sequence[str], measures: Sequence[str]) -> Found:
    for seed, values, names in _by_seed(files, "probe"):
        models = list(values["models"].items())
        start = [model for name, model in models if name.startswith("pretrained")]
        trained = [model for name, model in models if not name.startswith("pretrained")]
        pairs = [*zip(names, trained, strict=True), *(("pretrained", model) for model in start[:1])]
        for method, model in pairs:
            for task, probe in model["probes"].items():
                yield f"probe of {task}", method, seed, probe["score"]
            yield "effective rank", method, seed, model["layers"][-1]["rank"]
            yield "CKA to the pretrained", method, seed, model["layers"][-1]["cka"]


def _of_chain(files: Files, methods: Sequence[str], measures: Sequence[str]) -> Found:
    values = files["evidence/chain.json"]["values"]
    tasks, steps = values["tasks"], values["steps"]
    for model in values["models"]:
        after = model["after"]
        for place, step in enumerate(steps):
            key = model["method"], model["seed"]
            yield f"{tasks[0]} after {place} {step}", *key, after[place]["probes"][tasks[0]]["score"]
            if place and place % len(tasks) == 0:
                mean = float(np.mean([after[place]["probes"][task]["score"] for task in tasks]))
                yield f"mean over tasks after cycle {place // len(tasks)}", *key, mean
            yield f"effective rank after {place} {step}", *key, after[place]["layers"][-1]["rank"]
            yield f"CKA after {place} {step}", *key, after[place]["layers"][-1]["cka"]


def _of_shift(files: Files, methods: Sequence[str], measures: Sequence[str]) -> Found:
    for seed, values, names in _by_seed(files, "shift"):
        for method, model in zip(names, values["models"].values(), strict=True):
            for share, score in model["target"].items():
                yield f"{values['target']} with {100 * float(share):g}%", method, seed, score["score"]
            if model["source"]:
                yield "own task", method, seed, model["source"]["score"]


def _of_calibrate(files: Files, methods: Sequence[str], measures: Sequence[str]) -> Found:
    for path, finding in files.items():
        method, _, rest = path.partition("/")
        seed, _, name = rest.partition("/")
        if name == "calibrate.json":
            first = next(iter(finding["values"]["parts"].values()))
            for when, values in first.items():
                for key in ("accuracy", "ece", "adaptive_ece", "brier", "nll", "confidence"):
                    yield f"{key} {when}", method, _seed(seed), values[key]
            yield "temperature", method, _seed(seed), finding["values"]["temperature"]


def _of_robustness(files: Files, methods: Sequence[str], measures: Sequence[str]) -> Found:
    for seed, values, names in _by_seed(files, "robustness"):
        runs = dict(zip(dict.fromkeys(row["run"] for row in values["rows"]), names, strict=True))
        groups: dict[tuple[str, str], list[float]] = {}
        shares: dict[tuple[str, str], list[float]] = {}
        for row in values["rows"]:
            plain = {"none": "unperturbed", "order": "order", "source": "source"}
            what = plain.get(row["noise"], f"{row['noise']} {row['level']:g}")
            groups.setdefault((what, runs[row["run"]]), []).append(row["score"])
            if row.get("most_common") is not None:
                shares.setdefault((f"most common answer, {what}", runs[row["run"]]), []).append(row["most_common"])
        for (what, method), numbers in (*groups.items(), *shares.items()):
            yield what, method, seed, float(np.mean(numbers))


_NUMBERS = {
    "train": lambda files, methods, measures: iter(()),
    "compare": _of_runs,
    "chain": _of_chain,
    "probe": _of_probe,
    "shift": _of_shift,
    "calibrate": _of_calibrate,
    "robustness": _of_robustness,
}


@dataclass(frozen=True)
class MethodMean:
    """A method's values of one measure over seeds, and its difference to the baseline.

    Args:
        difference: None for the baseline, and where either has no value
        holm: the corrected p of a difference that is tested
        missing: seeds that a verdict would need beside those that there are
    """

    method: str
    n: int
    mean: float
    sd: float | None
    difference: Difference | None
    holm: float | None = None
    missing: int = 0

    def verdict(self, alpha: float = 0.05) -> str:
        """In a word or two; "" where nothing is tested."""
        if self.difference is not None and self.difference.difference == 0 and self.difference.interval == (0.0, 0.0):
            return "not measured: every run has the same value"
        if self.holm is None or self.difference is None:
            return "described and not tested" if self.difference is not None else ""
        if self.missing:
            return f"{self.missing} more seed{'s' if self.missing > 1 else ''} needed"
        if self.holm > alpha:
            return "no difference shown"
        return "significantly higher" if self.difference.difference > 0 else "significantly lower"


def compared(
    found: Numbers, baseline: str, primary: Sequence[str], judged: Sequence[str]
) -> dict[str, list[MethodMean]]:
    """Every measure with all its methods. Welch's test over seeds, Holm over primary methods and judged measures."""
    differences: dict[tuple[str, str], Difference] = {}
    for name, methods in found.items():
        for method, values in methods.items():
            if method != baseline and baseline in methods:
                differences[name, method] = statistics.welch(
                    list(methods[baseline].values()), list(values.values())
                )  # fmt: skip
    tested = [key for key in differences if key[1] in primary and is_one(key[0], judged)]
    planned = max(len(tested), len(primary) * len([name for name in found if is_one(name, judged)]))
    known = [differences[key].p if differences[key].interval != (0.0, 0.0) else None for key in tested]
    corrected = statistics.holm([1.0 if p is None else p for p in known] + [1.0] * (planned - len(tested)))
    holm = {key: corrected[place] for place, key in enumerate(tested) if known[place] is not None}
    means: dict[str, list[MethodMean]] = {}
    for name, methods in found.items():
        for method, values in methods.items():
            scores, change = list(values.values()), differences.get((name, method))
            pairs = min(len(scores), len(methods.get(baseline, ())))
            means.setdefault(name, []).append(
                MethodMean(
                    method, len(scores), float(np.mean(scores)),
                    float(np.std(scores, ddof=1)) if len(scores) > 1 else None, change, holm.get((name, method)),
                    statistics.missing(pairs, 0.05, planned) if (name, method) in holm else 0,
                )
            )  # fmt: skip
    return means


def is_one(name: str, patterns: Sequence[str]) -> bool:
    """Whether a measure is one of those that patterns name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's correlation of two numbers over runs: of all, and inside the methods of every step.

    Args:
        interval: by a bootstrap that draws methods, for runs of one method are not independent
        within: the mean over methods of the correlation over seeds, which knows no difference between methods
        points: x and y of every run by step and method
    """

    runs: int
    overall: float
    interval: tuple[float, float]
    within: float | None
    within_interval: tuple[float, float] | None
    points: dict[str, list[tuple[float, float]]]


def correlation(points: Mapping[str, Sequence[tuple[float, float]]]) -> RankCorrelation | None:
    """Of points by group (a step and a method); None with fewer than three groups or six runs.

    Ranks are taken inside a step before: steps differ in the scale of both numbers.
    """
    ranked = _ranked_in_steps(points)
    groups = [np.array(group) for group in ranked.values() if group]
    if len(groups) < 3 or sum(map(len, groups)) < 6:
        return None
    rng = np.random.default_rng(0)

    def overall(chosen: Sequence[np.ndarray]) -> float:
        together = np.concatenate(chosen)
        return spearman(together[:, 0], together[:, 1])

    drawn = [overall([groups[i] for i in rng.integers(len(groups), size=len(groups))]) for _ in range(_RESAMPLES // 9)]
    inside = [spearman(group[:, 0], group[:, 1]) for group in groups if len(group) >= 4]
    within = [float(np.mean(rng.choice(inside, len(inside)))) for _ in range(_RESAMPLES)] if len(inside) > 2 else []
    return RankCorrelation(
        sum(map(len, groups)), overall(groups), _ends(drawn), float(np.mean(inside)) if inside else None,
        _ends(within) if within else None, {name: list(group) for name, group in points.items()},
    )  # fmt: skip


def _ranked_in_steps(points: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, list[list[float]]]:
    """The ranks of both numbers inside their step, as shares of its runs."""
    ranked: dict[str, list[list[float]]] = {}
    for step in dict.fromkeys(name.partition(":")[0] for name in points):
        names = [name for name in points if name.partition(":")[0] == step]
        values = np.array([point for name in names for point in points[name]], dtype=float).reshape(-1, 2)
        if not len(values):
            continue
        order = rankdata(values, axis=0) / len(values)
        for name in names:
            ranked[name], order = order[: len(points[name])].tolist(), order[len(points[name]) :]
    return ranked


def _ends(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)
