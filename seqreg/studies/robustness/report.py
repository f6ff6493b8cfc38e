"""Sentences and tables of `seqreg robustness`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from seqreg.studies.common.findings import Table
from seqreg.workbench.config.cards import Card

CLEAN, WITHOUT_LEVEL = "none", ("order", "source")
INDEPENDENT = 99.0
"""Percent of answers that stay the same with another's source, from which a model is said not to depend on its own."""
HELPS = 1.01
"""The loss with another's source over that with its own, below which a source is said not to help."""


@dataclass(frozen=True)
class ConditionScore:
    """One condition of one run: score and agreement with the clean answers in percent, loss per label or token.

    Args:
        most_common: the share of the most common class in percent: where it is high, a score under attack says that the
            model has one answer, and not that it withstands; None where there are no classes
    """

    run: str
    noise: str
    level: float
    seed: int
    score: float
    agreement: float
    loss: float
    most_common: float | None = None


@dataclass(frozen=True)
class Point:
    """A run, a noise and a level: means over draws, and the standard deviation of the score, if there are several."""

    run: str
    noise: str
    level: float
    score: float
    spread: float | None
    agreement: float
    loss: float


def points(scores: Sequence[ConditionScore]) -> list[Point]:
    """In the order in which they were measured."""
    groups: dict[tuple[str, str, float], list[ConditionScore]] = {}
    for score in scores:
        groups.setdefault((score.run, score.noise, score.level), []).append(score)

    def point(run: str, noise: str, level: float, group: list[ConditionScore]) -> Point:
        score, agreement, loss = (
            [getattr(measured, key) for measured in group] for key in ("score", "agreement", "loss")
        )
        spread = float(np.std(score, ddof=1)) if len(group) > 1 else None
        return Point(run, noise, level, float(np.mean(score)), spread, float(np.mean(agreement)), float(np.mean(loss)))

    return [point(*key, group) for key, group in groups.items()]


def metric(card: Card) -> str:
    return card.score_title


def tables(scores: Sequence[ConditionScore], card: Card, about: str) -> list[Table]:
    """All points; and of several runs the mean over the levels of every noise, side by side."""
    means = points(scores)
    clean = {point.run: point.score for point in means if point.noise == CLEAN}
    columns = ["run", "noise", "level", metric(card), "sd over draws", "change", "agreement", "loss"]
    lines: list[list[Any]] = [
        [p.run, p.noise, None if p.noise in (CLEAN, *WITHOUT_LEVEL) else p.level,
         p.score, p.spread, p.score - clean[p.run], p.agreement, p.loss]
        for p in means
    ]  # fmt: skip
    shown = [Table(f"{about}; scores in percent", columns, lines)]
    if len(clean) > 1:
        groups: dict[str, dict[str, list[float]]] = {}
        for point in means:
            groups.setdefault(point.noise, {}).setdefault(point.run, []).append(point.score)
        by_run = [[noise, *(float(np.mean(runs[run])) for run in clean)] for noise, runs in groups.items()]
        shown.append(Table(f"{metric(card)}, mean over levels", ["noise", *clean], by_run))
    return shown


def summary(scores: Sequence[ConditionScore], card: Card, about: str) -> list[str]:
    """What the strongest of every noise does to every run."""
    lines = [f"Measured on {about}: {metric(card)} in percent; agreement is with the answers to the clean source."]
    last = {(point.run, point.noise): point for point in points(scores)}
    for run in dict.fromkeys(score.run for score in scores):
        clean = last[run, CLEAN]
        for (name, noise), point in last.items():
            if name != run or noise in (CLEAN, "random", "adversary", "source"):
                continue
            what = "words in random order" if noise == "order" else f"{noise} at {point.level:g}"
            lines.append(f"{run}, {what}: {clean.score:.1f} to {point.score:.1f}, agreement {point.agreement:.1f}%.")
        if (run, "adversary") in last:
            lines.append(_attacked(clean, last[run, "adversary"], last[run, "random"]))
        if (run, "source") in last:
            lines.append(_other_source(clean, last[run, "source"]))
    return lines


def _attacked(clean: Point, worst: Point, random: Point) -> str:
    return (
        f"{clean.run}, adversarial ascent of radius {worst.level:g}: {clean.score:.1f} to {worst.score:.1f}, loss "
        f"{clean.loss:.3f} to {worst.loss:.3f}, agreement {worst.agreement:.1f}%; random noise of the same norm: "
        f"{random.score:.1f}, loss {random.loss:.3f}, agreement {random.agreement:.1f}%."
    )


def _other_source(clean: Point, other: Point) -> str:
    text = (
        f"{clean.run}, the source of another example: {clean.score:.1f} to {other.score:.1f}, loss {clean.loss:.3f} to "
        f"{other.loss:.3f}, agreement {other.agreement:.1f}%"
    )
    helps = other.loss > HELPS * clean.loss
    if other.agreement >= INDEPENDENT:
        return f"{text}: {'its answers do' if helps else 'the model does'} not depend on its source."
    return f"{text}." if helps else f"{text}: what it reads does not help it."
