"""The `seqreg` command. It reads arguments and prints results; the work is done in `seqreg.workbench`."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from seqreg.errors import BadInput, Stopped
from seqreg.workbench.untrusted import plain

USAGE: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What typer raises about the command line; newer ones bring a click of their own."""

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown",
    help="""Fine-tune with smoothness regularizers: from one line to ROUGE and TensorBoard.

**A first run**, on text that is made here, in a minute:

    seqreg train quickstart --terms r3f

**Your own pairs of texts**, with a pretrained model:

    seqreg train gigaword --terms r3f task=text_pairs data.path=pairs.csv model.name=facebook/bart-base

**What there is:** `seqreg list`, and `seqreg show NAME` for one of it. Any setting of a recipe can be changed with
`key=value`; `seqreg check` shows them all.
""",
)  # fmt: skip

Recipe = Annotated[str, typer.Argument(help="A recipe by name (`seqreg list recipes`), or the path of a YAML file.")]
Settings = Annotated[
    Optional[list[str]], typer.Argument(help="Changes of the recipe: `key=value`, such as `optimisation.steps=100`.")
]
Terms = Annotated[
    Optional[list[str]],
    typer.Option("--terms", "-t", help="A recipe of terms, such as `r3f`; may be repeated. None is the baseline."),
]
Variants = Annotated[
    Optional[list[str]],
    typer.Option("--variant", "-v", help="A variant of the recipe, such as `tiny` or `pegasus`; may be repeated."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with a model. Read it first: it can do all."),
]
Rows = Annotated[int, typer.Option(min=5, help="At most so many rows of a split, the same for every model.")]
StudyOutput = Annotated[
    Optional[Path], typer.Option(help="Write here instead of into RUN/evidence, or evidence beside several runs.")
]
Trained = Annotated[Path, typer.Argument(help="The output folder of a training.")]
Evidence = Annotated[
    Optional[Path], typer.Option(help="A folder for numbers and figures; by default `evidence` in the run's.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


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
    trust: Trust = False,
) -> None:
    """Train a recipe, evaluate it, and write the model, its scores and its curves.

    The same command again goes on where a run was stopped, and does nothing if it is finished.

    seqreg train quickstart --terms r3f

    seqreg train gigaword --terms r3f --variant tiny data.path=gigaword.jsonl output=runs/try

    seqreg train glue --variant rte --terms r4f terms.r3f.weight=0.7 seed=3

    seqreg train quickstart optimisation.learning_rate=1e-3 --allow-change optimisation.learning_rate
    """
    from seqreg.workbench import commands

    ways = {"overwrite": overwrite, "resume": resume, "allow_change": allow_change or []}
    commands.train(recipe, terms or [], variant or [], settings or [], trust=trust, **ways)


@app.command()
def compare(
    recipe: Recipe,
    settings: Settings = None,
    terms: Annotated[
        Optional[list[str]],
        typer.Option("--terms", "-t", help="A method: a recipe of terms, or several such as `r3f+rdrop`; repeat it."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, or which: `5`, or `3,7,11`. The same for all methods.")] = "5",
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the comparison.")] = Path(
        "runs/compare"
    ),
    variant: Variants = None,
    baseline: Annotated[str, typer.Option(help="What all others are compared with.")] = "baseline",
    alpha: Annotated[float, typer.Option(help="The error that is allowed over all differences together.")] = 0.05,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Trainings at a time.")] = 1,
    launcher: Annotated[
        Optional[str],
        typer.Option(help="Do not train here: `print` the commands, or submit each, as in `sbatch --wrap={}`."),
    ] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Train nothing; judge what has come back.")] = False,
    extend: Annotated[bool, typer.Option("--extend", help="Add seeds or methods to a comparison.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Train again what has failed by itself.")] = False,
) -> None:
    """Compare terms over seeds: train them all, test the differences, and say what they are worth.

    The same command again goes on where it was stopped. `seqreg report FOLDER` then writes a page about it.

    seqreg compare quickstart -t r3f -t smart --seeds 5 --output runs/compare

    seqreg compare gigaword -t r3f -t r3f+rdrop --seeds 3,7,11,13,17 --launcher "sbatch --wrap={}"

    seqreg compare gigaword -t r3f -t r3f+rdrop --seeds 3,7,11,13,17 --collect
    """
    from seqreg.workbench import commands

    ways = {"baseline": baseline, "alpha": alpha, "jobs": jobs, "launcher": launcher, "collect": collect}
    ways |= {"variants": variant or [], "settings": settings or [], "extend": extend, "retry": retry}
    commands.compare(recipe, terms or [], seeds, output, **ways)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a comparison.")],
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", help="A file; by default report.html in the folder.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown for a paper or a pull request.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="The tables in LaTeX.")] = False,
) -> None:
    """Write one page about a comparison: the verdict, every number, figures, texts, and how to repeat it.

    The page is one file that needs no network. Whatever other studies have found out about the comparison or its
    runs is on it too.

    seqreg report runs/compare

    seqreg report runs/compare --markdown --output results.md
    """
    from seqreg.workbench import commands

    commands.report(folder, output, markdown=markdown, latex=latex)


