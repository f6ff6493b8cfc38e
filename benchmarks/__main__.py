"""Costs of training steps and of what surrounds them, measured on this machine: `python -m benchmarks --help`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from seqreg.cli.main import run
from seqreg.cli.options import Json, Recipe, Settings, Terms, Variants, print_result
from seqreg.errors import BadInput
from seqreg.workbench.config import run_config
from seqreg.workbench.text.atomic_files import writable
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import console, print_json, quiet

if TYPE_CHECKING:
    from benchmarks.step_cost import Bench

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False,
    help="Measure what training steps and data cost, beside what they replace. Run it in the folder of the clone.",
)  # fmt: skip

Size = Annotated[
    Literal["tiny", "small", "long", "bart-base", "causal", "classifier"],
    typer.Option(
        help="The model and batch; `tiny` takes minutes, `bart-base` an hour; `long`: 1,024 source tokens; "
        "`causal`: the shape of SmolLM-135M; `classifier`: of RoBERTa-base."
    ),
]
Names = Annotated[
    list[str] | None, typer.Option("--terms", "-t", help="Only these terms; may be repeated. All by default.")
]
Threads = Annotated[
    int,
    typer.Option(min=1, max=1024, help="Threads of torch. One is timed by CPU time, which other work leaves alone."),
]
Plot = Annotated[Path | None, typer.Option(help="Also draw the table: a .png, .svg or .pdf file.")]


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"--plot {plot}: expected a file that ends in .png, .svg or .pdf")
    writable(plot, "--plot ")
    if not plot.absolute().parent.is_dir():
        raise BadInput(f"--plot {plot}: the folder does not exist")
    if plot.is_dir() or not os.access(plot if plot.exists() else plot.absolute().parent, os.W_OK):
        raise BadInput(f"--plot {plot}: it cannot be written; a folder, or not yours to write?")


@app.command()
def steps(
    size: Size = "small",
    terms: Names = None,
    rounds: Annotated[int | None, typer.Option(min=1, max=100_000, help="Every step is timed once per round.")] = None,
    threads: Threads = 1,
    presets: Annotated[bool, typer.Option(help="Also measure what released code computes, and how.")] = True,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Also measure steps of a model that torch.compile has compiled.")
    ] = False,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Measure what a training step costs with every term, against the plain step of transformers.

    Time, floating-point operations and peak memory, on the CPU; the variants take turns.

    python -m benchmarks steps -t r3f -t rdrop

    python -m benchmarks steps --size bart-base --no-presets --plot cost.png

    python -m benchmarks steps --compile -t r3f --no-presets
    """
    _check_plot(plot)
    from benchmarks import step_cost

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("preparing")

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and done % 10 == 0:
                console.print(f"  {done} of {total}: {what}")

        turns = rounds or (9 if size == "bart-base" else 5)
        measured = step_cost.measure(size, terms, turns, threads, presets, tell, compiled)
    if as_json:
        print_result(measured, as_json=True)
    else:
        _print_steps(measured)
    if plot is not None:  # after the numbers, which are not lost if it fails
        step_cost.plot(measured, str(plot))
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


