"""Figures of `seqreg probe`, `chain` and `shift`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqreg.studies.common.figures import figure, look

if TYPE_CHECKING:
    from seqreg.studies.collapse.chain import ChainResults
    from seqreg.studies.collapse.probe import ProbedModel, Score
    from seqreg.studies.collapse.shift import ShiftScores
    from seqreg.studies.collapse.study_files import ProbeTask

GREY = "#777777"
RANK, CKA = "effective rank, last layer", "CKA to the pretrained, last layer"


def _with_intervals(axes: Any, scores: Sequence[Score], offset: float, **style: Any) -> None:
    """Scores at 0, 1, 2 ... moved aside, with their intervals."""
    below = [max(0.0, score.score - score.low) for score in scores]
    above = [max(0.0, score.high - score.score) for score in scores]
    places = [place + offset for place in range(len(scores))]
    axes.errorbar(places, [score.score for score in scores], [below, above], **style)


def _from_zero(axes: Any) -> None:
    """An axis down to 0, and a little above what is drawn."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), 1.05 * high)


def probes(probed: Mapping[str, ProbedModel], tasks: Sequence[ProbeTask], *files: Path) -> None:
    """Accuracy by task, effective rank and CKA by layer, one colour and marker per model."""
    with figure(*files, width=max(13.0, 9 + 1.2 * len(tasks)), height=4.8) as drawn:
        left, middle, right = drawn.subplots(1, 3, width_ratios=[max(1.2, 0.4 * len(tasks)), 1, 1])
        for index, (name, model) in enumerate(probed.items()):
            offset = (index - (len(probed) - 1) / 2) * min(0.15, 0.7 / len(probed))
            scores = [model.probes[task.name] for task in tasks]
            _with_intervals(left, scores, offset, linestyle="", capsize=3, label=name, **look(index))
            layers = [layer + 0.4 * offset for layer in range(1, len(model.layers) + 1)]
            middle.plot(layers, [layer.rank for layer in model.layers], **look(index))
            if all(layer.cka is not None for layer in model.layers):
                right.plot(layers, [layer.cka for layer in model.layers], **look(index))
        for place, task in enumerate(tasks):
            rate = next(iter(probed.values())).probes[task.name].majority
            left.hlines(rate, place - 0.4, place + 0.4, color=GREY, linestyle="--", linewidth=1.5)
        left.plot([], [], color=GREY, linestyle="--", linewidth=1.5, label="most common class")
        left.set(xticks=range(len(tasks)), xticklabels=[task.name for task in tasks], xlim=(-0.6, len(tasks) - 0.4))
        left.set(title="linear probe", ylabel="accuracy (%)")
        for axes, title in ((middle, "effective rank"), (right, "CKA to the pretrained")):
            axes.set(title=title, xlabel="layer")
            axes.locator_params(axis="x", integer=True, nbins=8)
        _from_zero(middle)
        right.set_ylim(min(0.0, right.get_ylim()[0]), 1.05)
        drawn.legend(loc="outside lower center", ncols=min(4, len(probed) + 1))


def chain(results: ChainResults, *files: Path) -> None:
    """The score on every task after every step, then effective rank and CKA of the last layer."""
    tasks, titles, methods = results.chain.tasks, results.chain.steps, results.chain.methods
    panels = [task.name for task in tasks] + [RANK, CKA]
    columns = min(len(panels), 4 if len(panels) > 5 else 5)
    lines = -(-len(panels) // columns)
    with figure(*files, width=4.4 * columns, height=4.0 * lines + 0.8) as drawn:
        axes = drawn.subplots(lines, columns, squeeze=False).ravel()
        for place, panel in enumerate(panels):
            _panel(axes[place], results, panel, first=place == 0)
            axes[place].set_xticks(range(len(titles)), titles, rotation=60, ha="right")
        for unused in axes[len(panels) :]:
            unused.set_visible(False)
        drawn.legend(loc="outside lower center", ncols=len(methods) + 1)
        drawn.suptitle("after each run; grey: on the task of the panel", fontsize=12)


def _panel(axes: Any, results: ChainResults, panel: str, first: bool) -> None:
    """One number after every step: a line per method, thin lines for several seeds, intervals for one."""
    chain = results.chain
    task = next((task for task in chain.tasks if task.name == panel), None)
    for index, method in enumerate(chain.methods):
        seeds, style = results.of(method), look(index)
        lines = [_track(panel, models) for models in seeds]
        means = [sum(values) / len(lines) for values in zip(*lines, strict=True)]
        offset = 0.08 * (index - (len(chain.methods) - 1) / 2)  # equal lines are seen
        places = [step + offset for step in range(len(chain.steps))]
        if task is not None and len(lines) == 1:  # of one seed: intervals over examples
            ends = [(model.probes[panel].low, model.probes[panel].high) for model in seeds[0]]
            axes.vlines(places, *zip(*ends, strict=True), color=style["color"], alpha=0.5, linewidth=1.5)
        for line in lines if len(lines) > 1 else ():
            axes.plot(places, line, color=style["color"], alpha=0.3, linewidth=1)
        axes.plot(places, means, **style, label=method if first else None)
    if task is None:
        axes.set_title(panel)
        _from_zero(axes)
        return
    rate = results.majority(panel)
    if rate is not None:
        label = "most common class" if first else None
        axes.axhline(rate, color=GREY, linestyle="--", linewidth=1.5, label=label)
    for step in (step for step, title in enumerate(chain.steps) if title == panel):
        axes.axvspan(step - 0.25, step + 0.25, color=GREY, alpha=0.12, linewidth=0)
    what = "linear probe, accuracy (%)" if task.run is None else f"{task.run.card.score_title} (%)"
    axes.set(title=f"{panel} (source)" if first else panel, ylabel=what)


def _track(panel: str, models: Sequence[ProbedModel]) -> list[Any]:
    """One number after every step."""
    if panel == RANK:
        return [model.rank for model in models]
    if panel == CKA:
        return [model.layers[-1].cka for model in models]
    return [model.probes[panel].score for model in models]


def shift(results: Mapping[str, ShiftScores], target: str, metric: str, *files: Path) -> None:
    """The score on the target by the share of its examples, one colour and marker per model."""
    with figure(*files, width=8, height=5) as drawn:
        axes = drawn.subplots()
        shares = list(next(iter(results.values())).target)
        for index, (name, scores) in enumerate(results.items()):
            offset = (index - (len(results) - 1) / 2) * min(0.08, 0.5 / len(results))
            _with_intervals(axes, list(scores.target.values()), offset, capsize=4, label=name, **look(index))
        axes.set(xticks=range(len(shares)), xticklabels=[f"{share:.0%}" for share in shares])
        axes.set(xlabel=f"share of the training examples of {target}", ylabel=f"{metric} (%)", title=f"on {target}")
        axes.set_xlim(-0.4, len(shares) - 0.6)
        axes.legend()
