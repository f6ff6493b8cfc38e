"""The figures of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqreg.studies.common.curves import Curve, mean_curve
from seqreg.studies.common.figures import COLOURS, MARKERS, figure

SHAPES = 5
"""Seeds from which a violin is drawn: below, it would be drawn from nothing."""
Seeds = Sequence[Mapping[str, Curve]]
"""The curves of every seed of a method, by tag."""


def files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.svg", folder / f"{name}.png"


def scores(values: Mapping[str, Any], folder: Path) -> str:
    """Every seed of every method as a dot, with mean and interval, and a violin where there are seeds for one."""
    methods = values["methods"]
    with figure(*files(folder, "scores"), width=max(6.0, 1.5 * len(methods) + 1), height=5) as drawn:
        axes = drawn.add_subplot()
        for place, (one, colour) in enumerate(zip(methods.values(), _round(COLOURS, len(methods)), strict=True)):
            dots = np.asarray(one["scores"])
            if len(dots) >= SHAPES and np.ptp(dots) > 0:
                parts = axes.violinplot(dots, [place], widths=0.8, showextrema=False)
                for body in parts["bodies"]:
                    body.set(facecolor=colour, alpha=0.25)
            shift = np.linspace(-0.13, 0.13, len(dots)) if len(dots) > 1 else np.zeros(1)
            axes.plot(place + shift, dots, "o", color=colour, markersize=7, markeredgecolor="white")
            if one["student"] is not None:
                axes.plot([place + 0.28] * 2, one["student"], color="black", linewidth=2)
            axes.plot([place + 0.28], [one["mean"]], "D", color="black", markersize=6)
        base = methods[values["baseline"]]["mean"]
        axes.axhline(base, color="black", linewidth=1, linestyle=":")
        axes.set_xticks(range(len(methods)), [f"{name}\nn = {one['n']}" for name, one in methods.items()])
        axes.set_ylabel(f"{values['metric']} on {values['split']} (%)")
        axes.set_title("Dots: seeds. Diamond and bar: mean, 95% interval")
    return "scores"


def cost(values: Mapping[str, Any], folder: Path) -> str:
    """Quality against training time."""
    methods = {name: one for name, one in values["methods"].items() if one["time"] is not None}
    with figure(*files(folder, "cost"), width=7, height=5) as drawn:
        axes = drawn.add_subplot()
        looks = zip(methods.items(), _round(COLOURS, len(methods)), _round(MARKERS, len(methods)), strict=True)
        for (name, one), colour, marker in looks:
            low, high = one["student"] or (one["mean"], one["mean"])
            error = [[max(0.0, one["mean"] - low)], [max(0.0, high - one["mean"])]]
            axes.errorbar(one["time"], one["mean"], error, fmt=marker, color=colour, markersize=10, label=name)
        axes.set_xlabel(f"{values['cost']} / {values['baseline']}'s (median)")
        axes.set_ylabel(f"{values['metric']} (%), 95% interval")
        axes.set_title("Quality against cost")
        drawn.legend(loc="outside right upper")  # beside the axes: there it covers no interval
    return "cost"


def differences(values: Mapping[str, Any], folder: Path) -> str | None:
    """Differences to the baseline with their intervals; None if there is nothing to compare with it yet."""
    methods = {name: one for name, one in values["methods"].items() if "difference" in one}
    if not methods:
        return None
    with figure(*files(folder, "differences"), width=7, height=0.7 * len(methods) + 1.8) as drawn:
        axes = drawn.add_subplot()
        for place, (one, colour) in enumerate(zip(methods.values(), _round(COLOURS[1:], len(methods)), strict=True)):
            plus = one["difference"]
            if plus["interval"] is not None:
                axes.plot(plus["interval"], [place] * 2, color=colour, linewidth=3)
            axes.plot([plus["difference"]], [place], "o", color=colour, markersize=10)
        axes.axvline(0, color="black", linewidth=1)
        axes.set_yticks(range(len(methods)), list(methods))
        axes.set_ylim(len(methods) - 0.5, -0.5)
        axes.set_xlabel(f"{values['metric']} minus {values['baseline']}'s, 95% interval ({values['chance']})")
    return "differences"


def validation(found: Mapping[str, Seeds], score: str, folder: Path) -> str | None:
    """The validation score while training, mean and range over seeds."""
    lines = {name: [one[f"eval/{score}"] for one in seeds if f"eval/{score}" in one] for name, seeds in found.items()}
    return _panels({"": lines}, f"validation {score} (%)", "validation", folder, legend=True)


def loss_parts(found: Mapping[str, Seeds], folder: Path) -> str | None:
    """A panel a method: what its loss is made of."""
    return _panels(_by_method(found, "train/part/"), "part of the loss", "parts", folder, log=True)


def diagnostics(found: Mapping[str, Seeds], folder: Path) -> str | None:
    """A panel a method: what its terms are really doing, ratios and cosines."""
    kept = ("over_base", "over_value", "cosine", "over_radius")
    return _panels(_by_method(found, "train_diagnostics/", kept), "ratio or cosine", "diagnostics", folder)


def _by_method(found: Mapping[str, Seeds], prefix: str, kept: Sequence[str] = ("",)) -> dict[str, dict[str, Any]]:
    panels = {}
    for name, seeds in found.items():
        tags = [tag for tag in (seeds[0] if seeds else {}) if tag.startswith(prefix) and any(k in tag for k in kept)]
        lines = {tag.removeprefix(prefix): [one[tag] for one in seeds if tag in one] for tag in tags}
        if lines:
            panels[name] = lines
    return panels


def _panels(
    panels: Mapping[str, Mapping[str, Sequence[Curve]]], label: str, name: str, folder: Path,
    *, log: bool = False, legend: bool = True,
) -> str | None:  # fmt: skip
    """Lines in panels: the mean over seeds, and the range as a band."""
    panels = {title: lines for title, lines in panels.items() if any(lines.values())}
    if not panels:
        return None
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    with figure(*files(folder, name), width=5.5 * across if across > 1 else 8, height=4 * down) as drawn:
        for place, (title, lines) in enumerate(panels.items()):
            axes = drawn.add_subplot(down, across, place + 1)
            looks = zip(lines.items(), _round(COLOURS, len(lines)), _round(MARKERS, len(lines)), strict=True)
            for (tag, found), colour, marker in looks:
                steps, middle, low, high = mean_curve(found)
                every = max(1, len(steps) // 6)
                axes.plot(steps, middle, color=colour, marker=marker, markevery=every, label=tag)
                axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            scale = f" ({_log_scale(axes, lines)})" if log else ""
            axes.set(title=title, xlabel="step", ylabel=f"{label}{scale}")
            if legend:
                axes.legend(fontsize=10)
    return name


def _log_scale(axes: Any, lines: Mapping[str, Sequence[Curve]]) -> str:
    """A logarithmic axis, which is linear around 0 where parts are negative; what it is called."""
    values = np.array([value for found in lines.values() for curve in found for _, value in curve])
    if (values > 0).all():
        axes.set_yscale("log")
        return "log"
    smallest = np.abs(values[values != 0]).min() if values.any() else 1.0
    axes.set_yscale("symlog", linthresh=float(smallest))
    axes.axhline(0, color="black", linewidth=1)
    return "log on both sides of 0"


def _round(looks: Sequence[str], count: int) -> list[str]:
    """As many looks as are needed, from the beginning again after the last."""
    return [looks[place % len(looks)] for place in range(count)]
