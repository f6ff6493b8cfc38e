"""How operations, memory and time of a step grow with its sizes, as fitted exponents: 1 is linear, 2 is quadratic."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from benchmarks.sizes import Size
from benchmarks.steps import HF, PLAIN, Variant, variants
from benchmarks.worker_process import clock, count_flops, peak_memory
from seqreg.errors import Advice
from seqreg.workbench.data.hardware import prepare_cpu

Axis = Literal["classes", "target", "source", "rows", "layers"]
BASE = Size(width=64, layers=2, heads=2, classes=8000, source=64, target=32, rows=4, together=1)
"""What one size at a time is changed of."""
POINTS: dict[Axis, tuple[int, ...]] = {
    "classes": (2000, 8000, 32_000, 128_000, 256_000),
    "target": (16, 32, 64, 128, 256),
    "source": (32, 64, 128, 256, 512),
    "rows": (1, 2, 4, 8, 16),
    "layers": (1, 2, 4, 8),
}
LAST = 3
"""Points that an exponent is fitted to: the largest, where what does not grow counts least."""


@dataclass(frozen=True)
class Curve:
    """One step over one size.

    Args:
        points: the sizes
        flops, memory, seconds: at each of them; memory with parameters
    """

    name: str
    axis: Axis
    points: tuple[int, ...]
    flops: tuple[int, ...]
    memory: tuple[int, ...]
    seconds: tuple[float, ...]

    def exponent(self, of: Literal["flops", "memory", "seconds"]) -> float:
        """The slope of its logarithm over that of the size."""
        return exponent(self.points, getattr(self, of))


def exponent(points: Sequence[float], values: Sequence[float]) -> float:
    """Least squares over the largest points.

    >>> round(exponent([1, 2, 4, 8], [5, 12, 48, 192]), 3)
    2.0
    """
    x, y = np.log(np.asarray(points[-LAST:], float)), np.log(np.asarray(values[-LAST:], float))
    return float(np.polyfit(x, y, 1)[0])


def measure(
    terms: Sequence[str] | None = None,
    axes: Sequence[Axis] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Curve]:
    """Every step over every size, on one thread.

    Args:
        terms: only these; all by default
        axes: only these; all by default
        progress: told what is being done
    """
    steps = [variant for variant in variants(terms, presets=False) if not variant.heavy and _default(variant)]
    curves, threads = [], torch.get_num_threads()
    prepare_cpu()  # as every command does
    torch.set_num_threads(1)  # its time is then that of this process alone
    try:
        for axis in axes or POINTS:
            for variant in steps:
                if progress is not None:
                    progress(f"{axis}: {variant.name}")
                curves.append(_curve(variant, axis))
    finally:
        torch.set_num_threads(threads)
    return curves


def _default(variant: Variant) -> bool:
    """The plain steps, and every term with its defaults."""
    return variant.name in (HF, PLAIN) or variant.name == variant.term


def _curve(variant: Variant, axis: Axis) -> Curve:
    flops, memory, seconds = [], [], []
    for point in POINTS[axis]:
        size = dataclasses.replace(BASE, **{axis: point})  # type: ignore[arg-type]
        model, batch = size.model(), size.batch()
        step = variant.step(model, batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Advice)  # random weights are not to be trained
            flops.append(count_flops(step))  # warms up too
            memory.append(peak_memory(variant.step(model, batch), model))
            begin = clock()
            step()
            seconds.append(clock() - begin)
    return Curve(variant.name, axis, POINTS[axis], tuple(flops), tuple(memory), tuple(seconds))


def plot(curves: Sequence[Curve], path: str) -> None:
    """Operations and memory over every size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes = list(dict.fromkeys(curve.axis for curve in curves))
    figure, panels = pyplot.subplots(
        2, len(axes), figsize=(3.2 * len(axes) + 1.6, 6), squeeze=False, layout="constrained"
    )
    for column, axis in enumerate(axes):
        for row, (of, label) in enumerate((("flops", "operations"), ("memory", "peak memory, bytes"))):
            panel = panels[row][column]
            for number, curve in enumerate(some for some in curves if some.axis == axis):
                style = "-" if number < 10 else "--"
                panel.loglog(curve.points, getattr(curve, of), style, marker=".", linewidth=1, label=curve.name)
            panel.set_title(axis if row == 0 else "", fontsize=10)
            panel.set_ylabel(label if column == 0 else "")
            panel.set_xticks(
                POINTS[axis],
                [f"{point // 1000}k" if point >= 1000 else str(point) for point in POINTS[axis]],
                fontsize=7,
                minor=False,
            )
            panel.minorticks_off()
    panels[0][-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