@app.command()
def replay(
    crash: Annotated[Path, typer.Argument(help="A folder that a training wrote: RUN/crash/step-N.")],
) -> None:
    """Compute a step again that was not finite, and say where it began.

    seqreg replay runs/gigaword/r3f/crash/step-12
    """
    from seqreg.workbench import commands

    commands.replay(crash)


@app.command()
def evaluate(
    run: Trained,
    settings: Settings = None,
    data: Annotated[Optional[Path], typer.Option(help="Score on this file instead of the splits of the task.")] = None,
    output: Annotated[Optional[Path], typer.Option(help="Write here instead of into the run's folder.")] = None,
    trust: Trust = False,
) -> None:
    """Score a trained model again, on its task or on a file of your own.

    seqreg evaluate runs/gigaword-tiny/r3f

    seqreg evaluate runs/gigaword-tiny/r3f --data more.jsonl --output runs/more generation.num_beams=8
    """
    from seqreg.workbench import commands

    commands.evaluate(run, data, output, settings or [], trust=trust)


@app.command()
def predict(
    run: Trained,
    source: Annotated[
        str, typer.Argument(help="Text, one example a line, or - for text on stdin; a JSONL, CSV, TSV or Parquet file.")
    ],
    settings: Settings = None,
    output: Annotated[str, typer.Option("--output", "-o", help="A file; - for the standard output.")] = "-",
    trust: Trust = False,
) -> None:
    """Predict with a trained model; results are written as they come.

    seqreg predict runs/gigaword-tiny/r3f articles.txt -o headlines.txt

    seqreg predict runs/gigaword-tiny/r3f articles.jsonl -o predictions.jsonl

    echo "australian shares closed down" | seqreg predict runs/gigaword-tiny/r3f -
    """
    from seqreg.workbench import commands

    commands.predict(run, source, output, settings or [], trust=trust)


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Score two files with ROUGE-1, 2, L and Lsum: rouge-score's numbers, with intervals.

    One text a line; `<n>` stands for a line break inside a text. Files that end in .jsonl have the key
    `prediction` or `reference`.

        seqreg rouge runs/gigaword-tiny/r3f/generated_predictions.txt references.txt
    """
    from seqreg.workbench import commands

    commands.rouge(predictions, references, stem=stem, split=split, tokenizer=tokenizer, as_json=as_json)


@app.command()
def check(
    recipe: Recipe, settings: Settings = None, terms: Terms = None, variant: Variants = None, trust: Trust = False
) -> None:
    """Look at a recipe and its data without training: settings, tokens, what is cut, what the terms cost.

    seqreg check gigaword --terms r3f --terms rdrop --variant tiny data.path=gigaword.jsonl
    """
    from seqreg.workbench import commands

    commands.check(recipe, terms or [], variant or [], settings or [], trust=trust)


@app.command()
def calibrate(
    run: Trained,
    settings: Settings = None,
    split: Annotated[Optional[str], typer.Option(help="Of the task; by default the one that it is judged by.")] = None,
    bins: Annotated[int, typer.Option(help="Of the calibration errors and the diagrams.")] = 15,
    limit: Annotated[
        int, typer.Option(help="At most so many examples to fit on, and to measure, by a fixed draw.")
    ] = 1000,
    sequences: Annotated[bool, typer.Option(help="Also generate texts, and compare log-probability and ROUGE.")] = True,
    output: Evidence = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Is a trained model as sure as it should be? ECE, Brier, NLL and diagrams, before and after a temperature.

    The temperature is fitted on the validation set and reported on the test set; where there is only one of them, on
    two halves of it. Classifiers by class; generated text by token, with the end of a sequence apart, and by text.

    What the numbers mean: docs/evaluation_models.md.

    seqreg calibrate runs/quickstart/r3f

    seqreg calibrate runs/glue-sst2/r3f --bins 10 --limit 5000 --output evidence/sst2
    """
    from seqreg.workbench.evidence import calibrate as work

    options = {"split": split, "bins": bins, "limit": limit, "sequences": sequences, "output": output}
    work.command(run, settings or [], as_json=as_json, trust=trust, **options)


