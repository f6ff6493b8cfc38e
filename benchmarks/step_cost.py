"""What one training step costs, against the plain step of transformers: time, floating-point operations and memory.

Every variant has a process of its own, as in a training run, and they take turns on one machine, so that ratios mean
something where it is busy with other things. Operations and memory are exact; times are medians over rounds.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from benchmarks.profile_step import StepProfile
from benchmarks.sizes import SIZES
from benchmarks.steps import BY_HAND, COMPILED, HEAVY, HF, PLAIN, UNPREPARED, Variant, variants
from benchmarks.worker_process import Worker
from seqreg.errors import BadInput, nearest


@dataclass(frozen=True)
class StepCost:
    """One step of a variant.

    Args:
        seconds: of every round
        flops: floating-point operations of matrix products
        memory: bytes at the peak, with the parameters and without an optimizer; None where not measured
    """

    seconds: tuple[float, ...]
    flops: int
    memory: int | None


@dataclass(frozen=True)
class StepRatios:
    """A variant against the plain step of transformers; `time_range` is over rounds.

    Args:
        of_peak: achieved operations a second, over those of a large matrix product on the same machine. Those of the
            plain step are a median over groups; the others follow from it by their ratios
    """

    name: str
    time: float
    time_range: tuple[float, float]
    flops: float
    memory: float | None
    of_peak: float = 0.0


@dataclass(frozen=True)
class Bench:
    size: str
    rounds: int
    threads: int
    peak: float
    """Operations a second of a large matrix product."""
    rows: tuple[StepRatios, ...]


def measure(
    size: str = "small",
    terms: Sequence[str] | None = None,
    rounds: int = 5,
    threads: int = 1,
    presets: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    compiled: bool = False,
) -> Bench:
    """All variants, in turns.

    Args:
        size: a name of `SIZES`
        terms: only these; all by default
        rounds: every variant is timed once in each
        threads: of torch
        presets: also measure what released code computes
        progress: told what is being done, and how much of how much is done
        compiled: also measure compiled models, by inductor
    """
    if size not in SIZES:
        raise BadInput(f"unknown size {size!r}; {nearest(size, SIZES)}")
    if rounds < 1 or threads < 1:
        raise BadInput(f"rounds={rounds}, threads={threads}: expected whole numbers >= 1")
    if compiled and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise BadInput("--compile: torch's inductor needs a C++ compiler, g++ or clang++: install one, or set CXX")
    plain, *others = variants(terms, presets, SIZES[size].kind, compiled)
    if SIZES[size].large:  # a quarter of an hour each
        others = [variant for variant in others if not variant.heavy]
    groups = _groups(others, SIZES[size].together - 1)
    total = sum(sum(1 if variant.heavy else rounds + 2 for variant in (plain, *group)) for group in groups)
    done = 0

    def tell(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(what, done, total)
        done += 1

    rows: dict[str, StepRatios] = {}
    peaks, achieved = [], []
    for group in groups:
        with ExitStack() as exits:
            team = [exits.enter_context(closing(Worker(size, each, threads))) for each in (plain, *group)]
            for worker in team:
                worker.wait()
            costs, peak = _take_turns(team, rounds, tell)
        rows |= {name: _row(name, cost, costs[HF]) for name, cost in costs.items() if name not in rows}
        peaks.append(peak)
        achieved.append(costs[HF].flops / statistics.median(costs[HF].seconds))
    tell("done")
    of_peak = statistics.median(achieved) / max(peaks)
    compared = tuple(dataclasses.replace(row, of_peak=of_peak * row.flops / row.time) for row in rows.values())
    return Bench(size, rounds, threads, max(peaks), compared)


def profile(
    size: str, terms: Sequence[str], threads: int = 1, progress: Callable[[str], None] | None = None
) -> list[StepProfile]:
    """Where the time of the plain steps goes, and of those with these terms; each in a process of its own.

    Args:
        size: a name of `SIZES`
        progress: told what is being done
    """
    profiles = []
    for variant in variants(terms, presets=False, kind=SIZES[size].kind):
        if variant.heavy or variant.name not in (HF, UNPREPARED, PLAIN, variant.term):
            continue
        if progress is not None:
            progress(variant.name)
        with closing(Worker(size, variant, threads)) as worker:
            worker.wait()
            profiles.append(worker.ask("profile"))
    return profiles


def _groups(items: Sequence[Variant], most: int) -> list[Sequence[Variant]]:
    """Groups of nearly one size: each is measured beside a plain step of its own."""
    count = -(-len(items) // most)
    return [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]


def _take_turns(team: Sequence[Worker], rounds: int, tell: Callable[[str], None]) -> tuple[dict[str, StepCost], float]:
    """What each of them costs, and the operations a second of a large matrix product."""
    flops: dict[str, int] = {}
    memory: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    light = [worker for worker in team if not worker.variant.heavy]
    for worker in team:
        name = worker.variant.name
        tell(f"operations: {name}")
        flops[name], taken = worker.ask("operations")
        seconds[name] = [] if worker in light else [taken]
    for worker in light:
        tell(f"memory: {worker.variant.name}")
        memory[worker.variant.name] = worker.ask("memory")
    peak = 0.0
    for turn in range(rounds):
        for worker in light:
            tell(f"time, round {turn + 1} of {rounds}: {worker.variant.name}")
            seconds[worker.variant.name].append(worker.ask("seconds"))
        peak = max(peak, team[0].ask("peak"))
    return {name: StepCost(tuple(seconds[name]), flops[name], memory.get(name)) for name in flops}, peak


def _row(name: str, cost: StepCost, plain: StepCost) -> StepRatios:
    times = cost.seconds if len(cost.seconds) > 1 else cost.seconds * len(plain.seconds)  # a heavy one is timed once
    ratios = sorted(seconds / other for seconds, other in zip(times, plain.seconds, strict=True))
    return StepRatios(
        name,
        statistics.median(cost.seconds) / statistics.median(plain.seconds),
        (ratios[0], ratios[-1]),
        cost.flops / plain.flops,
        None if cost.memory is None or plain.memory is None else cost.memory / plain.memory,
    )


def plot(bench: Bench, path: str) -> None:
    """Bars of time and memory for every variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = bench.rows[::-1]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 1.2 + 0.28 * len(rows)), sharey=True, layout="constrained")
    places = range(len(rows))
    for axis, title in zip(axes, ("time", "peak memory"), strict=True):
        timed = title == "time"
        values = [row.time if timed else row.memory or 0.0 for row in rows]
        ends = [row.time_range[1] for row in rows] if timed else values
        axis.barh(places, values, color=[_colour(row.name) for row in rows], height=0.7)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{title}, plain transformers = 1")
        widest = max(end for end in ends if end < HEAVY)  # a heavy one leaves the picture, and its number stays
        axis.set_xlim(0, 1.15 * widest)
        for place, value, end in zip(places, values, ends, strict=True):
            shown = f" {value:.2f}" if value else " not measured"
            axis.text(min(end, 1.02 * widest), place, shown, va="center", fontsize=8)
    spread = [[row.time - row.time_range[0] for row in rows], [row.time_range[1] - row.time for row in rows]]
    axes[0].errorbar(
        [row.time for row in rows], places, xerr=[[max(x, 0.0) for x in side] for side in spread],
        fmt="none", ecolor="#555555", elinewidth=0.8,
    )  # fmt: skip
    axes[0].set_yticks(places, [row.name for row in rows], fontsize=8)
    figure.suptitle(
        f"One training step, {bench.size} (blue: seqreg; orange: computed as released code does; grey: without seqreg)"
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _colour(name: str) -> str:
    if name.removesuffix(COMPILED) in BY_HAND:
        return "#999999"
    return "#d55e00" if "from logits" in name else "#0072b2"
