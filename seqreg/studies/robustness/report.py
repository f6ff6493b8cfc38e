"""Sentences, tables and figures of `seqreg robustness`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seqreg.studies.common.figures import COLOURS, MARKERS, figure
from seqreg.studies.common.findings import Table
from seqreg.workbench.config.cards import Card

if TYPE_CHECKING:
    from seqreg.studies.robustness.study import Row

CLEAN, WHOLE = "none", ("order", "source")
DEAF = 99.0
"""Percent of answers that stay the same with another's source, from which a model is said not to depend on its own."""
HELP = 1.01
"""The loss with another's source over that with its own, below which a source is said not to help."""

AXES = {
    "embeddings": "noise / RMS of the embeddings", "adversary": "norm / norm of the embeddings",
    "characters": "rate of characters", "words": "rate of words",
}  # fmt: skip


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


def points(rows: Sequence[Row]) -> list[Point]:
    """In the order in which they were asked."""
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.run, row.noise, row.level), []).append(row)
    return [
        Point(
            *key, float(np.mean([row.score for row in found])),
            float(np.std([row.score for row in found], ddof=1)) if len(found) > 1 else None,
            float(np.mean([row.agreement for row in found])), float(np.mean([row.loss for row in found])),
        )
        for key, found in groups.items()
    ]  # fmt: skip


def metric(card: Card) -> str:
    return "ROUGE-L" if card.kind == "generation" else " and ".join(card.metric)


def tables(rows: Sequence[Row], card: Card, about: str) -> list[Table]:
    """All points; and of several runs the mean over the levels of every noise, side by side."""
    found = points(rows)
    clean = {point.run: point.score for point in found if point.noise == CLEAN}
    columns = ["run", "noise", "level", metric(card), "sd over draws", "change", "agreement", "loss"]
    lines: list[list[Any]] = [
        [p.run, p.noise, None if p.noise in (CLEAN, *WHOLE) else p.level,
         p.score, p.spread, p.score - clean[p.run], p.agreement, p.loss]
        for p in found
    ]  # fmt: skip
    shown = [Table(f"{about}; scores in percent", columns, lines)]
    if len(clean) > 1:
        noises = list(dict.fromkeys(point.noise for point in found))
        means = [[noise, *(_mean(found, run, noise) for run in clean)] for noise in noises]
        shown.append(Table(f"{metric(card)}, mean over levels", ["noise", *clean], means))
    return shown


def _mean(found: Sequence[Point], run: str, noise: str) -> float:
    return float(np.mean([point.score for point in found if (point.run, point.noise) == (run, noise)]))


def summary(rows: Sequence[Row], card: Card, about: str) -> list[str]:
    """What the strongest of every noise does to every run."""
    found = [f"Measured on {about}: {metric(card)} in percent; agreement is with the answers to the clean source."]
    last = {(point.run, point.noise): point for point in points(rows)}
    for run in dict.fromkeys(row.run for row in rows):
        clean = last[run, CLEAN]
        for (name, noise), point in last.items():
            if name != run or noise in (CLEAN, "random", "adversary", "source"):
                continue
            what = "words in random order" if noise == "order" else f"{noise} at {point.level:g}"
            found.append(f"{run}, {what}: {clean.score:.1f} to {point.score:.1f}, agreement {point.agreement:.1f}%.")
        if (run, "adversary") in last:
            found.append(_attacked(clean, last[run, "adversary"], last[run, "random"]))
        if (run, "source") in last:
            found.append(_deaf(clean, last[run, "source"]))
    return found


def _attacked(clean: Point, worst: Point, random: Point) -> str:
    return (
        f"{clean.run}, adversarial ascent of radius {worst.level:g}: {clean.score:.1f} to {worst.score:.1f}, loss "
        f"{clean.loss:.3f} to {worst.loss:.3f}, agreement {worst.agreement:.1f}%; random noise of the same norm: "
        f"{random.score:.1f}, loss {random.loss:.3f}, agreement {random.agreement:.1f}%."
    )


def _deaf(clean: Point, other: Point) -> str:
    text = (
        f"{clean.run}, the source of another example: {clean.score:.1f} to {other.score:.1f}, loss {clean.loss:.3f} to "
        f"{other.loss:.3f}, agreement {other.agreement:.1f}%"
    )
    same, helps = other.agreement >= DEAF, other.loss > HELP * clean.loss
    if same:
        return f"{text}: {'its answers do' if helps else 'the model does'} not depend on its source."
    return f"{text}." if helps else f"{text}: what it reads does not help it."


def draw(folder: Path, rows: Sequence[Row], card: Card) -> list[str]:
    """Score and agreement against the level, a column a noise and a line a run; nothing if no noise has levels."""
    found = points(rows)
    noises = [n for n in dict.fromkeys(p.noise for p in found) if n not in (CLEAN, "random", *WHOLE)]
    names = ["robustness.png", "robustness.svg"]
    if not noises:
        return []
    files = [folder / name for name in names]
    with figure(*files, width=max(4.2 * len(noises), 6), height=7) as drawn:
        axes = drawn.subplots(2, len(noises), sharey="row", squeeze=False)
        for column, noise in enumerate(noises):
            _curves(axes[0][column], found, noise, "score")
            _curves(axes[1][column], found, noise, "agreement")
            axes[0][column].set_title(noise)
            axes[1][column].set_xlabel(AXES.get(noise, "rate"))
        axes[0][0].set_ylabel(f"{metric(card)} (%)")
        axes[1][0].set_ylabel("agreement (%)")
        axes[1][0].legend()
        if "adversary" in noises:
            axes[1][noises.index("adversary")].plot([], [], "k--", label="random, same norm")
            axes[1][noises.index("adversary")].legend(*_last(axes[1][noises.index("adversary")]))
    return names


def _last(axis: Any) -> tuple[list[Any], list[Any]]:
    handles, labels = axis.get_legend_handles_labels()
    return handles[-1:], labels[-1:]


def _curves(axis: Any, found: Sequence[Point], noise: str, value: str) -> None:
    runs = list(dict.fromkeys(point.run for point in found))
    for place, run in enumerate(runs):
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        for kind, line in ((noise, "-"), *((("random", "--"),) if noise == "adversary" else ())):
            chosen = [point for point in found if point.run == run and point.noise in (CLEAN, kind)]
            heights = np.array([getattr(point, value) for point in chosen])
            levels = [point.level for point in chosen]
            label = run if line == "-" else None
            axis.plot(levels, heights, line, color=colour, marker=marker, label=label)
            if value == "score":
                spread = np.array([point.spread or 0.0 for point in chosen])
                axis.fill_between(levels, heights - spread, heights + spread, color=colour, alpha=0.15)
