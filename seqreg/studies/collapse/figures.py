"""Figures of collapse and shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqreg.studies.common.figures import COLOURS, MARKERS, figure

GREY = "#777777"
RANK, CKA = "effective rank, last layer", "CKA to the pretrained, last layer"


def probes(found: Mapping[str, Any], tasks: Sequence[Any], *files: Path) -> None:
    """Accuracy by task, effective rank and CKA by layer, one colour and marker a model."""
    with figure(*files, width=max(13.0, 9 + 1.2 * len(tasks)), height=4.8) as drawn:
        left, middle, right = drawn.subplots(1, 3, width_ratios=[max(1.2, 0.4 * len(tasks)), 1, 1])
        for index, (name, one) in enumerate(found.items()):
            style = {"color": COLOURS[index % 8], "marker": MARKERS[index % 8]}
            move = (index - (len(found) - 1) / 2) * min(0.15, 0.7 / len(found))
            shown = [one.probes[task.name] for task in tasks]
            below = [max(0.0, probe.score - probe.low) for probe in shown]
            above = [max(0.0, probe.high - probe.score) for probe in shown]
            places = [place + move for place in range(len(tasks))]
            left.errorbar(
                places,
                [probe.score for probe in shown],
                [below, above],
                linestyle="",
                capsize=3,
                label=name,
                **style,
            )
            layers = [layer + 0.4 * move for layer in range(1, len(one.layers) + 1)]
            middle.plot(layers, [layer.rank for layer in one.layers], **style)
            if all(layer.cka is not None for layer in one.layers):
                right.plot(layers, [layer.cka for layer in one.layers], **style)
        for place, task in enumerate(tasks):
            rate = next(iter(found.values())).probes[task.name].majority
            left.hlines(rate, place - 0.4, place + 0.4, color=GREY, linestyle="--", linewidth=1.5)
        left.plot([], [], color=GREY, linestyle="--", linewidth=1.5, label="most common class")
        left.set(xticks=range(len(tasks)), xticklabels=[task.name for task in tasks], xlim=(-0.6, len(tasks) - 0.4))
        left.set(title="linear probe", ylabel="accuracy (%)")
        for axes, title in ((middle, "effective rank"), (right, "CKA to the pretrained")):
            axes.set(title=title, xlabel="layer")
            axes.locator_params(axis="x", integer=True, nbins=8)
        _from_zero(middle)
        right.set_ylim(min(0.0, right.get_ylim()[0]), 1.05)
        drawn.legend(loc="outside lower center", ncols=min(4, len(found) + 1))


def chain(laid: Any, found: Any, *files: Path) -> None:
    """The score on every task after every step, then effective rank and CKA of the last layer."""
    panels = [task.name for task in laid.tasks] + [RANK, CKA]
    columns = min(len(panels), 4 if len(panels) > 5 else 5)
    rows = -(-len(panels) // columns)
    steps = range(len(laid.steps))
    with figure(*files, width=4.4 * columns, height=4.0 * rows + 0.8) as drawn:
        axes = drawn.subplots(rows, columns, squeeze=False).ravel()
        for place, panel in enumerate(panels):
            one = axes[place]
            task = next((task for task in laid.tasks if task.name == panel), None)
            for index, method in enumerate(laid.methods):
                lines = [_track(panel, row) for key, row in found.items() if key[0] == method]
                means = [sum(values) / len(lines) for values in zip(*lines, strict=True)]
                places = [step + 0.08 * (index - (len(laid.methods) - 1) / 2) for step in steps]  # equal lines are seen
                if task is not None and len(lines) == 1:  # of one seed: intervals over examples
                    row = next(row for key, row in found.items() if key[0] == method)
                    ends = [(model.probes[panel].low, model.probes[panel].high) for model in row]
                    one.vlines(places, *zip(*ends, strict=True), color=COLOURS[index % 8], alpha=0.5, linewidth=1.5)
                for line in lines if len(lines) > 1 else ():
                    one.plot(places, line, color=COLOURS[index % 8], alpha=0.3, linewidth=1)
                one.plot(places, means, color=COLOURS[index % 8], marker=MARKERS[index % 8],
                         label=method if not place else None)  # fmt: skip
            if task is None:
                one.set_title(panel)
                _from_zero(one)
            else:
                rate = next(iter(found.values()))[0].probes[panel].majority
                if rate is not None:
                    one.axhline(rate, color=GREY, linestyle="--", linewidth=1.5,
                                label="most common class" if not place else None)  # fmt: skip
                for step in (number for number in steps if laid.steps[number] == panel):
                    one.axvspan(step - 0.25, step + 0.25, color=GREY, alpha=0.12, linewidth=0)
                what = "ROUGE-L (%)" if task.run is not None else "linear probe, accuracy (%)"
                one.set(title=f"{panel} (source)" if not place else panel, ylabel=what)
            one.set_xticks(steps, laid.steps, rotation=60, ha="right")
        for one in axes[len(panels) :]:
            one.set_visible(False)
        drawn.legend(loc="outside lower center", ncols=len(laid.methods) + 1)
        drawn.suptitle("after each training; grey: on the task of the panel", fontsize=12)


def _from_zero(axes: Any) -> None:
    """Room below down to 0, and a little above what is drawn."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), 1.05 * high)


def _track(panel: str, row: Sequence[Any]) -> list[float]:
    """One number after every step."""
    if panel == RANK:
        return [one.rank for one in row]
    if panel == CKA:
        return [one.layers[-1].cka for one in row]
    return [one.probes[panel].score for one in row]


def shift(found: Mapping[str, Mapping[float, Any]], target: str, metric: str, *files: Path) -> None:
    """The score on the target by the share of its rows, one colour and marker a model."""
    with figure(*files, width=8, height=5) as drawn:
        axes = drawn.subplots()
        shares = list(next(iter(found.values())))
        for index, (name, scores) in enumerate(found.items()):
            move = (index - (len(found) - 1) / 2) * min(0.08, 0.5 / len(found))
            shown = list(scores.values())
            below = [max(0.0, one.score - one.low) for one in shown]
            above = [max(0.0, one.high - one.score) for one in shown]
            axes.errorbar(
                [place + move for place in range(len(shares))], [one.score for one in shown], [below, above],
                color=COLOURS[index % 8], marker=MARKERS[index % 8], capsize=4, label=name,
            )  # fmt: skip
        axes.set(xticks=range(len(shares)), xticklabels=[f"{share:.0%}" for share in shares])
        axes.set(xlabel=f"share of the training rows of {target}", ylabel=f"{metric} (%)", title=f"on {target}")
        axes.set_xlim(-0.4, len(shares) - 0.6)
        axes.legend()
