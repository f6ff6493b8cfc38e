"""Equal search budgets: which settings every method tries, and which of them the validation set chooses.

The first trial of a method is its recipe as it is. The others are drawn without replacement from the product of what
its recipes of terms declare (`search:`) and of the learning rates below. Where a space is smaller than the budget, all
of it is tried, then further learning rates, then the same settings with the next seed.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seqreg.errors import BadInput
from seqreg.workbench.config.run_config import Run

LEARNING_RATE = "optimisation.learning_rate"
FACTORS = (0.5, 1.0, 2.0)
"""Learning rates of every method, over the recipe's own."""
FURTHER_FACTORS = (0.25, 4.0, 0.7, 1.4, 0.35, 2.8, 0.125, 8.0)
"""Those that follow where a space is smaller than the budget."""
FIRST_SEED = 100_001
"""The seed of all trials; those that repeat a setting have the next ones. No run of a comparison may have them."""
ONLY_VALIDATION = [
    "evaluation.test_sets=false", "evaluation.eval_before_training=false", "evaluation.retention=false",
    "evaluation.drift_examples=0", "logging.tensorboard=false",
]  # fmt: skip
"""Settings of every trial: the test sets are not scored."""


@dataclass(frozen=True)
class Trial:
    """One setting to try: what it changes about its method, as `key=value`, and the seed."""

    settings: list[str]
    seed: int


@dataclass(frozen=True)
class Search:
    """The search of a comparison.

    Args:
        budget: trials of every method
        trials: of every method
        scores: validation scores of the trials, when all have ended; None for one that failed
        chosen: the trial whose settings every method has in the comparison
        resolved: all settings of the methods that were chosen for
    """

    budget: int = 0
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    scores: dict[str, list[float | None]] = field(default_factory=dict)
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


def check_budget(budget: int, seeds: Sequence[int]) -> None:
    """Refuse a budget that is none, and seeds of the comparison that trials may have."""
    if not 2 <= budget <= 1000:
        raise BadInput(f"--search {budget}: expected how many trials every method has, from 2 to 1000")
    if max(seeds) >= FIRST_SEED:
        raise BadInput(
            f"--seeds {max(seeds)}: --search tries settings with seeds from {FIRST_SEED}: choose smaller ones"
        )


def trials(run: Run, method: str, budget: int) -> list[Trial]:
    """As many settings as the budget allows; the same ones always.

    Args:
        run: the method as it is without a search
    """
    space, rate = dict(run.search), run.config.optimisation.learning_rate
    declared = space.pop(LEARNING_RATE, None)
    fixed = run.origins.origin(LEARNING_RATE).startswith("--terms ")
    rates = declared or ([rate] if fixed else _rates(rate, FACTORS))
    further = [] if declared or fixed else _rates(rate, FURTHER_FACTORS)
    recipe = {**{key: _value(run, key) for key in space}, LEARNING_RATE: rate}
    settings = [recipe]
    for some in (rates, further):
        settings += _shuffled({**space, LEARNING_RATE: some}, method, leave_out=recipe)
    texts = [[f"{key}={json.dumps(value)}" for key, value in one.items() if value != recipe[key]] for one in settings]
    rounds = itertools.count(FIRST_SEED)
    endless = (Trial(text, seed) for seed in rounds for text in texts)
    return list(itertools.islice(endless, budget))


def _rates(rate: float, factors: Sequence[float]) -> list[float]:
    return [rate if factor == 1 else float(f"{rate * factor:.3g}") for factor in factors]


def _shuffled(space: Mapping[str, Sequence[Any]], method: str, leave_out: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All combinations in an order that depends on the name of the method alone."""
    combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    combinations = [one for one in combinations if one != leave_out]
    random.Random(f"seqreg search: {method}").shuffle(combinations)
    return combinations


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


def choose(
    scores: Mapping[str, Sequence[float | None]],
    tried: Mapping[str, Sequence[Trial]],
    *,
    greater_is_better: bool = True,
) -> dict[str, int]:
    """The trial of every method with the best validation score; of one setting with several seeds the mean counts.

    Of equal ones the first is taken. A trial that failed is never chosen, and refuses a setting its mean.
    """
    chosen = {}
    for method, some in tried.items():
        by_setting: dict[tuple[str, ...], list[int]] = {}
        for place, trial in enumerate(some):
            by_setting.setdefault(tuple(trial.settings), []).append(place)
        means = {
            places[0]: sum(values) / len(values)
            for places in by_setting.values()
            if len(values := [score for place in places if (score := scores[method][place]) is not None]) == len(places)
        }
        if not means:
            raise BadInput(
                f"search: all trials of {method} failed, so that nothing can be chosen: --retry trains them again"
            )
        sign = 1 if greater_is_better else -1
        chosen[method] = max(means, key=lambda place: (sign * means[place], -place))
    return chosen
