"""The scores of runs, as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.table import Table
from rich.text import Text

from seqreg.errors import BadInput
from seqreg.metrics.variety import VARIETY
from seqreg.workbench.text.escape import plain

METRICS = "metrics.json"


def scores_of(folder: Path) -> dict[str, Any]:
    """The contents of a run's metrics.json."""
    path = folder / METRICS
    if not path.is_file():
        raise BadInput(f"{folder}: no {METRICS} in it: has its training ended?")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    try:
        _Metrics.model_validate(found)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise BadInput(f"{path}: {key or 'all of it'}: not what seqreg writes there: was it changed?") from None
    return dict(found)


class _Split(BaseModel):
    """The numbers of a split."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None] = {}
    intervals: dict[str, tuple[float | None, float | None]] = {}
    signature: str = ""


class _Train(BaseModel):
    seconds: float | None = None
    cpu_seconds: float | None = None
    step_seconds: float | None = None
    device: str = ""


class _Metrics(BaseModel):
    """What tables read of metrics.json."""

    scores: dict[str, _Split]
    train: _Train = _Train()
    method: str = ""


CPU, STEPS, WHOLE = "CPU time of the training steps", "wall time of the training steps", "wall time of the training"


def cost(runs: Sequence[Mapping[str, Any]]) -> tuple[str, list[float]]:
    """What the trainings of runs cost: what was measured, and its seconds.

    On a CPU that is the time that all threads of the process spent on steps, which other work on the machine does not
    change; on an accelerator the wall time of the steps. Runs that did not measure either have their whole wall time.
    """
    trains = [metrics.get("train", {}) for metrics in runs]
    if all(one.get("cpu_seconds") and one.get("device") == "cpu" for one in trains):
        return CPU, [one["cpu_seconds"] for one in trains]
    if all(one.get("step_seconds") for one in trains):
        return STEPS, [one["step_seconds"] for one in trains]
    return WHOLE, [one.get("seconds") or 0.0 for one in trains]


def main_split(scores: Mapping[str, Any], texts: bool) -> str:
    """The split whose scores decide: the average over sets of a classifier, the test set, or what there is."""
    if "average" in scores and not texts:
        return "average"
    named = [name for name in scores if name not in ("before", "average")]
    return next((name for name in ("test", "validation") if name in named), named[0])


def score_table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Scores of one run or several side by side; `runs` are contents of metrics.json."""
    table = Table(title="scores in percent, with intervals over examples" if len(runs) == 1 else "scores in percent")
    table.add_column("split")
    table.add_column("score")
    for name in runs:
        table.add_column(plain(name), justify="right")
    for split, key in _lines(list(runs.values())):
        cells = [_cell(metrics["scores"].get(split, {}), key, len(runs) == 1) for metrics in runs.values()]
        table.add_row(plain(split), plain(key), *cells)
    seconds = [metrics.get("train", {}).get("seconds") for metrics in runs.values()]
    if all(seconds):
        table.add_section()
        table.add_row("training", "seconds", *(f"{value:.1f}" for value in seconds))
        what, spent = cost(list(runs.values()))
        if what != WHOLE:
            head = "CPU seconds" if what == CPU else "seconds of steps"
            table.add_row("training", head, *(f"{value:.1f}" for value in spent))
        if len(runs) > 1:
            head = f"{'CPU time' if what == CPU else 'time'} / {plain(next(iter(runs)))}"
            table.add_row("training", head, *(f"{value / spent[0]:.2f}x" for value in spent))
    return table


def _lines(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Split and score of every line: what has an interval, of all runs."""
    lines: dict[tuple[str, str], None] = {}
    for metrics in found:
        for split, numbers in metrics["scores"].items():
            keys = list(numbers.get("intervals", {})) or [
                k for k in numbers if k not in ("score", "intervals", "signature", *VARIETY)
            ]
            for key in [*keys, *(k for k in ("gen_len", "empty", "distinct", "most_common", "spread") if k in numbers)]:
                lines[split, key] = None
    return list(lines)


def _cell(numbers: Mapping[str, Any], key: str, wide: bool) -> str | Text:
    if key not in numbers:
        return ""
    if numbers[key] is None:
        return "not finite"
    if key == "empty":
        return f"{numbers[key]:.0f} texts"
    if key == "gen_len":
        return f"{numbers[key]:.1f} words"
    if key in VARIETY:
        beside = {"distinct": "distinct_references", "most_common": "most_common_reference"}.get(key, "")
        truth = f", references {numbers[beside]:.1f}%" if wide and beside in numbers else ""
        fallen = bool(numbers.get("collapsed"))
        return Text(f"{numbers[key]:.1f}%{truth}{' (collapsed)' if fallen else ''}", "yellow" if fallen else "")
    pair = numbers.get("intervals", {}).get(key)
    if not (pair and wide) or None in pair:
        return f"{numbers[key]:.2f}"
    return Text.assemble(f"{numbers[key]:.2f}  ", (f"{pair[0]:.2f} to {pair[1]:.2f}", "dim"))