@app.command()
def rouge(
    as_json: Json = False,
) -> None:
    """Compare ROUGE with rouge-score on a test set of CNN/DailyMail's size."""
    from benchmarks import rouge_speed

    console.print("  scoring 11,490 generated summaries; rouge-score on 300 of them, scaled")
    times: dict[str, Any] = rouge_speed.compare(progress=console.is_terminal)
    table = Table(title=f"ROUGE-1, 2, L and Lsum with stemming, {times['pairs']:,.0f} pairs")
    for name in ("", "CPU seconds", "times faster"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row(f"rouge-score (scaled from {times['sample']:.0f} pairs)", f"{times['reference_seconds']:.1f}", "1.0x")
    table.add_row("seqreg", f"{times['seconds']:.1f}", f"{times['ratio']:.1f}x")
    same = "agree to the last bit" if times["equal"] else "DIFFER"
    print_result(times, table, f"All scores of the sample {same}.", as_json=as_json)


@app.command()
def batches(
    as_json: Json = False,
) -> None:
    """Measure the share of padding in batches of Gigaword's lengths."""
    from benchmarks import batch_padding

    shares = batch_padding.compare()
    table = Table(title="Share of padding, source and target tokens, Gigaword's lengths")
    for name in ("batch size", "random", "grouped by source", "grouped by sum", "ours"):
        table.add_column(name, justify="right")
    for size, wastes in shares.items():
        table.add_row(str(size), *(f"{wastes[key]:.1%}" for key in ("random", "source", "sum", "ours")))
    print_result(shares, table, as_json=as_json)


@app.command()
def data(
    examples: Annotated[int | None, typer.Option(min=1, max=100_000_000, help="Articles, 287,113 by default.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how long a large corpus takes to be ready for training, the first time and from the cache."""
    from benchmarks import data_at_size

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


@app.command()
def engine(
    name: Annotated[Literal["fsdp2", "ddp"], typer.Argument()] = "fsdp2",
    as_json: Json = False,
) -> None:
    """Measure R3F on two ranks of an engine, with a plain head and a fused one."""
    from benchmarks import engine_steps

    measured = engine_steps.measure(name, progress=lambda what: console.print(f"  {what}"))
    size = engine_steps.SIZE
    table = Table(title=f"One step of R3F, {name}, {measured.ranks} ranks on the CPU (gloo)")
    for column in ("head", "memory above the level before", "CPU seconds", "loss"):
        table.add_column(column, justify="left" if column == "head" else "right")
    for step in (measured.plain, measured.fused):
        table.add_row(step.head, f"{step.memory / 2**20:.0f} MB", f"{step.seconds:.2f}", f"{step.loss:.6f}")
    table.add_row("fused over plain", f"{measured.memory:.2f}x", f"{measured.seconds:.2f}x", "")
    setting = (
        f"BART, d {size.width}, {size.layers} + {size.layers} layers, V {size.classes}, {size.rows} examples of "
        f"{size.source} source and {size.target} target tokens a rank; the largest of all ranks."
    )
    result = {**dataclasses.asdict(measured), "memory": measured.memory, "seconds": measured.seconds}
    print_result(result, table, setting, as_json=as_json)


@app.command()
def frontier(
    recipe: Recipe,
    settings: Settings = None,
    rounds: Annotated[int, typer.Option(min=2, max=100_000, help="Gradients of each form.")] = 32,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Measure cheaper forms of R3F and of R-Drop's divergence: their cost, and what is left of the gradient.

    python -m benchmarks frontier gigaword model.name=FOLDER data.path=FILE.jsonl --plot frontier.png
    """
    _check_plot(plot)
    resolved = run_config.resolve(recipe, overrides=settings or (), paths=run_config.PATHS)
    from benchmarks import frontier as frontier_forms

    quiet()
    measured = frontier_forms.measure(resolved, rounds, lambda what: console.print(f"  {plain(what)}", markup=False))
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
    if plot is not None:
        frontier_forms.plot(measured, str(plot))
        console.print(f"Drawn in {plain(plot)}", markup=False)


@app.command()
def growth(
    terms: Names = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Measure by which power steps grow with vocabulary, lengths, batch and layers."""
    _check_plot(plot)
    from benchmarks import growth as growth_curves

    curves = growth_curves.measure(terms, progress=lambda what: console.print(f"  {what}"))
    tables = []
    for of, title in (("flops", "FLOPs"), ("memory", "peak memory"), ("seconds", "CPU time of one step")):
        table = Table(title=f"{title}: exponents over a size")
        table.add_column("step", no_wrap=True)
        for axis in growth_curves.POINTS:
            table.add_column(axis, justify="right")
        for name in dict.fromkeys(curve.name for curve in curves):
            found = [curve for curve in curves if curve.name == name]
            table.add_row(name, *(f"{curve.exponent(of):.2f}" for curve in found))  # type: ignore[arg-type]
        tables.append(table)
    base = growth_curves.BASE
    note = (
        f"BART, d {base.width}, {base.layers} + {base.layers} layers, V {base.classes}, {base.rows} examples of "
        f"{base.source} source and {base.target} target tokens; one of these is changed at a time. Fitted to the "
        f"{growth_curves.LAST} largest points of each: 1 is linear."
    )
    result = [dataclasses.asdict(curve) for curve in curves]
    print_result(result, *tables, note, as_json=as_json)
    if plot is not None:
        growth_curves.plot(curves, str(plot))
        console.print(f"Drawn in {plain(plot)}", markup=False)


@app.command()
def profile(
    size: Size = "small",
    terms: Names = None,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Show where the time of a step goes, by kinds of operators."""
    from benchmarks import step_cost

    profiles = step_cost.profile(size, terms or [], threads, lambda what: console.print(f"  {what}"))
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


@app.command()
def scaling(
    recipe: Annotated[str | None, typer.Argument(help="A recipe; without one, docs/scaling.md is written.")] = None,
    settings: Settings = None,
    terms: Terms = None,
    variant: Variants = None,
    gpus: Annotated[int, typer.Option(min=1, max=100_000, help="How many GPUs.")] = 8,
    memory: Annotated[float, typer.Option(min=1, max=10_000, help="GB of each.")] = 80,
    as_json: Json = False,
) -> None:
    """Estimate memory and time of a step on many GPUs, of a recipe; without one, write docs/scaling.md.

    python -m benchmarks scaling cnn_dailymail --terms smart --gpus 8 --memory 80
    """
    from benchmarks import scaling as estimates

    if recipe is None:
        estimates.PAGE.write_text(estimates.render())
        print_result({"written": str(estimates.PAGE)}, f"Written: {estimates.PAGE}", as_json=as_json)
        return
    resolved = run_config.resolve(
        recipe, terms=terms or (), variants=variant or (), overrides=settings or (), paths=run_config.PATHS
    )
    quiet()
    cluster = estimates.Cluster(gpus=gpus, memory=memory)
    estimate = estimates.of_recipe(resolved, cluster)
    caption = (
        f"estimates: no GPU was used; {cluster.tflops:g} TFLOP/s at {cluster.utilisation:.0%}, {cluster.link:g} GB/s "
        f"in a node of {cluster.node}, {cluster.network:g} between nodes; docs/scaling.md has the formulas"
    )
    table = Table(title=f"a step on {gpus} GPUs of {memory:g} GB", caption=caption, box=None, padding=(0, 1, 0, 0))
    for name in estimates.HEADINGS:
        table.add_column(name, justify="left" if name in ("term", "engine") else "right", overflow="fold")
    for row in estimate["terms"]:
        table.add_row(*map(plain, estimates.cells(row)))
    print_result(estimate, table, as_json=as_json)


if __name__ == "__main__":
    run(app, "python -m benchmarks")
