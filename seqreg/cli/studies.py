"""The commands that look into trained models: comparisons, their page, and studies. No logic."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from seqreg.cli.options import Json, Output, Recipe, Rows, Settings, Trained, Trust, Variants
from seqreg.errors import BadInput

app = typer.Typer()


def _is_change(word: str) -> bool:
    """Whether a word among folders is a `key=value`."""
    return "=" in word and not Path(word).is_dir()


@app.command(rich_help_panel="Evidence")
def compare(
    recipe: Recipe,
    settings: Settings = None,
    terms: Annotated[
        Optional[list[str]],
        typer.Option(
            "--terms",
            "-t",
            help=(
                "A method: a recipe of terms by name or path, `r3f+rdrop` for several, `r3f:weight=1.0,scale=0.1` with "
                "settings of its own, `strong=r3f:weight=1.0` under a name; repeat it."
            ),
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, or which: `5`, or `3,7,11`. The same for all methods.")] = "5",
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the comparison.")] = Path(
        "runs/compare"
    ),
    variant: Variants = None,
    baseline: Annotated[str, typer.Option(help="What all others are compared with.")] = "baseline",
    alpha: Annotated[float, typer.Option(help="The error that is allowed over all differences together.")] = 0.05,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=256, help="Trainings at a time.")] = 1,
    launcher: Annotated[
        Optional[str],
        typer.Option(help="Do not train here: `print` the commands, or submit each, as in `sbatch --wrap={}`."),
    ] = None,
    collect: Annotated[bool, typer.Option("--collect", help="Train nothing; judge what has come back.")] = False,
    extend: Annotated[bool, typer.Option("--extend", help="Add seeds or methods to a comparison.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Train again what has failed by itself.")] = False,
    keep_models: Annotated[
        Optional[Literal["best", "all", "none"]],
        typer.Option(help="Of every method: the best by its validation score, by default, all, or none."),
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Compare terms over seeds: train them all, test the differences, and say what they are worth.

    The same command again goes on where it was stopped. `seqreg report FOLDER` then writes a page about it.

    seqreg compare quickstart -t r3f -t smart --seeds 5 --output runs/compare

    seqreg compare quickstart -t r3f -t strong=r3f:weight=1.0 -t mine/term.yaml terms.r3f.noise=normal

    seqreg compare gigaword -t r3f -t r3f+rdrop --seeds 3,7,11,13,17 --launcher "sbatch --wrap={}"

    seqreg compare gigaword -t r3f -t r3f+rdrop --seeds 3,7,11,13,17 --collect
    """
    from seqreg.cli import commands

    ways = {"baseline": baseline, "alpha": alpha, "jobs": jobs, "launcher": launcher, "collect": collect}
    ways |= {"variants": variant or [], "settings": settings or [], "extend": extend, "retry": retry, "trust": trust}
    ways["keep_models"] = keep_models
    commands.compare(recipe, terms or [], seeds, output, as_json=as_json, **ways)


