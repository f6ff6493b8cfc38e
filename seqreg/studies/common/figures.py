"""How every figure looks: one size of letters, colours that all eyes tell apart, PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seqreg.workbench.text.atomic_files import written_aside

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's, those that are far apart first."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Series differ by marker too, so that a figure survives a black-and-white printer."""

STYLE: dict[Any, Any] = {
    "font.size": 13, "axes.titlesize": 14, "axes.labelsize": 13, "legend.fontsize": 12, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "lines.linewidth": 2,
    "figure.constrained_layout.use": True, "svg.fonttype": "path", "svg.hashsalt": "seqreg", "figure.dpi": 100,
    "text.parse_math": False,
}  # fmt: skip
"""Large enough to be read at half size; SVG that is the same on every run; a $ in a name is no formula."""


def look(index: int) -> dict[str, str]:
    """The colour and the marker of a series; after the last colour the first again, with another marker."""
    turns, place = divmod(index, len(COLOURS))
    return {"color": COLOURS[place], "marker": MARKERS[(place + turns) % len(MARKERS)]}


@contextmanager
def figure(*files: Path, width: float = 8, height: float = 5) -> Iterator[Any]:
    """A matplotlib figure in our style, written to the files (.png, .svg, .pdf) when the block ends."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter

        drawn = Figure(figsize=(width, height))
        yield drawn
        for axis in (axis for axes in drawn.axes for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() == "log"):
            axis.set_major_formatter(LogFormatter())  # the default one writes powers of ten as formulas
            axis.set_minor_formatter(LogFormatter())  # seen where there is less than a power of ten
        for file in files:
            kind, date = file.suffix[1:], {"Date": None} if file.suffix == ".svg" else None
            with written_aside(file) as aside:
                drawn.savefig(aside, dpi=150, format=kind, metadata=date)
