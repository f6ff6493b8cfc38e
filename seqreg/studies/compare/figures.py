"""The figures of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqreg.studies.common.figures import figure, look

SHAPES = 5
"""Seeds from which a violin is drawn: below, it would be drawn from nothing."""
Curve = list[tuple[int, float]]
"""Steps and values."""
Seeds = Sequence[Mapping[str, Curve]]
"""The curves of every seed of a method, by tag."""
DIAGNOSTICS = "train_diagnostics/"
"""The prefix of the tags of terms."""
_HOLLOW = {"markerfacecolor": "white", "markeredgewidth": 2}
"""The marker of a free arm."""


def read_curves(folder: Path) -> dict[str, Curve]:
    """All scalars of a run by tag, as (step, value); nothing if it wrote none."""
    if not (folder / "tensorboard").is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.svg", folder / f"{name}.png"


def scores(values: Mapping[str, Any], folder: Path) -> str:
    """Every seed of every method as a dot, with mean and interval, and a violin where there are seeds for one."""
    methods = values["methods"]
    with figure(*files(folder, "scores"), width=max(6.0, 1.5 * len(methods) + 1), height=5) as drawn:
        axes = drawn.add_subplot()
        for place, stats in enumerate(methods.values()):
            colour = look(place)["color"]
            dots = np.asarray(stats["scores"])
            if len(dots) >= SHAPES and np.ptp(dots) > 0:
                parts = axes.violinplot(dots, [place], widths=0.8, showextrema=False)
                for body in parts["bodies"]:
                    body.set(facecolor=colour, alpha=0.25)
            shift = np.linspace(-0.13, 0.13, len(dots)) if len(dots) > 1 else np.zeros(1)
            axes.plot(place + shift, dots, "o", color=colour, markersize=7, markeredgecolor="white")
            if stats["student"] is not None:
                axes.plot([place + 0.28] * 2, stats["student"], color="black", linewidth=2)
            axes.plot([place + 0.28], [stats["mean"]], "D", color="black", markersize=6)
        base = methods[values["baseline"]]["mean"]
        axes.axhline(base, color="black", linewidth=1, linestyle=":")
        axes.set_xticks(range(len(methods)), [f"{name}\nn = {stats['n']}" for name, stats in methods.items()])
        axes.set_ylabel(f"{values['metric']} on {values['split']} (%)")
        axes.set_title("Dots: seeds. Diamond and bar: mean, 95% interval")
    return "scores"


def cost(values: Mapping[str, Any], folder: Path) -> str:
    """Quality against training time. Free arms are where the baseline is: they need its run, and no other."""
    with figure(*files(folder, "cost"), width=7, height=4.5) as drawn:
        axes, beside = drawn.add_subplot(), 0
        for place, (name, stats) in enumerate(values["methods"].items()):
            time = 1.0 if stats["free"] else stats["time"]
            if time is None:
                continue
            low, high = stats["student"] or (stats["mean"], stats["mean"])
            error = [[max(0.0, stats["mean"] - low)], [max(0.0, high - stats["mean"])]]
            style = {"linestyle": "", "markersize": 10, **look(place), **(_HOLLOW if stats["free"] else {})}
            beside += stats["free"]
            axes.errorbar(time + 0.02 * beside * stats["free"], stats["mean"], error,
                          label=f"{name} (free)" if stats["free"] else name, **style)  # fmt: skip
        axes.set_xlabel(f"{values['cost']} / {values['baseline']}'s (median)")
        axes.set_ylabel(f"{values['metric']} (%), 95% interval")
        axes.set_title("Quality against cost")
        drawn.legend(loc="outside right upper")  # beside the axes: there it covers no interval
    return "cost"


def differences(values: Mapping[str, Any], folder: Path) -> str | None:
    """Differences to the baseline with their intervals; None if there is nothing to compare with it yet."""
    methods = {name: stats for name, stats in values["methods"].items() if "difference" in stats}
    if not methods:
        return None
    with figure(*files(folder, "differences"), width=7, height=0.7 * len(methods) + 1.8) as drawn:
        axes, colours = (
            drawn.add_subplot(),
            {name: look(place)["color"] for place, name in enumerate(values["methods"])},
        )
        axes.axvline(0, color="black", linewidth=1)
        for place, (name, stats) in enumerate(methods.items()):
            plus = stats["difference"]
            if plus["interval"] is not None:
                axes.plot(plus["interval"], [place] * 2, color=colours[name], linewidth=3)
            style = {"color": colours[name], "markersize": 10, **(_HOLLOW if stats["free"] else {})}
            axes.plot([plus["difference"]], [place], "o", **style)
        names = [f"{name} (free)" if stats["free"] else name for name, stats in methods.items()]
        axes.set_yticks(range(len(methods)), names)
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.set_xlabel(f"{values['metric']} minus {values['baseline']}'s, 95% interval ({values['chance']})")
    return "differences"


def validation(methods: Mapping[str, Seeds], score: str, folder: Path) -> str | None:
    """The validation score while training, mean and range over seeds."""
    tag = f"eval/{score}"
    lines = {name: [curves[tag] for curves in seeds if tag in curves] for name, seeds in methods.items()}
    return _panels({"": lines}, f"validation {score} (%)", "validation", folder)


def loss_parts(methods: Mapping[str, Seeds], folder: Path) -> str | None:
    """A panel per method: the parts of its loss."""
    return _panels(_by_method(methods, "train/part/"), "part of the loss", "parts", folder, log=True)


def diagnostics(methods: Mapping[str, Seeds], folder: Path) -> str | None:
    """A panel per method: what its terms are really doing, ratios and cosines."""
    panels = _by_method(methods, DIAGNOSTICS, ("over_base", "over_value", "cosine", "over_radius"))
    return _panels(panels, "ratio or cosine", "diagnostics", folder)


def _by_method(
    methods: Mapping[str, Seeds], prefix: str, quantities: Sequence[str] = ("",)
) -> dict[str, dict[str, Any]]:
    """The curves of every method by tag, without prefix."""
    panels: dict[str, dict[str, Any]] = {}
    for name, seeds in methods.items():
        tags = [tag for tag in (seeds[0] if seeds else {}) if tag.startswith(prefix)]
        for tag in (tag for tag in tags if any(quantity in tag for quantity in quantities)):
            lines = [curves[tag] for curves in seeds if tag in curves]
            panels.setdefault(name, {})[tag.removeprefix(prefix)] = lines
    return panels


def _panels(
    panels: Mapping[str, Mapping[str, Sequence[Curve]]], label: str, name: str, folder: Path, *, log: bool = False
) -> str | None:  # fmt: skip
    """Lines in panels: the mean over seeds, and the range as a band."""
    panels = {title: {tag: seeds for tag, seeds in lines.items() if seeds} for title, lines in panels.items()}
    panels = {title: lines for title, lines in panels.items() if lines}
    if not panels:
        return None
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    height = 3.6 + 0.28 * max(len(lines) for lines in panels.values())
    with figure(*files(folder, name), width=5.5 * across if across > 1 else 8, height=height * down) as drawn:
        for place, (title, lines) in enumerate(panels.items()):
            axes = drawn.add_subplot(down, across, place + 1)
            for index, (tag, seeds) in enumerate(lines.items()):
                steps, middle, low, high = _mean_curve(seeds)
                every = max(1, len(steps) // 6)
                axes.plot(steps, middle, **look(index), markevery=every, label=tag)
                axes.fill_between(steps, low, high, color=look(index)["color"], alpha=0.15, linewidth=0)
            scale = f" ({_log_scale(axes, lines)})" if log else ""
            axes.set(title=title, xlabel="step", ylabel=f"{label}{scale}")
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}  # there it covers no curve
            axes.legend(fontsize=11, ncols=2 if len(lines) < 6 else 1, **below)
    return name


def _log_scale(axes: Any, lines: Mapping[str, Sequence[Curve]]) -> str:
    """A logarithmic axis, which is linear around 0 where parts are negative; what it is called."""
    values = np.array([value for seeds in lines.values() for curve in seeds for _, value in curve])
    if (values > 0).all():
        axes.set_yscale("log")
        return "log"
    smallest = np.abs(values[values != 0]).min() if values.any() else 1.0
    axes.set_yscale("symlog", linthresh=float(smallest))
    axes.axhline(0, color="black", linewidth=1)
    return "log on both sides of 0"


def _mean_curve(seeds: Sequence[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that all seeds have, with the mean, the lowest and the highest value."""
    curves = [dict(curve) for curve in seeds]
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    values = np.array([[curve[step] for step in steps] for curve in curves])
    if not steps:
        return [], [], [], []
    return steps, values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()