@app.command()
def robustness(
    runs: Annotated[
        list[str],
        typer.Argument(help="The output folders of trainings on the same task, and changes of settings: `key=value`."),
    ],
    noise: Annotated[
        Optional[list[str]],
        typer.Option(
            help="embeddings, characters, words, adversary, order or source (all by default); or one way alone, such "
            "as character-swap or word-drop. May be repeated."
        ),
    ] = None,
    rates: Annotated[str, typer.Option(help="Shares of characters or words that are hit.")] = "0.05,0.1,0.2",
    scales: Annotated[str, typer.Option(help="Of noise on embeddings, as shares of their RMS.")] = "0.1,0.3,1",
    radii: Annotated[str, typer.Option(help="Of the ascent, as shares of the embeddings' norm.")] = "0.01,0.03,0.1",
    seeds: Annotated[int, typer.Option(help="How often every noise is drawn.")] = 3,
    split: Annotated[Optional[str], typer.Option(help="Of the task; by default the one that it is judged by.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many examples, by a fixed draw.")] = 500,
    output: Evidence = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """What is left of trained models when their source is disturbed: curves, one line a run.

    Noise on embeddings, in characters and in words; an adversarial ascent beside random noise of the same norm; words
    in random order; the source of another example. Every run is asked the same.

    What the numbers mean: docs/evaluation_models.md.

    seqreg robustness runs/quickstart/baseline runs/quickstart/r3f --limit 100

    seqreg robustness runs/glue-sst2/r3f --noise characters --rates 0.01,0.02,0.05,0.1 --seeds 5
    """
    from seqreg.workbench.evidence import robustness as work

    levels = {"rates": rates, "scales": scales, "radii": radii}
    options = {"seeds": seeds, "split": split, "limit": limit, "output": output}
    work.command(runs, noise or [], levels, as_json=as_json, trust=trust, **options)


@app.command("list")
def list_(
    what: Annotated[
        Optional[Literal["terms", "tasks", "recipes"]], typer.Argument(help="All of them by default.")
    ] = None,
) -> None:
    """List terms, tasks and recipes.

    seqreg list recipes
    """
    from seqreg.workbench import shelves

    shelves.show_list(what)


@app.command()
def show(
    names: Annotated[list[str], typer.Argument(help="Terms, tasks, recipes, or the output folders of trainings.")],
) -> None:
    """Show a term, a task or a recipe, or the scores of trainings side by side.

    seqreg show r3f

    seqreg show runs/quickstart/baseline runs/quickstart/r3f
    """
    from seqreg.workbench import shelves

    shelves.show(names)


@app.command()
def bench(
    size: Annotated[
        Literal["tiny", "small", "bart-base"],
        typer.Option(help="The model and batch: `tiny` in seconds, `small` in minutes, `bart-base` in half an hour."),
    ] = "small",
    terms: Annotated[
        Optional[list[str]], typer.Option("--terms", "-t", help="Only these terms; may be repeated. All by default.")
    ] = None,
    rounds: Annotated[Optional[int], typer.Option(min=1, help="Every step is timed once a round.")] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Of torch. One is timed by its own clock: others do not count.")
    ] = 1,
    presets: Annotated[bool, typer.Option(help="Also measure what released code computes, and its way.")] = True,
    rouge: Annotated[bool, typer.Option("--rouge", help="Measure ROUGE beside rouge-score instead.")] = False,
    batches: Annotated[bool, typer.Option("--batches", help="Measure padding on Gigaword's lengths instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Optional[Path], typer.Option(help="Also draw the table: a .png, .svg or .pdf file.")] = None,
) -> None:
    """Measure what a training step costs with every term, against the plain step of transformers.

    Time, floating-point operations and peak memory, in one run and in turns, on the CPU.

    seqreg bench --terms r3f --terms rdrop

    seqreg bench --size bart-base --no-presets --plot cost.png

    seqreg bench --rouge
    """
    from seqreg.workbench import bench_show

    if rouge:
        bench_show.scores(as_json=as_json)
    elif batches:
        bench_show.padding(as_json=as_json)
    else:
        bench_show.steps(size, terms or [], rounds, threads, presets, as_json=as_json, plot=plot)


@app.command("fairseq-dir")
def fairseq_dir() -> None:
    """Print the folder of the fairseq plug-in, for fairseq's --user-dir.

    fairseq-train DATA --user-dir $(seqreg fairseq-dir) --criterion seqreg --seqreg-terms terms.yaml ...
    """
    print(Path(__file__).parent / "integrations" / "fairseq_plugin")


@app.command()
def probe(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of trainings.")],
    tasks: Annotated[
        Optional[Path], typer.Option(help="A YAML file of tasks to probe; by default the first run's own.")
    ] = None,
    pretrained: Annotated[
        Optional[str], typer.Option(help="The model to compare with; by default what the runs began with.")
    ] = None,
    pooling: Annotated[Literal["mean", "first"], typer.Option(help="Of a text's tokens into one vector.")] = "mean",
    rows: Rows = 5000,
    output: StudyOutput = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Look for representational collapse: what a linear classifier can still read from a frozen encoder.

    Beside each run is the pretrained model that it began with; every layer has its effective rank and its CKA to it.

    seqreg probe runs/glue-sst2/baseline runs/glue-sst2/r3f --tasks others.yaml

    A file of tasks:

        tasks:
          - {task: glue/cola, data: {path: data/cola}}
          - {task: glue/rte, data: {path: data/rte, limit: {train: 1000}}}
    """
    from seqreg.workbench.evidence import commands

    settings: dict[str, Any] = {"pretrained": pretrained, "pooling": pooling, "rows": rows, "trust": trust}
    commands.probe(runs, tasks, output, as_json=as_json, **settings)


@app.command()
def chain(
    plan: Annotated[Path, typer.Argument(help="A YAML file: the trainings, one after the other.")],
    settings: Settings = None,
    methods: Annotated[
        Optional[list[str]],
        typer.Option("--terms", "-t", help="A method beside the baseline: `r3f`, or `r3f+rdrop`; may be repeated."),
    ] = None,
    cycles: Annotated[int, typer.Option(min=1, help="How often the steps of the plan are gone through.")] = 1,
    seed: Annotated[
        Optional[list[int]], typer.Option(min=0, help="Instead of the seeds of the plan; may be repeated.")
    ] = None,
    pooling: Annotated[Literal["mean", "first"], typer.Option(help="Of a text's tokens into one vector.")] = "mean",
    rows: Rows = 5000,
    output: Annotated[Optional[Path], typer.Option(help="The folder of all runs; by default the plan's.")] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Train tasks one after the other, each from the encoder of the one before, and see what is left of them.

    All tasks are probed in the pretrained model and after every step. The same command again goes on where it was
    stopped; trainings that are finished are left alone, also with more cycles, methods or seeds.

    seqreg chain glue.yaml --terms r3f --cycles 3 optimisation.steps=500

    A plan:

        settings: [model.name=FacebookAI/roberta-base]
        seeds: [1, 2, 3]
        steps:
          - {recipe: glue, variants: [sst2], settings: [data.path=data/sst2]}
          - {recipe: glue, variants: [qnli], settings: [data.path=data/qnli]}
    """
    from seqreg.workbench.evidence import commands

    ways: dict[str, Any] = {"cycles": cycles, "seeds": seed or [], "pooling": pooling, "rows": rows, "trust": trust}
    commands.chain(plan, methods or [], settings or [], output, as_json=as_json, **ways)


@app.command()
def shift(
    words: Annotated[list[str], typer.Argument(help="Output folders of trainings, then changes: `key=value`.")],
    to: Annotated[str, typer.Option(help="The task that the models are moved to: a card by name or path.")],
    share: Annotated[
        Optional[list[float]],
        typer.Option(
            help="Of the target's training rows, for further training; may be repeated. 0 and 0.1 by default."
        ),
    ] = None,
    output: StudyOutput = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Score models on a domain that they were not trained on, as they are and after a little training there.

    The rows of a share are the same for every model. Further training is an ordinary run, with the method and the
    settings of the first, in RUN/shift/; the same command again goes on.

    seqreg shift runs/qnli/baseline runs/qnli/r3f --to glue/rte data.path=data/rte --share 0 --share 0.1
    """
    from seqreg.workbench.evidence import commands

    commands.shift(words, to, share or [0.0, 0.1], output, as_json=as_json, trust=trust)


def main() -> None:
    """Run the command; what cannot be right, and what stops a run, is one line and an exit code of `seqreg.errors`."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is spelt out
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        sys.exit(app(standalone_mode=False))
    except (BadInput, Stopped) as error:
        print("seqreg: " + "\n".join(plain(line) for line in error.lines), file=sys.stderr)
        sys.exit(error.code)
    except USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            print(f"seqreg: {plain(error.format_message().rstrip('.'))}; see seqreg --help", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
