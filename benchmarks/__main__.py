"""The command `seqreg bench`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seqreg.cli.options import Json, Settings, print_result
from seqreg.errors import BadInput
from seqreg.workbench.text.atomic_files import writable
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import console, print_json, quiet

if TYPE_CHECKING:
    from seqreg.bench.measure import Bench

app = typer.Typer()


@app.command()
def bench(
    size: Annotated[
        Literal["tiny", "small", "long", "bart-base", "causal", "classifier"],
        typer.Option(
            help="The model and batch; `tiny` takes minutes, `bart-base` an hour; `long`: 1,024 source tokens; "
            "`causal`: the shape of SmolLM-135M; `classifier`: of RoBERTa-base."
        ),
    ] = "small",
    terms: Annotated[
        Optional[list[str]], typer.Option("--terms", "-t", help="Only these terms; may be repeated. All by default.")
    ] = None,
    rounds: Annotated[
        Optional[int], typer.Option(min=1, max=100_000, help="Every step is timed once per round.")
    ] = None,
    threads: Annotated[
        int,
        typer.Option(
            min=1, max=1024, help="Threads of torch. One is timed by CPU time, which other work leaves alone."
        ),
    ] = 1,
    presets: Annotated[bool, typer.Option(help="Also measure what released code computes, and how.")] = True,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also measure steps of a model that torch.compile has compiled.")
    ] = False,
    rouge: Annotated[bool, typer.Option("--rouge", help="Measure ROUGE beside rouge-score instead.")] = False,
    batches: Annotated[bool, typer.Option("--batches", help="Measure padding on Gigaword's lengths instead.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Measure reading and tokenizing a generated CNN/DailyMail instead.")
    ] = False,
    examples: Annotated[
        Optional[int], typer.Option(min=1, max=100_000_000, help="With --data: articles, 287,113 by default.")
    ] = None,
    engine: Annotated[
        Optional[Literal["fsdp2", "ddp"]],
        typer.Option(help="Measure R3F on two ranks of this engine instead, with a plain head and a fused one."),
    ] = None,
    frontier: Annotated[
        Optional[str],
        typer.Option(
            metavar="RECIPE",
            help="Measure cheaper forms of R3F and of R-Drop's divergence instead, on the model and the first batch "
            "of this recipe: what they cost, and what is left of the gradient. `--rounds`: gradients of each.",
        ),
    ] = None,
    growth: Annotated[
        bool,
        typer.Option("--growth", help="Measure how steps grow with vocabulary, lengths, batch and layers instead."),
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show instead where the time of a step goes, by kinds of operators.")
    ] = False,
    settings: Settings = None,
    as_json: Json = False,
    plot: Annotated[Optional[Path], typer.Option(help="Also draw the table: a .png, .svg or .pdf file.")] = None,
) -> None:
    """Measure what a training step costs with every term, against the plain step of transformers.

    Time, floating-point operations and peak memory, on the CPU; the variants take turns.

    seqreg bench --terms r3f --terms rdrop

    seqreg bench --size bart-base --no-presets --plot cost.png

    seqreg bench --compile --terms r3f --no-presets

    seqreg bench --rouge

    seqreg bench --data --examples 2000

    seqreg bench --engine fsdp2

    seqreg bench --profile --size bart-base --terms r3f

    seqreg bench --growth --terms r3f --plot growth.png

    seqreg bench --frontier gigaword model.name=FOLDER data.path=FILE.jsonl --plot frontier.png
    """
    alone = [name for name, wanted in (("--rouge", rouge), ("--batches", batches), ("--data", data)) if wanted]
    if len(alone) > 1:
        raise BadInput(f"{' and '.join(alone)}: each is measured alone")
    if (growth or profile) and (alone or engine or frontier or rounds or growth is profile):
        raise BadInput("--growth and --profile: each is measured alone, once")
    if growth and (size != "small" or threads != 1):
        raise BadInput("--growth has sizes of its own: leave out --size and --threads")
    if profile and plot:
        raise BadInput("--profile draws nothing: leave out --plot")
    if engine and alone:
        raise BadInput(f"--engine is measured alone: leave out {alone[0]}")
    if settings and not frontier:
        raise BadInput(f"{settings[0]}: settings change the recipe of --frontier, which is not given")
    if frontier and (alone or engine or terms or size != "small" or threads != 1):
        raise BadInput("--frontier is measured alone: leave out all other options but --rounds, --plot and --json")
    if alone and (terms or rounds or plot or size != "small" or threads != 1):
        raise BadInput(f"{alone[0]} measures no steps: leave out --size, --terms, --rounds, --threads and --plot")
    if frontier and rounds == 1:
        raise BadInput("--rounds 1: expected a whole number >= 2, as --frontier compares two gradients")
    if examples and not data:
        raise BadInput("--examples is for --data: leave it out")
    if engine and (terms or rounds or plot or size != "small" or threads != 1):
        raise BadInput(
            "--engine measures one step of its own: leave out --size, --terms, --rounds, --threads and --plot"
        )
    for option, given in (("--compile", compiled), ("--no-presets", not presets)):
        if given and (alone or engine or frontier or growth or profile):
            raise BadInput(f"{option} is about the rows of the table of steps: leave it out here")
    if plot is not None:
        _check_plot(plot)
    if rouge:
        _rouge(as_json)
    elif batches:
        _padding(as_json)
    elif data:
        _data(examples, as_json)
    elif engine is not None:
        _engine(engine, as_json)
    elif growth:
        _growth(terms, as_json, plot)
    elif profile:
        _profile(size, terms, threads, as_json)
    elif frontier is not None:
        _frontier(frontier, settings or [], rounds or 32, as_json, plot)
    else:
        _steps(size, terms, rounds or (9 if size == "bart-base" else 5), threads, presets, compiled, as_json, plot)


def _check_plot(plot: Path) -> None:
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--plot {plot}: expected a file that ends in .png, .svg or .pdf")
    writable(plot, "--plot ")
    if not plot.absolute().parent.is_dir():
        raise BadInput(f"--plot {plot}: the folder does not exist")
    if plot.is_dir() or not os.access(plot if plot.exists() else plot.absolute().parent, os.W_OK):
        raise BadInput(f"--plot {plot}: it cannot be written; a folder, or not yours to write?")


def _steps(
    size: str,
    terms: list[str] | None,
    rounds: int,
    threads: int,
    presets: bool,
    compiled: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    from seqreg.bench import measure

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("preparing")

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and done % 10 == 0:
                console.print(f"  {done} of {total}: {what}")

        measured = measure.measure(size, terms, rounds, threads, presets, tell, compiled)
    if as_json:
        print_result(measured, as_json=True)
    else:
        _print_steps(measured)
    if plot is not None:  # after the numbers, which are not lost if it fails
        measure.plot(measured, str(plot))
        console.print(f"Drawn in {plain(plot)}", markup=False)


def _wide() -> Console:
    """Where tables of many columns are printed."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=110)


