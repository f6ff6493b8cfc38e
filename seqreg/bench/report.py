"""What `seqreg bench` prints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seqreg.errors import BadInput
from seqreg.workbench.text.atomic_files import writable
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import console, print_json

if TYPE_CHECKING:
    from seqreg.bench.measure import Bench


def steps(
    size: str,
    terms: Sequence[str],
    rounds: int | None,
    threads: int,
    presets: bool,
    *,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Measure steps, and print a table or JSON."""
    if plot is not None:
        _check_plot(plot)
    from seqreg.bench import measure as bench

    rounds = rounds or (9 if size == "bart-base" else 5)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("preparing")

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and done % 10 == 0:
                console.print(f"  {done} of {total}: {what}")

        result = bench.measure(size, terms or None, rounds, threads, presets, tell)
    _show(result, as_json)
    if plot is not None:  # after the numbers, which are not lost if it fails
        bench.plot(result, str(plot))
        console.print(f"Drawn in {plain(plot)}", markup=False)


def _check_plot(plot: Path) -> None:
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--plot {plot}: expected a file that ends in .png, .svg or .pdf")
    writable(plot, "--plot ")
    if not plot.absolute().parent.is_dir():
        raise BadInput(f"--plot {plot}: the folder does not exist")
    if plot.is_dir() or not os.access(plot if plot.exists() else plot.absolute().parent, os.W_OK):
        raise BadInput(f"--plot {plot}: it cannot be written; a folder, or not yours to write?")


def _show(result: Bench, as_json: bool) -> None:
    if as_json:
        print_json(result.json())
        return
    out = Console(highlight=False)
    out = out if out.is_terminal else Console(highlight=False, width=110)
    out.print(table(result))
    out.print(
        f"Ratios to plain transformers: medians over rounds ({result.rounds}) in turns, with their range; "
        f"{result.threads} thread(s). Memory: the peak with parameters, without an optimizer. "
        f"Limit: the {result.peak / 1e9:.0f} GFLOP/s of a large matrix product on this machine."
    )
    if any("preset" in row.name for row in result.rows):
        out.print("A preset is what released code computes; 'from logits', also the way it does.")


def table(result: Bench) -> Table:
    shown = Table(title=f"One training step, {result.size}")
    shown.add_column("step", no_wrap=True)
    for name in ("time", "range", "FLOPs", "memory", "of the limit"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        memory = "" if row.memory is None else f"{row.memory:.2f}x"
        spread = f"{row.time_range[0]:.2f} to {row.time_range[1]:.2f}"
        shown.add_row(row.name, f"{row.time:.2f}x", spread, f"{row.flops:.2f}x", memory, f"{row.of_peak:.0%}")
    return shown


def scores(*, as_json: bool) -> None:
    """Measure ROUGE beside rouge-score on a test set of CNN/DailyMail's size."""
    from seqreg.bench import rouge_speed

    console.print("  scoring 11,490 generated summaries; rouge-score on 300 of them, scaled")
    speed = rouge_speed.compare(progress=console.is_terminal)
    if as_json:
        print_json(speed)
        return
    shown = Table(title=f"ROUGE-1, 2, L and Lsum with stemming, {speed['pairs']:,.0f} pairs")
    for name in ("", "seconds", "times faster"):
        shown.add_column(name, justify="right" if name else "left")
    shown.add_row(f"rouge-score (scaled from {speed['sample']:.0f} pairs)", f"{speed['reference_seconds']:.1f}", "1.0x")
    shown.add_row("seqreg", f"{speed['seconds']:.1f}", f"{speed['ratio']:.1f}x")
    out = Console(highlight=False)
    out.print(shown)
    same = "agree to the last bit" if speed["equal"] else "DIFFER"
    out.print(f"All scores of the sample {same}.")


def padding(*, as_json: bool) -> None:
    """Measure the share of padding in batches of Gigaword's lengths."""
    from seqreg.bench import batch_padding

    shares = batch_padding.compare()
    if as_json:
        print_json(shares)
        return
    shown = Table(title="Share of padding, source and target tokens, Gigaword's lengths")
    for name in ("batch size", "random", "grouped by source", "grouped by sum", "ours"):
        shown.add_column(name, justify="right")
    for size, wastes in shares.items():
        shown.add_row(str(size), *(f"{wastes[key]:.1%}" for key in ("random", "source", "sum", "ours")))
    Console(highlight=False).print(shown)
