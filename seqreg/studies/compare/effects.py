"""The first figure of a report: the effect of every method with its interval, as positions on one scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from seqreg.studies.common.figures import look
from seqreg.studies.compare.judgement import BETTER, WORSE, judgement, judgement_words

_TONES = {BETTER: "good", WORSE: "bad"}


@dataclass(frozen=True)
class Effect:
    """One method; positions are percentages of the width of the scale.

    Args:
        ends: of the interval; None where there is none
        tone: "good" or "bad" where the verdict is, else ""
    """

    name: str
    free: bool
    colour: str
    place: float
    ends: tuple[float, float] | None
    numbers: str
    verdict: str
    tone: str


@dataclass(frozen=True)
class Effects:
    """All of them, the position of no difference, and marks of the scale: positions and labels."""

    methods: list[Effect]
    zero: float
    ticks: list[tuple[float, str]]


def effects(values: dict[str, Any]) -> Effects | None:
    """Differences to the baseline; None if there is nothing to compare with it yet."""
    methods = {name: stats for name, stats in values["methods"].items() if "difference" in stats}
    if not methods:
        return None
    from matplotlib.ticker import MaxNLocator

    numbers = [0.0]
    for stats in methods.values():
        numbers += [stats["difference"]["difference"], *(stats["difference"]["interval"] or ())]
    numbers += [] if any(numbers) else [-1.0, 1.0]  # nothing differs: a scale of one point
    reach = max(numbers) - min(numbers)
    low, high = min(numbers) - 0.06 * reach, max(numbers) + 0.06 * reach

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    colours = {name: look(index)["color"] for index, name in enumerate(values["methods"])}
    shown = [_effect(name, stats, values, colours[name], place) for name, stats in methods.items()]
    marks = [float(tick) for tick in MaxNLocator(5, min_n_ticks=3).tick_values(low, high) if low <= tick <= high]
    return Effects(shown, place(0.0), [(place(mark), f"{mark:+g}" if mark else "0") for mark in marks])


def _effect(name: str, stats: dict[str, Any], values: dict[str, Any], colour: str, place: Any) -> Effect:
    plus = stats["difference"]
    ends, numbers = None, f"{plus['difference']:+.2f}"
    if plus["interval"] is not None:
        ends = (place(plus["interval"][0]), place(plus["interval"][1]))
        numbers += " ({:+.2f} to {:+.2f})".format(*plus["interval"])
    tone = _TONES.get(judgement(stats, values), "")
    return Effect(
        name, stats["free"], colour, place(plus["difference"]), ends, numbers, judgement_words(stats, values), tone
    )
