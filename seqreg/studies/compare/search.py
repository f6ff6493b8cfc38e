"""Search with equal coverage: which settings every method tries, and which of them the validation set chooses.

Every method first tries all learning rates of the grid. At the best of them it then tries every value of its other
settings, one changed at a time, and with what is left of the budget combinations of them in an order drawn at random.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seqreg.errors import BadInput, nearest
from seqreg.workbench.config import overlay
from seqreg.workbench.config.methods import term_of
from seqreg.workbench.config.run_config import Run

LEARNING_RATE = "optimisation.learning_rate"
FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Learning rates of every method over the recipe's, where no grid says others."""
TRIAL_SEED = 100_001
"""The seed of all trials. No run of a comparison may have it."""
ONLY_VALIDATION = [
    "evaluation.test_sets=false", "evaluation.eval_before_training=false", "evaluation.retention=false",
    "evaluation.drift_examples=0", "logging.tensorboard=false",
]  # fmt: skip
"""Settings of every trial: the test sets are not scored."""


@dataclass(frozen=True)
class Trial:
    """One setting to try: what it changes about its method, as `key=value`, and the seed."""

    settings: list[str]
    seed: int = TRIAL_SEED


@dataclass(frozen=True)
class Search:
    """The search of a comparison.

    Args:
        budget: the most trials of a method
        spaces: the values of every method by dotted key: learning rates, and of other settings the method's own first
        trials: of every method; those after the learning rates are known when these have ended
        scores: validation scores of the trials that have ended; None for one that failed
        rates: the trial of every method whose learning rate is the best
        chosen: the trial whose settings every method has in the comparison
        resolved: all settings of the methods that were chosen for
    """

    budget: int = 0
    spaces: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    rates: dict[str, int] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)
    resolved: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Search:
        """From the contents of a JSON file."""
        trials = {name: [Trial(**trial) for trial in some] for name, some in stored.get("trials", {}).items()}
        return cls(**{**stored, "trials": trials})

    @property
    def seeds(self) -> list[int]:
        return sorted({trial.seed for some in self.trials.values() for trial in some})

    def settings(self, method: str) -> list[str]:
        """The settings that were chosen for a method."""
        return self.trials[method][self.chosen[method]].settings if method in self.chosen else []


def begun(runs: Mapping[str, Run], budget: int, grid: Sequence[str], seeds: Sequence[int]) -> Search:
    """The search before its first trial: the spaces of all methods, and trials of their learning rates.

    Args:
        runs: the methods as they are without a search
        grid: `[METHOD:]KEY=[VALUE, ...]`, for all methods, for those that have the term of the key, or for one
        seeds: of the comparison
    """
    if max(seeds) >= TRIAL_SEED:
        raise BadInput(f"--seeds {max(seeds)}: --search tries settings with the seed {TRIAL_SEED}: choose smaller ones")
    given = _parsed(grid, runs)
    spaces = {name: _space(run, given.get(name, {})) for name, run in runs.items()}
    for name, space in spaces.items():
        rates, others = len(space[LEARNING_RATE]), len(_single(space))
        if budget < rates + others:
            raise BadInput(
                f"--search {budget}: {name} has {rates} learning rates and {others} other values to try: expected at "
                f"least {rates + others} trials, or a smaller --grid"
            )
    trials = {
        name: [Trial([_text(LEARNING_RATE, rate)]) for rate in space[LEARNING_RATE]] for name, space in spaces.items()
    }
    return Search(budget, spaces, trials)


def _parsed(grid: Sequence[str], runs: Mapping[str, Run]) -> dict[str, dict[str, list[Any]]]:
    """The values of a grid by method and dotted key."""
    given: dict[str, dict[str, list[Any]]] = {name: {} for name in runs}
    for text in grid:
        place, equals, listed = text.partition("=[")
        method, _, key = place.strip().rpartition(":")
        values = overlay.parse(f"[{listed}", f"--grid {text}") if equals else None
        if not key or not isinstance(values, list) or not values or any(values.count(value) > 1 for value in values):
            raise BadInput(
                f"--grid {text}: expected [METHOD:]KEY=[different values], such as {LEARNING_RATE}=[1e-4, 2e-4]"
            )
        if method and method not in runs:
            raise BadInput(f"--grid {text}: no method {method!r}; {nearest(method, list(runs))}")
        term = term_of(f"{key}=")
        reached = (
            [method] if method else [name for name, run in runs.items() if term is None or term in run.config.terms]
        )
        if not reached:
            raise BadInput(f"--grid {text}: no method has the term {term!r}")
        for name in reached:
            given[name][key] = values
    return given


def _space(run: Run, given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """What a method tries: the grid's values, else those that its recipes of terms declare; learning rates first.

    A setting that the method has of its own (`--terms r3f:weight=1.0`) is not searched.
    """
    rate = run.config.optimisation.learning_rate
    space = {LEARNING_RATE: [float(f"{rate * factor:.3g}") for factor in FACTORS], **run.search, **given}
    for key in [key for key in space if run.origins.origin(key).startswith("--terms ")]:
        del space[key]
    rates = space.pop(LEARNING_RATE, [rate])
    return {LEARNING_RATE: rates} | {
        key: [own, *(value for value in values if value != own)]
        for key, values in space.items()
        for own in [_value(run, key)]
    }


def _single(space: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Every value of every setting but the learning rate, one changed at a time."""
    return [{key: value} for key, (_, *others) in space.items() if key != LEARNING_RATE for value in others]


def further(space: Mapping[str, list[Any]], rate: Trial, name: str, budget: int) -> list[Trial]:
    """The trials at the best learning rate; the same ones always.

    Args:
        rate: the trial of that learning rate
        budget: trials of the method in all
    """
    others = {key: values for key, values in space.items() if key != LEARNING_RATE}
    products = (dict(zip(others, values, strict=True)) for values in itertools.product(*others.values()))
    changed = [{key: value for key, value in one.items() if value != others[key][0]} for one in products]
    combinations = [one for one in changed if len(one) > 1]
    random.Random(f"seqreg search: {name}").shuffle(combinations)
    settings = [*_single(space), *combinations][: budget - len(space[LEARNING_RATE])]
    return [Trial([*rate.settings, *(_text(key, value) for key, value in one.items())]) for one in settings]


def _text(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


def _value(run: Run, key: str) -> Any:
    """The value that a setting has in a run, also where it is the default of a term."""
    first, *rest = key.split(".")
    if first == "terms" and len(rest) >= 2:
        from seqreg.build import build_term

        found: Any = build_term(rest[0], run.config.terms[rest[0]])
        for name in rest[1:]:
            found = getattr(found, name, None)
        return found
    value: Any = run.config.model_dump(mode="json")
    for part in (first, *rest):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def best(method: str, scores: Sequence[float | None], *, greater_is_better: bool = True) -> int:
    """The trial of a method with the best validation score, of equal ones the first; a failed one is never chosen."""
    ended = {place: score for place, score in enumerate(scores) if score is not None}
    if not ended:
        raise BadInput(
            f"search: all trials of {method} failed, so that nothing can be chosen: --retry trains them again"
        )
    return max(ended, key=lambda place: (ended[place] if greater_is_better else -ended[place], -place))
