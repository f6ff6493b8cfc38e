"""The figures of `seqreg calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seqreg.metrics.calibration import Bins, Coverage, Temperature, binned
from seqreg.studies.calibrate.report import Calibration, CalibrationPart, GeneratedTexts
from seqreg.studies.common.figures import COLOURS, figure

ENDINGS = (".png", ".svg")


def draw(folder: Path, calibration: Calibration) -> list[str]:
    """All figures; returns their names."""
    names = []
    for part in calibration.parts:
        stem = "calibrate" if part is calibration.parts[0] else f"calibrate_{part.name.replace(' ', '_')}"
        files = [folder / f"{stem}{ending}" for ending in ENDINGS]
        with figure(*files, width=10, height=6.5) as drawn:
            _reliability(drawn, part, calibration.fitted)
        names += [file.name for file in files]
    if calibration.coverage is not None:
        files = [folder / f"calibrate_coverage{ending}" for ending in ENDINGS]
        with figure(*files) as drawn:
            _coverage(drawn.subplots(), calibration.coverage, calibration.texts)
        names += [file.name for file in files]
    return names


def _reliability(drawn: Any, part: CalibrationPart, fitted: Temperature) -> None:
    """Accuracy against confidence above, how many below; before the temperature and after."""
    axes = drawn.subplots(2, 2, sharex=True, sharey="row", height_ratios=[3, 1])
    drawn.suptitle(f"{part.name}: {len(part.before)} predictions")
    sides = (("as trained", part.before), (f"temperature {fitted.value:.3g}", part.after))
    for column, (title, outcomes) in enumerate(sides):
        bins = binned(outcomes.confidence, outcomes.correct, part.bins)
        numbers = part.numbers["after" if column else "before"]
        upper, lower = axes[0][column], axes[1][column]
        upper.set_title(f"{title}: ECE {numbers['ece']:.3f}")
        upper.plot([0, 1], [0, 1], color=COLOURS[7], linestyle="--", label="calibrated")
        _bars(upper, bins, bins.accuracy, COLOURS[0], "accuracy")
        upper.plot(bins.confidence, bins.accuracy, "o", color=COLOURS[1], clip_on=False, label="mean of the bin")
        _bars(lower, bins, bins.count, COLOURS[7], None)
        _counts(lower, bins)
        lower.set_xlabel("confidence")
        lower.set_xlim(0, 1)
    axes[0][0].set_ylim(0, 1.02)
    axes[0][0].set_ylabel("accuracy")
    axes[1][0].set_ylabel("count")
    axes[1][0].set_ylim(0, axes[1][0].get_ylim()[1] * 1.35)
    axes[0][0].legend(loc="upper left", frameon=True, framealpha=0.9)


def _bars(axis: Any, bins: Bins, heights: Any, colour: str, label: str | None) -> None:
    axis.bar(
        bins.low, heights, bins.high - bins.low, align="edge", color=colour, alpha=0.35, edgecolor=colour, label=label
    )


def _counts(axis: Any, bins: Bins) -> None:
    for low, high, count in zip(bins.low, bins.high, bins.count, strict=True):
        axis.text((low + high) / 2, count, str(count), ha="center", va="bottom", fontsize=8)


def _coverage(axis: Any, coverage: Coverage, texts: GeneratedTexts | None) -> None:
    axis.plot(coverage.coverage, coverage.risk, color=COLOURS[0], label=f"surest first, area {coverage.area:.3f}")
    axis.axhline(coverage.random, color=COLOURS[7], linestyle="--", label=f"knowing nothing, {coverage.random:.3f}")
    axis.set_xlabel("coverage: share that is answered")
    axis.set_ylabel(texts.risk if texts else "error")
    axis.set_ylim(bottom=0)
    axis.set_title("Risk if only the surest are answered")
    axis.legend()
