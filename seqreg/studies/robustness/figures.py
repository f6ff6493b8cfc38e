"""The figure of `seqreg robustness`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqreg.studies.common.figures import figure, look
from seqreg.studies.robustness.report import CLEAN, WITHOUT_LEVEL, ConditionScore, Point, metric, points
from seqreg.workbench.config.cards import Card

LEVELS = {
    "embeddings": "noise / RMS of the embeddings", "adversary": "norm / norm of the embeddings",
    "characters": "rate of characters", "words": "rate of words",
}  # fmt: skip


def draw(folder: Path, scores: Sequence[ConditionScore], card: Card) -> list[str]:
    """Score and agreement against the level, a column per noise and a line per run; nothing if no noise has levels."""
    means = points(scores)
    noises = [n for n in dict.fromkeys(p.noise for p in means) if n not in (CLEAN, "random", *WITHOUT_LEVEL)]
    if not noises:
        return []
    files = [folder / "robustness.png", folder / "robustness.svg"]
    with figure(*files, width=max(4.2 * len(noises), 6), height=7) as drawn:
        axes = drawn.subplots(2, len(noises), sharey="row", squeeze=False)
        for column, noise in enumerate(noises):
            _curves(axes[0][column], means, noise, "score")
            _curves(axes[1][column], means, noise, "agreement")
            axes[0][column].set_title(noise)
            axes[1][column].set_xlabel(LEVELS.get(noise, "rate"))
        axes[0][0].set_ylabel(f"{metric(card)} (%)")
        axes[1][0].set_ylabel("agreement (%)")
        axes[1][0].legend()
        if "adversary" in noises:
            axis = axes[1][noises.index("adversary")]
            axis.legend(handles=axis.plot([], [], "k--", label="random, same norm"))
    return [file.name for file in files]


def _curves(axis: Any, means: Sequence[Point], noise: str, value: str) -> None:
    for place, run in enumerate(dict.fromkeys(point.run for point in means)):
        style = look(place)
        for kind, line in ((noise, "-"), *((("random", "--"),) if noise == "adversary" else ())):
            chosen = [point for point in means if point.run == run and point.noise in (CLEAN, kind)]
            heights = np.array([getattr(point, value) for point in chosen])
            levels = [point.level for point in chosen]
            label = run if line == "-" else None
            axis.plot(levels, heights, line, **style, label=label)
            if value == "score":
                spread = np.array([point.spread or 0.0 for point in chosen])
                axis.fill_between(levels, heights - spread, heights + spread, color=style["color"], alpha=0.15)
