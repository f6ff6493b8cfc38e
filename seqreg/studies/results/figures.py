"""The figure of a study: a panel per step, with every seed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seqreg.studies.common.figures import figure, look
from seqreg.studies.results.measurements import MethodMean

Panel = tuple[str, Any]
"""A title, and what is drawn: values of a comparison, its costs, means by measure, or a relation."""
_DPI_WIDTH = 6.0
_TITLE = 46
"""Characters of a line of a title."""
_VIOLIN = 8
"""Seeds from which a distribution is drawn behind the dots."""


@dataclass(frozen=True)
class CostPanel:
    """The values of a comparison, to draw what its methods gain over what they cost."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class RelationPanel:
    """Two numbers of every run of one step, by method."""

    points: Mapping[str, Sequence[tuple[float, float]]]
    x: str
    y: str


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw all panels, two in a row."""
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    with figure(path, width=_DPI_WIDTH * across, height=4.2 * down) as drawn:
        for place, (title, content) in enumerate(panels):
            axes = drawn.add_subplot(down, across, place + 1)
            axes.set_title(textwrap.fill(title, _TITLE), fontsize=13)
            axes.yaxis.label.set_size(11)
            axes.xaxis.label.set_size(11)
            if isinstance(content, RelationPanel):
                _points(axes, content)
            elif isinstance(content, CostPanel):
                _costs(axes, content.values)
            elif "methods" in content:
                _seeds(axes, content)
            else:
                _measures(axes, content)


def _seeds(axes: Any, values: Mapping[str, Any]) -> None:
    """Every seed of every method, with mean and interval; a hollow diamond where the difference is not tested."""
    methods = values["methods"]
    for place, stats in enumerate(methods.values()):
        dots, style = np.asarray(stats["scores"]), look(place)
        if len(dots) >= _VIOLIN and np.ptp(dots):
            for body in axes.violinplot(dots, [place], widths=0.6, showextrema=False)["bodies"]:
                body.set(facecolor=style["color"], alpha=0.2)
        beside = np.linspace(-0.15, 0.15, len(dots)) if len(dots) > 1 else np.zeros(1)
        axes.plot(place + beside, dots, "o", color=style["color"], markersize=5, alpha=0.7)
        if stats["student"] is not None:
            axes.plot([place + 0.3] * 2, stats["student"], color="black", linewidth=2)
        face = "white" if stats.get("described") else "black"
        axes.plot([place + 0.3], [stats["mean"]], "D", color="black", markerfacecolor=face, markersize=6)
    axes.axhline(methods[values["baseline"]]["mean"], color="black", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(methods)), list(methods), rotation=40, ha="right", fontsize=10)
    axes.set_ylabel(f"{values['metric']} (%)")


def _costs(axes: Any, values: Mapping[str, Any]) -> None:
    """The difference to the baseline, with its interval, over the CPU time of a training step."""
    for place, (name, stats) in enumerate(values["methods"].items()):
        if stats.get("time") is None or "difference" not in stats:
            continue
        change, style = stats["difference"], look(place)
        if change["interval"] is not None:
            axes.plot([stats["time"]] * 2, change["interval"], color=style["color"], linewidth=1, alpha=0.6)
        axes.plot([stats["time"]], [change["difference"]], "o", color=style["color"], markersize=5)
        axes.annotate(
            name, (stats["time"], change["difference"]), xytext=(4, 4), textcoords="offset points", fontsize=8
        )
    axes.axhline(0, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel("CPU time of a training step, over the baseline's")
    axes.set_ylabel(f"{values['metric']}, minus baseline")


def _measures(axes: Any, means: Mapping[str, Sequence[MethodMean]]) -> None:
    """Differences to the baseline by measure; measures differ in scale, so that each has its own: its pooled sd."""
    trained = {name: [mean for mean in some if mean.method != "pretrained"] for name, some in means.items()}
    methods = list(dict.fromkeys(mean.method for some in trained.values() for mean in some if mean.difference))
    for place, some in enumerate(trained.values()):
        spread = float(np.sqrt(np.mean([mean.sd**2 for mean in some if mean.sd]))) if any(m.sd for m in some) else 1.0
        for mean in some:
            if mean.difference is None:
                continue
            index = methods.index(mean.method)
            x, style = place + 0.4 * (index / max(1, len(methods) - 1) - 0.5), look(index + 1)
            if mean.difference.interval is not None:
                axes.plot([x, x], np.array(mean.difference.interval) / spread, color=style["color"], linewidth=1.5)
            label = mean.method if place == 0 else None
            axes.plot(
                [x],
                [mean.difference.difference / spread],
                style["marker"],
                color=style["color"],
                markersize=6,
                label=label,
            )
    axes.axhline(0, color="black", linewidth=1)
    axes.set_xticks(range(len(means)), list(means), rotation=40, ha="right", fontsize=9)
    axes.set_ylabel("minus baseline, in sd over seeds")
    if methods:
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _points(axes: Any, panel: RelationPanel) -> None:
    """Every run as a point, coloured by method."""
    for place, (name, points) in enumerate(panel.points.items()):
        if points:
            x, y = zip(*points, strict=True)
            style = look(place)
            axes.plot(x, y, style["marker"], color=style["color"], markersize=5, linestyle="", label=name)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.legend(fontsize=7)