@app.command(rich_help_panel="Evidence")
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a comparison.")],
    output: Annotated[
        Optional[Path], typer.Option("--output", "-o", help="A file; by default report.html in the folder.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown for a paper or a pull request.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="The tables in LaTeX.")] = False,
    as_json: Json = False,
) -> None:
    """Write one page about a comparison: the verdict, every number, figures, texts, and how to repeat it.

    The page is one file that needs no network. Whatever other studies have found out about the comparison or its
    runs is on it too.

    seqreg report runs/compare

    seqreg report runs/compare --markdown --output results.md
    """
    from seqreg.cli import commands

    commands.report(folder, output, markdown=markdown, latex=latex, as_json=as_json)


@app.command(rich_help_panel="Evidence")
def calibrate(
    run: Trained,
    settings: Settings = None,
    split: Annotated[Optional[str], typer.Option(help="Of the task; by default the one that it is judged by.")] = None,
    bins: Annotated[int, typer.Option(min=1, max=1000, help="Of the calibration errors and the diagrams.")] = 15,
    limit: Annotated[
        int, typer.Option(help="At most so many examples to fit on, and to measure, by a fixed draw.")
    ] = 1000,
    sequences: Annotated[bool, typer.Option(help="Also generate texts, and compare log-probability and ROUGE.")] = True,
    output: Output = None,
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
    from seqreg.workbench.config import run_config

    run_config.check_studied([run], settings or [])
    from seqreg.studies.calibrate import study as work

    options = {"split": split, "bins": bins, "limit": limit, "sequences": sequences, "output": output}
    work.command(run, settings or [], as_json=as_json, trust=trust, **options)


@app.command(rich_help_panel="Evidence")
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
    draws: Annotated[int, typer.Option(min=1, max=1000, help="How often every noise is drawn.")] = 3,
    split: Annotated[Optional[str], typer.Option(help="Of the task; by default the one that it is judged by.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many examples, by a fixed draw.")] = 500,
    output: Output = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """What is left of trained models when their source is disturbed: curves, one line a run.

    Noise on embeddings, in characters and in words; an adversarial ascent beside random noise of the same norm; words
    in random order; the source of another example. Every run is asked the same.

    What the numbers mean: docs/evaluation_models.md.

    seqreg robustness runs/quickstart/baseline runs/quickstart/r3f --limit 100

    seqreg robustness runs/glue-sst2/r3f --noise characters --rates 0.01,0.02,0.05,0.1 --draws 5
    """
    from seqreg.workbench.config import run_config

    levels = {"rates": rates, "scales": scales, "radii": radii}
    for key, values in levels.items():
        if values.count(",") >= 100:
            raise BadInput(f"--{key}: {values.count(',') + 1} numbers: at most 100")
    run_config.check_studied([run for run in runs if not _is_change(run)], [run for run in runs if _is_change(run)])
    from seqreg.studies.robustness import study as work

    options = {"draws": draws, "split": split, "limit": limit, "output": output}
    work.command(runs, noise or [], levels, as_json=as_json, trust=trust, **options)


@app.command(rich_help_panel="Evidence")
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
    output: Output = None,
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
    from seqreg.cli import collapse

    settings: dict[str, Any] = {"pretrained": pretrained, "pooling": pooling, "rows": rows, "trust": trust}
    collapse.probe(runs, tasks, output, as_json=as_json, **settings)


@app.command(rich_help_panel="Evidence")
def chain(
    plan: Annotated[Path, typer.Argument(help="A YAML file: the trainings, one after the other.")],
    settings: Settings = None,
    methods: Annotated[
        Optional[list[str]],
        typer.Option(
            "--terms",
            "-t",
            help=("A method beside the baseline: `r3f`, `r3f+rdrop`, `strong=r3f:weight=1.0`; may be repeated."),
        ),
    ] = None,
    cycles: Annotated[int, typer.Option(min=1, max=1000, help="How often the steps of the plan are gone through.")] = 1,
    seeds: Annotated[
        Optional[str], typer.Option(help="Instead of those of the plan; how many, or which: `5`, or `3,7,11`.")
    ] = None,
    pooling: Annotated[Literal["mean", "first"], typer.Option(help="Of a text's tokens into one vector.")] = "mean",
    rows: Rows = 5000,
    output: Annotated[
        Optional[Path],
        typer.Option(help="Of all runs; by default the plan's, or runs/chain-FILE."),
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Train tasks one after the other, each from the encoder of the one before, and see what is left of them.

    All tasks are probed in the pretrained model and after every step. The same command again goes on where it was
    stopped; trainings that are finished are left alone, also with more cycles, methods or seeds.

    seqreg chain glue.yaml --terms r3f --cycles 3 optimisation.max_steps=500

    A plan:

        settings: [model.name=FacebookAI/roberta-base]
        seeds: [1, 2, 3]
        steps:
          - {recipe: glue, variants: [sst2], settings: [data.path=data/sst2]}
          - {recipe: glue, variants: [qnli], settings: [data.path=data/qnli]}
    """
    from seqreg.cli import collapse

    ways: dict[str, Any] = {"cycles": cycles, "seeds": seeds, "pooling": pooling, "rows": rows, "trust": trust}
    collapse.chain(plan, methods or [], settings or [], output, as_json=as_json, **ways)


@app.command(rich_help_panel="Evidence")
def shift(
    words: Annotated[
        list[str], typer.Argument(metavar="RUNS", help="Output folders of trainings, then changes: `key=value`.")
    ],
    to: Annotated[str, typer.Option(help="The task that the models are moved to: a card by name or path.")],
    share: Annotated[
        Optional[list[float]],
        typer.Option(
            help="Of the target's training rows, for further training; may be repeated. 0 and 0.1 by default."
        ),
    ] = None,
    output: Output = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Score models on a domain that they were not trained on, as they are and after a little training there.

    The rows of a share are the same for every model. Further training is an ordinary run, with the method and the
    settings of the first, in RUN/shift/; the same command again goes on.

    seqreg shift runs/qnli/baseline runs/qnli/r3f --to glue/rte data.path=data/rte --share 0 --share 0.1
    """
    from seqreg.cli import collapse

    collapse.shift(words, to, share or [0.0, 0.1], output, as_json=as_json, trust=trust)
