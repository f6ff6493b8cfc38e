"""The figure of a study: a panel per step, with every seed."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from research.measurements import MethodMean
from seqreg.studies.common.figures import figure, look

Panel = tuple[str, Any]
"""A title, and what is drawn: values of a comparison, its costs, one measure, a relation, or a curve."""
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


@dataclass(frozen=True)
class MeasurePanel:
    """One measure of all methods of a step.

    Args:
        order: all methods of the study, whose places give their colours
    """

    name: str
    means: Sequence[MethodMean]
    order: Sequence[str]


@dataclass(frozen=True)
class CurvePoint:
    """A method in one step: its difference to the baseline in points of the score, and a number of the baseline."""

    x: float
    difference: float
    interval: Sequence[float] | None
    tested: bool
    label: str


@dataclass(frozen=True)
class CurvePanel:
    """Points of every method over several steps; `x` is the key of metrics.json that they are drawn over."""

    points: Mapping[str, Sequence[CurvePoint]]
    x: str
    order: Sequence[str]


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
            elif isinstance(content, Mapping):
                _seeds(axes, content)
            elif isinstance(content, CurvePanel):
                _curve(axes, content)
            else:
                _measure(axes, content)


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
    axes.set_ylabel(f"{values['metric']} on test, in points")


def _costs(axes: Any, values: Mapping[str, Any]) -> None:
    """The difference to the baseline, with its interval, over the CPU time of training."""
    for place, (name, stats) in enumerate(values["methods"].items()):
        if stats.get("time") is None or "difference" not in stats:
            continue
        change, tested = stats["difference"], not stats.get("described")
        _difference(axes, stats["time"], change["difference"], change["interval"], place, tested)
        axes.plot([], [], linestyle="", label=name, **look(place))
    axes.axhline(0, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel("CPU time of all training steps, over the baseline's")
    axes.set_ylabel(f"{values['metric']}, minus baseline")
    _legend(axes)


def _difference(axes: Any, x: float, change: float, interval: Sequence[float] | None, place: int, tested: bool) -> None:
    """A difference with its interval; hollow where it is not tested."""
    style = look(place)
    if interval is not None:
        axes.plot([x, x], interval, color=style["color"], linewidth=1.5, alpha=0.7)
    axes.plot([x], [change], markersize=6, linestyle="", markerfacecolor=style["color"] if tested else "white", **style)


def _legend(axes: Any) -> None:
    """Beside the panel, where it hides nothing."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _measure(axes: Any, panel: MeasurePanel) -> None:
    """The differences of all methods to the baseline in one measure, in its units, with the methods' names."""
    shown = [mean for mean in panel.means if mean.difference is not None and mean.method != "pretrained"]
    for place, mean in enumerate(shown):
        change = mean.difference
        assert change is not None
        _difference(
            axes, place, change.difference, change.interval, panel.order.index(mean.method), mean.holm is not None
        )
    axes.axhline(0, color="black", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(shown)), [mean.method for mean in shown], rotation=40, ha="right", fontsize=10)
    axes.set_ylabel(f"{words(panel.name)},\nminus baseline")


def _curve(axes: Any, panel: CurvePanel) -> None:
    """What every method gains over the baseline, by a number of the baseline, such as its training loss."""
    for name, points in panel.points.items():
        style = look(panel.order.index(name))
        x, y = [point.x for point in points], [point.difference for point in points]
        axes.plot(x, y, color=style["color"], linewidth=1, alpha=0.5)
        for point in points:
            _difference(axes, point.x, point.difference, point.interval, panel.order.index(name), point.tested)
            axes.annotate(point.label, (point.x, point.difference), (4, 4), textcoords="offset points", fontsize=7)
        axes.plot([], [], linestyle="", label=name, **style)
    axes.axhline(0, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel(f"{words(panel.x)} of the baseline")
    axes.set_ylabel("minus baseline, in points of the score")
    _legend(axes)


_WORDS = {
    "drift.kl_start_trained": "KL from the start, new task",
    "drift.cka": "CKA to the start, new task",
    "drift.weight_distance": "distance of the weights to the start",
    "train.last_nll": "training NLL at the end",
}


def words(measure: str) -> str:
    """A key of metrics.json as it is said; others stay as they are.

    >>> words("retention.*.loss.after"), words("retention.g2p.exact_match.after"), words("drift.cka")
    ('old task: loss', 'old task, g2p: exact_match', 'CKA to the start, new task')
    """
    kind, *parts = measure.split(".")
    if kind == "retention" and len(parts) == 3 and parts[-1] == "after":
        return f"old task{'' if parts[0] == '*' else f', {parts[0]}'}: {parts[1]}"
    if kind == "scores" and len(parts) == 2:
        return ": ".join(parts)
    return _WORDS.get(measure, measure)


def _points(axes: Any, panel: RelationPanel) -> None:
    """Every run as a point, by method."""
    for place, (name, points) in enumerate(panel.points.items()):
        if points:
            x, y = zip(*points, strict=True)
            style = look(place)
            axes.plot(x, y, style["marker"], color=style["color"], markersize=5, linestyle="", label=name)
    axes.set_xlabel(words(panel.x))
    axes.set_ylabel(f"{words(panel.y)}, after training")
    _legend(axes)
