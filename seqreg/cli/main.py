"""The `seqreg` command. It reads arguments and prints results; the work is done in `seqreg.workbench`."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from seqreg.cli import studies
from seqreg.cli.options import Json, Recipe, Settings, Terms, Trained, Trust, Variants
from seqreg.errors import DISK, NAMES, BadInput, DiskError, Stopped
from seqreg.version import __version__
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import show_warnings

USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What typer raises about the command line; newer ones bring a click of their own."""

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="""Fine-tune with smoothness regularizers: from one line to ROUGE and TensorBoard.

**A first run**, on text that is made here, in two minutes:

    seqreg train quickstart --terms r3f

**Your own pairs of texts**, with a pretrained model:

    seqreg train gigaword --terms r3f task=text_pairs data.path=pairs.csv model.name=facebook/bart-base

**What there is:** `seqreg list`, and `seqreg show NAME` for one of it. Any setting of a recipe can be changed with
`key=value`; `seqreg check` shows them all.

**For programs:** every command has `--json`: one JSON document alone on the standard output (`predict`: one per line).
""",
)  # fmt: skip


def _version(asked: bool) -> None:
    if asked:
        print(f"seqreg {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Recipe,
    settings: Settings = None,
    terms: Terms = None,
    variant: Variants = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is in the output folder.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Only go on from a checkpoint: an error if there is none.")
    ] = False,
    allow_change: Annotated[
        Optional[list[str]],
        typer.Option("--allow-change", help="Go on although this setting has changed; may be repeated."),
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Train a recipe, evaluate it, and write the model, its scores and its curves.

    The same command again goes on where a run was stopped, and does nothing if it is finished.

    seqreg train quickstart --terms r3f

    seqreg train gigaword --terms r3f --variant tiny data.path=gigaword.jsonl output=runs/try

    seqreg train glue --variant rte --terms r4f terms.r3f.weight=0.7 seed=3

    seqreg train quickstart optimisation.learning_rate=1e-3 --allow-change optimisation.learning_rate
    """
    from seqreg.cli import commands

    ways = {"overwrite": overwrite, "resume": resume, "allow_change": allow_change or []}
    commands.train(recipe, terms or [], variant or [], settings or [], trust=trust, as_json=as_json, **ways)


@app.command()
def quickstart(
    words: Annotated[
        Optional[list[str]], typer.Argument(help="Terms, r3f by default, and key=value for the fine-tunings.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of all its trainings.")] = Path(
        "runs/quickstart-people"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Pretrain a small BART, fine-tune it without and with a term, and show what is left of the first task.

    Offline, on news that are made here, in two minutes. The pretraining is done once.

    seqreg quickstart

    seqreg quickstart smart optimisation.max_steps=200
    """
    from seqreg.cli import commands

    commands.quickstart(words or [], output, as_json=as_json)


@app.command()
def replay(
    crash: Annotated[Path, typer.Argument(help="A folder that a training wrote: RUN/crash/step-N.")],
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Compute a step again that was not finite, and say where it began.

    seqreg replay runs/gigaword/r3f/crash/step-12
    """
    from seqreg.cli import commands

    commands.replay(crash, trust=trust, as_json=as_json)


@app.command()
def evaluate(
    run: Trained,
    settings: Settings = None,
    data: Annotated[Optional[Path], typer.Option(help="Score on this file instead of the splits of the task.")] = None,
    output: Annotated[Optional[Path], typer.Option(help="Write here instead of into the run's folder.")] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Score a trained model again, on its task or on a file of your own.

    seqreg evaluate runs/gigaword-tiny/r3f

    seqreg evaluate runs/gigaword-tiny/r3f --data more.jsonl --output runs/more generation.num_beams=8
    """
    from seqreg.cli import commands

    commands.evaluate(run, data, output, settings or [], trust=trust, as_json=as_json)


@app.command()
def predict(
    run: Trained,
    source: Annotated[
        str, typer.Argument(help="Text, one example a line, or - for text on stdin; a JSONL, CSV, TSV or Parquet file.")
    ],
    settings: Settings = None,
    output: Annotated[str, typer.Option("--output", "-o", help="A file; - for the standard output.")] = "-",
    as_json: Annotated[bool, typer.Option("--json", help="Predictions as JSONL: one JSON object a line.")] = False,
    trust: Trust = False,
) -> None:
    """Predict with a trained model; results are written as they come.

    seqreg predict runs/gigaword-tiny/r3f articles.txt -o headlines.txt

    seqreg predict runs/gigaword-tiny/r3f articles.jsonl -o predictions.jsonl

    echo "australian shares closed down" | seqreg predict runs/gigaword-tiny/r3f -
    """
    from seqreg.cli import commands

    commands.predict(run, source, output, settings or [], trust=trust, as_json=as_json)


@app.command()
def rouge(
    predictions: Annotated[Path, typer.Argument(help="Text, one prediction a line.")],
    references: Annotated[Path, typer.Argument(help="Text, one reference a line.")],
    stem: Annotated[bool, typer.Option(help="Porter's stemmer.")] = True,
    split: Annotated[
        Literal["auto", "newline", "punkt", "rules"], typer.Option(help="How ROUGE-Lsum finds sentences.")
    ] = "auto",
    tokenizer: Annotated[
        Literal["rouge", "unicode"], typer.Option(help="`unicode` for text that is not in Latin letters.")
    ] = "rouge",
    as_json: Json = False,
) -> None:
    """Score two files with ROUGE-1, 2, L and Lsum: rouge-score's numbers, with intervals.

    One text a line; `<n>` stands for a line break inside a text. Files that end in .jsonl have the key
    `prediction` or `reference`.

        seqreg rouge runs/gigaword-tiny/r3f/generated_predictions.txt references.txt
    """
    from seqreg.cli import commands

    commands.rouge(predictions, references, stem=stem, split=split, tokenizer=tokenizer, as_json=as_json)


@app.command()
def check(
    recipe: Recipe,
    settings: Settings = None,
    terms: Terms = None,
    variant: Variants = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Look at a recipe and its data without training: settings, tokens, what is cut, what the terms cost.

    seqreg check gigaword --terms r3f --terms rdrop --variant tiny data.path=gigaword.jsonl
    """
    from seqreg.cli import commands

    commands.check(recipe, terms or [], variant or [], settings or [], trust=trust, as_json=as_json)


@app.command("list")
def list_(
    what: Annotated[
        Optional[Literal["terms", "tasks", "recipes"]], typer.Argument(help="All of them by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List terms, tasks and recipes.

    seqreg list recipes
    """
    from seqreg.cli import show as shelves

    shelves.show_list(what, as_json=as_json)


@app.command()
def show(
    names: Annotated[list[str], typer.Argument(help="Terms, tasks, recipes, or the output folders of trainings.")],
    as_json: Json = False,
) -> None:
    """Show a term, a task or a recipe, or the scores of trainings side by side.

    seqreg show r3f

    seqreg show runs/quickstart/baseline runs/quickstart/r3f
    """
    from seqreg.cli import show as shelves

    shelves.show(names, as_json=as_json)


@app.command()
def bench(
    size: Annotated[
        Literal["tiny", "small", "bart-base"],
        typer.Option(help="The model and batch; `tiny` takes minutes, `bart-base` an hour. One term is quicker."),
    ] = "small",
    terms: Annotated[
        Optional[list[str]], typer.Option("--terms", "-t", help="Only these terms; may be repeated. All by default.")
    ] = None,
    rounds: Annotated[Optional[int], typer.Option(min=1, max=100_000, help="Every step is timed once a round.")] = None,
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="Of torch. One is timed by its own clock: others do not count.")
    ] = 1,
    presets: Annotated[bool, typer.Option(help="Also measure what released code computes, and its way.")] = True,
    rouge: Annotated[bool, typer.Option("--rouge", help="Measure ROUGE beside rouge-score instead.")] = False,
    batches: Annotated[bool, typer.Option("--batches", help="Measure padding on Gigaword's lengths instead.")] = False,
    as_json: Json = False,
    plot: Annotated[Optional[Path], typer.Option(help="Also draw the table: a .png, .svg or .pdf file.")] = None,
) -> None:
    """Measure what a training step costs with every term, against the plain step of transformers.

    Time, floating-point operations and peak memory, in one run and in turns, on the CPU.

    seqreg bench --terms r3f --terms rdrop

    seqreg bench --size bart-base --no-presets --plot cost.png

    seqreg bench --rouge
    """
    if rouge and batches:
        raise BadInput("--rouge and --batches: each is measured alone")
    if (rouge or batches) and (terms or rounds or plot):
        raise BadInput("--rouge and --batches measure no steps: leave out --terms, --rounds and --plot")
    from seqreg.bench import report as bench_show

    if rouge:
        bench_show.scores(as_json=as_json)
    elif batches:
        bench_show.padding(as_json=as_json)
    else:
        bench_show.steps(size, terms or [], rounds, threads, presets, as_json=as_json, plot=plot)


@app.command("fairseq-dir")
def fairseq_dir(as_json: Json = False) -> None:
    """Print the folder of the fairseq plug-in, for fairseq's --user-dir.

    fairseq-train DATA --user-dir $(seqreg fairseq-dir) --criterion seqreg --seqreg-terms terms.yaml ...
    """
    from seqreg.workbench.text.terminal import print_json

    folder = Path(__file__).parents[1] / "integrations" / "fairseq_plugin"
    if as_json:
        print_json({"folder": str(folder)})
    else:
        print(folder)


app.add_typer(studies.app)


def main() -> None:
    """Run the command; what cannot be right, and what stops a run, is one line and an exit code of `seqreg.errors`."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is spelt out
        sys.stdout.reconfigure(errors="backslashreplace")
    show_warnings()
    try:
        code = app(standalone_mode=False)
        if code == 128 + signal.SIGINT:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
    except (BadInput, Stopped) as error:
        print("seqreg: " + "\n".join(_short(plain(line)) for line in error.lines), file=sys.stderr)
        sys.exit(error.code)
    except (typer.Abort, KeyboardInterrupt):  # Ctrl-C, where nothing has to be saved first
        print("seqreg: stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.errno not in DISK | NAMES:
            raise
        print(f"seqreg: {_short(plain(error.filename or 'output'))}: {error.strerror}", file=sys.stderr)
        sys.exit(BadInput.code if error.errno in NAMES else DiskError.code)
    except USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            message = _short(plain(error.format_message().rstrip(".")))
            print(f"seqreg: {message}; see {_asked(error)} --help", file=sys.stderr)
        sys.exit(2)


def _short(line: str, most: int = 2000) -> str:
    """A line without its middle, where a value in it is very long."""
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


def _asked(error: Any) -> str:
    """The command that an error is about, as it is called."""
    names, ctx = [], getattr(error, "ctx", None)
    while ctx is not None and ctx.parent is not None:
        names.append(ctx.info_name)
        ctx = ctx.parent
    return " ".join(["seqreg", *names[::-1]])


if __name__ == "__main__":
    main()