def _print_steps(measured: Bench) -> None:
    out = _wide()
    table = Table(title=f"One training step, {measured.size}")
    table.add_column("step", no_wrap=True)
    for name in ("time", "range", "FLOPs", "memory", "of the limit"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in measured.rows:
        memory = "" if step.memory is None else f"{step.memory:.2f}x"
        spread = f"{step.time_range[0]:.2f} to {step.time_range[1]:.2f}"
        table.add_row(step.name, f"{step.time:.2f}x", spread, f"{step.flops:.2f}x", memory, f"{step.of_peak:.0%}")
    out.print(table)
    out.print(
        f"Ratios to plain transformers: medians over rounds ({measured.rounds}) in turns, with their range; "
        f"{measured.threads} thread(s). Memory: the peak with parameters, without an optimizer. "
        f"Limit: the {measured.peak / 1e9:.0f} GFLOP/s of a large matrix product on this machine."
    )
    if any("preset" in step.name for step in measured.rows):
        out.print("A preset is what released code computes; 'from logits', also the way it does.")


def _rouge(as_json: bool) -> None:
    """ROUGE beside rouge-score on a test set of CNN/DailyMail's size."""
    from seqreg.bench import rouge_speed

    console.print("  scoring 11,490 generated summaries; rouge-score on 300 of them, scaled")
    times: dict[str, Any] = rouge_speed.compare(progress=console.is_terminal)
    table = Table(title=f"ROUGE-1, 2, L and Lsum with stemming, {times['pairs']:,.0f} pairs")
    for name in ("", "CPU seconds", "times faster"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row(f"rouge-score (scaled from {times['sample']:.0f} pairs)", f"{times['reference_seconds']:.1f}", "1.0x")
    table.add_row("seqreg", f"{times['seconds']:.1f}", f"{times['ratio']:.1f}x")
    same = "agree to the last bit" if times["equal"] else "DIFFER"
    print_result(times, table, f"All scores of the sample {same}.", as_json=as_json)


def _padding(as_json: bool) -> None:
    """The share of padding in batches of Gigaword's lengths."""
    from seqreg.bench import batch_padding

    shares = batch_padding.compare()
    table = Table(title="Share of padding, source and target tokens, Gigaword's lengths")
    for name in ("batch size", "random", "grouped by source", "grouped by sum", "ours"):
        table.add_column(name, justify="right")
    for size, wastes in shares.items():
        table.add_row(str(size), *(f"{wastes[key]:.1%}" for key in ("random", "source", "sum", "ours")))
    print_result(shares, table, as_json=as_json)


def _data(examples: int | None, as_json: bool) -> None:
    """A large corpus, made ready for training twice."""
    from seqreg.bench import data_at_size

    readings = data_at_size.measure(examples or data_at_size.EXAMPLES, lambda what: console.print(f"  {what}"))
    first = readings["first"]
    table = Table(
        title=f"{first.examples:,} articles of {first.tokens / first.examples:.0f} tokens, ready for training"
    )
    for name in ("", "seconds", "CPU seconds", "of the main thread", "memory", "with mapped files"):
        table.add_column(name, justify="right" if name else "left")
    for turn, reading in readings.items():
        own = "not known" if reading.own_memory is None else f"{reading.own_memory / 2**20:.0f} MB"
        times = (f"{time:.1f}" for time in (reading.seconds, reading.cpu_seconds, reading.serial_seconds))
        table.add_row(f"the {turn} time", *times, own, f"{reading.memory / 2**20:.0f} MB")
    setting = (
        f"JSONL is read, checked, cleaned, fingerprinted, tokenized (byte-level BPE, {os.cpu_count()} cores) and "
        "ordered by length, each time by a new process. Memory is the peak; processes share mapped pages."
    )
    print_result(
        {turn: dataclasses.asdict(reading) for turn, reading in readings.items()}, table, setting, as_json=as_json
    )


def _engine(engine: str, as_json: bool) -> None:
    """R3F on two ranks, with a plain head and a fused one."""
    from seqreg.bench import engine_steps

    measured = engine_steps.measure(engine, progress=lambda what: console.print(f"  {what}"))
    size = engine_steps.SIZE
    table = Table(title=f"One step of R3F, {engine}, {measured.ranks} ranks on the CPU (gloo)")
    for name in ("head", "memory above the level before", "CPU seconds", "loss"):
        table.add_column(name, justify="left" if name == "head" else "right")
    for step in (measured.plain, measured.fused):
        table.add_row(step.head, f"{step.memory / 2**20:.0f} MB", f"{step.seconds:.2f}", f"{step.loss:.6f}")
    table.add_row("fused over plain", f"{measured.memory:.2f}x", f"{measured.seconds:.2f}x", "")
    setting = (
        f"BART, d {size.width}, {size.layers} + {size.layers} layers, V {size.classes}, {size.rows} examples of "
        f"{size.source} source and {size.target} target tokens a rank; the largest of all ranks."
    )
    result = {**dataclasses.asdict(measured), "memory": measured.memory, "seconds": measured.seconds}
    print_result(result, table, setting, as_json=as_json)


def _frontier(recipe: str, settings: list[str], draws: int, as_json: bool, path: Path | None) -> None:
    """Cheaper forms of consistency terms: operations, and cosine and norm of the gradient."""
    from seqreg.workbench.config import run_config

    run = run_config.resolve(recipe, overrides=settings, paths=run_config.PATHS)
    from seqreg.bench import frontier

    quiet()
    measured = frontier.measure(run, draws, lambda what: console.print(f"  {plain(what)}", markup=False))
    tables = []
    for difference, rows in measured.rows.items():
        table = Table(title=f"R3F, passes that differ in {difference}", width=80)
        table.add_column("form", no_wrap=True)
        for name in ("FLOPs", "cosine", "norm", "cosine of one"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            one = f"{row.step_cosine:.2f} ± {row.error:.2f}"
            table.add_row(row.name, f"{row.flops:.2f}x", f"{row.cosine:.2f}", f"{row.norm:.2f}", one)
        tables.append(table)
    note = (
        f"{measured.model}, one batch of {measured.examples} examples, {measured.draws} gradients of each form. FLOPs: "
        "of a step, over a plain one. Cosine and norm: of the mean gradient, with and over that of the whole term, "
        "estimated (a cosine above 1 is an error of the estimate: more --rounds). Cosine of one: of a single gradient "
        "with the mean of the whole term, and its standard error."
    )
    print_result(measured, *tables, note, as_json=as_json)
    if path is not None:
        frontier.plot(measured, str(path))
        console.print(f"Drawn in {plain(path)}", markup=False)


def _growth(terms: list[str] | None, as_json: bool, path: Path | None) -> None:
    """Exponents of operations, memory and time over every size."""
    from seqreg.bench import growth

    curves = growth.measure(terms, progress=lambda what: console.print(f"  {what}"))
    tables = []
    for of, title in (("flops", "FLOPs"), ("memory", "peak memory"), ("seconds", "CPU time of one step")):
        table = Table(title=f"{title}: exponents over a size")
        table.add_column("step", no_wrap=True)
        for axis in growth.POINTS:
            table.add_column(axis, justify="right")
        for name in dict.fromkeys(curve.name for curve in curves):
            found = [curve for curve in curves if curve.name == name]
            table.add_row(name, *(f"{curve.exponent(of):.2f}" for curve in found))  # type: ignore[arg-type]
        tables.append(table)
    base = growth.BASE
    note = (
        f"BART, d {base.width}, {base.layers} + {base.layers} layers, V {base.classes}, {base.rows} examples of "
        f"{base.source} source and {base.target} target tokens; one of these is changed at a time. Fitted to the "
        f"{growth.LAST} largest points of each: 1 is linear."
    )
    result = [dataclasses.asdict(curve) for curve in curves]
    print_result(result, *tables, note, as_json=as_json)
    if path is not None:
        growth.plot(curves, str(path))
        console.print(f"Drawn in {plain(path)}", markup=False)


def _profile(size: str, terms: list[str] | None, threads: int, as_json: bool) -> None:
    """Shares of the time of every step."""
    from seqreg.bench import measure

    profiles = measure.profile(size, terms or [], threads, lambda what: console.print(f"  {what}"))
    table = Table(title=f"Where the time of a step goes, {size}")
    table.add_column("step", no_wrap=True)
    kinds = list(profiles[0].shares)
    for name in (*kinds, "products of peak", "in the system"):
        table.add_column(name, justify="right")
    for each in profiles:
        shares = (f"{each.shares[kind]:.0%}" for kind in kinds)
        table.add_row(each.name, *shares, f"{each.of_peak:.0%}", f"{each.system:.0%}")
    note = (
        f"A step with an update of AdamW (fused); {threads} thread(s). Products of peak: operations a second of the "
        f"matrix products, over the {max(each.peak for each in profiles) / 1e9:.0f} GFLOP/s of a large one; those "
        "inside attention count as attention. In the system: share of the CPU time there, of new pages most of all."
    )
    busy = max(each.waiting for each in profiles)
    warning = f"The machine was busy ({busy:.1f} times the CPU time passed): shares and rates are not to be trusted."
    if as_json:
        print_json([{**dataclasses.asdict(each), "of_peak": each.of_peak} for each in profiles])
        return
    out = _wide()
    for shown in (table, note, *([warning] if busy > 1.2 else [])):
        out.print(shown)
