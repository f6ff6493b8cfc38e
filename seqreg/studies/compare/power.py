"""`seqreg compare --plan`: what a comparison would run, and the smallest difference that it could find."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput
from seqreg.metrics import statistics
from seqreg.studies.compare import jobs
from seqreg.studies.compare.arms import SOUPS
from seqreg.studies.compare.choices import covered
from seqreg.studies.compare.plan import ComparisonPlan
from seqreg.studies.compare.search import LEARNING_RATE, Search
from seqreg.workbench.scores.results import main_split, scores_examples, scores_of

POWER = 0.8
ASSUMED_SD = 1.0
"""Points, where nothing is known yet."""


@dataclass(frozen=True)
class SpreadOfSeeds:
    """The standard deviation of scores over seeds that a plan is judged with, in points, and where it is from."""

    sd: float
    source: str


def spread_of_seeds(plan: ComparisonPlan, folder: Path, given: float | None) -> SpreadOfSeeds:
    """What the command line gives, else that of finished runs of the baseline, else an assumption."""
    if given is not None:
        if not 0 < given < 1000:
            raise BadInput(f"--sd {given:g}: expected a standard deviation over seeds in points, such as 1.0")
        return SpreadOfSeeds(given, "given by --sd")
    runs = [job for job in plan.jobs(folder) if job.method == plan.baseline]
    scores = [_score(job.folder) for job in runs if jobs.finished_record(job) is not None]
    if len(scores) > 1 and (sd := statistics.summary(scores).sd):
        return SpreadOfSeeds(sd, f"of {len(scores)} finished runs of {plan.baseline} in {folder}")
    return SpreadOfSeeds(
        ASSUMED_SD, "an assumption: --sd gives another, and finished runs of the baseline the real one"
    )


def _score(folder: Path) -> float:
    metrics = scores_of(folder)
    return float(metrics["scores"][main_split(metrics["scores"], scores_examples(metrics))]["score"])


def preview(plan: ComparisonPlan, folder: Path, texts: bool, given_sd: float | None = None) -> dict[str, Any]:
    """The numbers of a plan, before anything runs.

    Args:
        texts: whether every example has numbers of its own: their differences are paired by seed
    """
    spread, seeds, tests = spread_of_seeds(plan, folder, given_sd), len(plan.seeds), len(plan.tested)
    everything = plan.jobs(folder)
    smallest = None
    if tests:
        smallest = statistics.detectable(spread.sd, seeds, tests, alpha=plan.alpha, power=POWER, paired=texts)
    return {
        "methods": plan.methods, "arms": plan.arms, "seeds": plan.seeds, "tests": tests, "alpha": plan.alpha,
        "trials": sum(_most_trials(plan.search, name) for name in plan.search.spaces), "budget": plan.search.budget,
        "search_seeds": plan.search.seeds, "spaces": plan.search.spaces,
        "runs": sum(not job.sources for job in everything), "evaluations": sum(bool(job.sources) for job in everything),
        "sd": spread.sd, "sd_source": spread.source, "power": POWER, "smallest_difference": smallest,
        "missing_seeds": statistics.missing(seeds, plan.alpha, tests) if tests else 0, "texts": texts,
    }  # fmt: skip


def _most_trials(search: Search, name: str) -> int:
    """The trials that a method will have had in the end."""
    space = search.spaces[name]
    others = [len(values) for key, values in space.items() if key != LEARNING_RATE]
    return min(search.budget, len(space[LEARNING_RATE]) + math.prod(others) - 1)


def sentences(numbers: dict[str, Any]) -> list[str]:
    """The same in plain words."""
    base, *others = numbers["methods"]
    one_model = [name for name in numbers["arms"] if name in SOUPS]
    lines = [
        f"Methods: {base} (the baseline), {', '.join(others)}. Seeds: {', '.join(map(str, numbers['seeds']))}.",
        f"{numbers['trials']} trials of a search, {numbers['runs']} runs, {numbers['evaluations']} free arms to score.",
    ]
    if numbers["budget"]:
        seeds = ", ".join(map(str, numbers["search_seeds"]))
        lines.append(
            f"Every trained method has at most {numbers['budget']} trials on the validation set, with seeds that no "
            f"run has ({seeds})."
        )
        lines += covered(numbers["spaces"])
    if one_model:
        lines.append(f"Not tested: {', '.join(one_model)}: a soup is one model of all seeds.")
    if numbers["missing_seeds"]:
        lines.append(
            f"No verdict is possible: {numbers['tests']} tests need {numbers['missing_seeds']} more seeds per method "
            f"before p can be at most {numbers['alpha']:g} without leaning on normality."
        )
    if numbers["smallest_difference"] is not None and numbers["tests"]:
        test = "a test of pairs of seeds" if numbers["texts"] else "Welch's test"
        beyond = "; other test examples come on top of it, as only seeds are counted here" if numbers["texts"] else ""
        lines.append(
            f"Smallest difference that {test} finds with "
            f"{100 * numbers['power']:.0f}% power, after Holm's correction over {numbers['tests']} tests at "
            f"{numbers['alpha']:g}: {numbers['smallest_difference']:.2f} points, for an sd over seeds of "
            f"{numbers['sd']:.2f} ({numbers['sd_source']}){beyond}."
        )
    return [*lines, "Nothing was run, and nothing was written."]
