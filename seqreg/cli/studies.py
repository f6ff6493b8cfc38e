"""Commands that study trained models: compare, soup, report, calibrate, robustness, probe, chain, shift."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from seqreg.cli.options import (
    Examples,
    Json,
    Limit,
    Methods,
    Output,
    Pooling,
    Recipe,
    Settings,
    Split,
    Trained,
    Trust,
    TrustChanges,
    Variants,
    print_result,
)  # fmt: skip
from seqreg.errors import BadInput, nearest
from seqreg.studies.collapse import study_files
from seqreg.studies.collapse.study_files import ChainPlan
from seqreg.studies.common.findings import FOLDER, output_folder, terminal_table
from seqreg.studies.common.seeds import read_seeds
from seqreg.studies.compare import plan as comparison_plan
from seqreg.studies.compare.arms import ARMS
from seqreg.workbench.config import cards, lookup, run_config
from seqreg.workbench.config.methods import parse
from seqreg.workbench.scores.results import score_table, scores_of
from seqreg.workbench.text.atomic_files import writable
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import console, quiet

app = typer.Typer()
PANEL = "Studies"


def _folders_and_settings(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Folders of runs, and `key=value` among them."""
    settings = [word for word in words if "=" in word and not os.path.isdir(word)]
    folders = [Path(word) for word in words if word not in settings]
    if not folders:
        raise BadInput("no run: give the output folder of at least one run, such as runs/glue-rte/baseline")
    return folders, settings


@app.command(rich_help_panel=PANEL)
def compare(
    recipe: Recipe,
    settings: Settings = None,
    terms: Methods = None,
    seeds: Annotated[
        str, typer.Option(help="How many seeds, or which: `5`, or `3,7,11`. The same for all methods.")
    ] = "5",
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the comparison.")] = Path(
        "runs/compare"
    ),
    variant: Variants = None,
    baseline: Annotated[str, typer.Option(help="The method that all others are compared with.")] = "baseline",
    arm: Annotated[
        Optional[list[str]],
        typer.Option(
            help="A free arm, made of the baseline's weights without training: `wise` (interpolated with the start, "
            "the share chosen on validation), `ema` (the average of its weights), `soup` and `greedy-soup` (the mean "
            "over its seeds); may be repeated.",
            autocompletion=lambda: list(ARMS),
        ),
    ] = None,
    search: Annotated[
        int,
        typer.Option(
            help="The most trials of every trained method, the baseline too: all learning rates, then at the best of "
            "them every value that its recipe declares under `search:`, then combinations. The validation set chooses; "
            "seeds and test sets of the runs are not touched."
        ),
    ] = 0,
    grid: Annotated[
        Optional[list[str]],
        typer.Option(
            help="Values for --search instead of the recipe's: `KEY=[VALUE, ...]` for all methods that have the key, "
            "`METHOD:KEY=[VALUE, ...]` for one; may be repeated."
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Run nothing: print how many runs and trials there would be, and the smallest difference "
            "that they could show.",
        ),
    ] = False,
    sd: Annotated[
        Optional[float],
        typer.Option(
            help="With --plan: the standard deviation of scores over seeds, in points; by default that of "
            "finished runs of the baseline."
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="The family-wise error rate over all differences.")] = 0.05,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=256, help="Runs at a time.")] = 1,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, max=999, help="Processes of every run, as of `seqreg launch`.")
    ] = 1,
    launcher: Annotated[
        Optional[str],
        typer.Option(help="Do not train here: `print` the commands, or submit each, as in `sbatch --wrap={}`."),
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Train nothing; judge the runs that are finished.")
    ] = False,
    extend: Annotated[bool, typer.Option("--extend", help="Add seeds or methods to a comparison.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Train runs again that have failed.")] = False,
    keep_models: Annotated[
        Optional[Literal["best", "all", "none"]],
        typer.Option(help="The models to keep of every method; `best`, the default, by validation score."),
    ] = None,
    primary: Annotated[
        Optional[str],
        typer.Option(help="Methods whose difference is tested, with commas between; the others are only described."),
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Compare terms over seeds: train them all, test the differences, and say what they are worth.

    The same command again resumes a comparison that was stopped. `seqreg report FOLDER` then writes a page about it.

    A term is worth its cost if it beats what is free: `--arm`. A tuned term against a baseline that was not tuned says
    nothing: `--search` tunes both on validation. The protocol: docs/evaluation.md.

    seqreg compare quickstart -t r3f -t smart --seeds 5 --output runs/compare

    seqreg compare quickstart -t r3f -t strong=r3f:weight=1.0 -t mine/term.yaml terms.r3f.noise=uniform

    seqreg compare glue -v sst2 -t r3f --arm wise --arm ema --arm soup --search 12 --seeds 10 --plan

    seqreg compare gigaword -t r3f -t r3f+rdrop --seeds 3,7,11,13,17 --launcher "sbatch --wrap={}"

    seqreg compare gigaword -t r3f -t r3f+rdrop --seeds 3,7,11,13,17 --collect
    """
    if as_json and launcher is not None:
        raise BadInput("--json and --launcher: there is no result yet; use --json with --collect, when all have ended")
    others = [setting for setting in settings or () if not setting.startswith("terms")]
    run_config.resolve(recipe, variants=variant or (), overrides=others, paths=["data.path", "model.name"])
    if not 0 <= search <= 1000:
        raise BadInput(f"--search {search}: expected the most trials of a method, up to 1000; 0 for no search")
    if sd is not None and not plan:
        raise BadInput(f"--sd {sd:g}: only --plan reads it")
    tested = [name for name in (primary or "").split(",") if name]
    if plan:
        options = {"variants": variant or [], "settings": settings or [], "alpha": alpha, "baseline": baseline}
        options |= {"arms": arm or [], "search": search, "grid": grid or [], "primary": tested}
        _print_plan(output, sd, as_json, recipe, terms or [], seeds, **options)
        return
    from seqreg.studies.compare import conclusions, drift, study

    quiet()
    finished = study.compare(
        recipe, terms or [], seeds, output, variants=variant or [], settings=settings or [], alpha=alpha,
        baseline=baseline, arms=arm or [], search=search, grid=grid or [], at_a_time=jobs,
        launcher=launcher, collect=collect, extend=extend, retry=retry,
        keep_models=keep_models, primary=tested, nproc=nproc, trust=trust,
    )  # fmt: skip
    if finished is None:  # left to a launcher
        return
    finding = conclusions.judge(output, trust_changes=trust_changes)
    console.print(f"A page about it: seqreg report {plain(shlex.quote(str(output)))}", soft_wrap=True)
    changes = next(table for table in finding.tables if table.title == conclusions.CHANGES)
    shorter = [*drift.short_tables(finding.values["drift"]), changes]
    tables = conclusions.verdict_table(finding.values), *map(terminal_table, shorter)
    print_result(finding, *tables, *map(plain, finding.summary), as_json=as_json)


def _print_plan(folder: Path, sd: float | None, as_json: bool, *methods: Any, **options: Any) -> None:
    """Print what a comparison would run and could find; one that is there must be the same, or smaller."""
    from seqreg.studies.compare import power

    wanted, run = comparison_plan.make(*methods, **options)
    chosen = comparison_plan.settle(folder, wanted, extend=True)
    numbers = power.preview(chosen, folder, run.card.scores_examples, sd)
    print_result(numbers, *map(plain, power.sentences(numbers)), as_json=as_json)


@app.command(rich_help_panel=PANEL)
def soup(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of finished runs that started from one model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of the model that is made.")],
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Add runs by their validation score, each only if the soup does not fall.")
    ] = False,
    interpolate: Annotated[
        Optional[str],
        typer.Option(
            metavar="ALPHA",
            help="(1 - ALPHA) * start + ALPHA * trained, of all weights that have a start (WiSE-FT); "
            "`best` chooses ALPHA from 0.1, 0.2 ... 1.0 by validation.",
        ),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Take the average of its weights that a run kept: `optimisation.ema_decay`.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Score it as a run is scored, on validation and test sets.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Make it again.")] = False,
    as_json: Json = False,
    trust: Trust = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Make a model of the weights of finished runs, without training: their mean, or the way back to their start.

    The folder is one for `from_pretrained` and for every command that takes a run; soup.json says what it was made of.
    A head that was drawn anew has no start, and stays as it was trained. Runs of other shapes, tasks or starting models
    are refused.

    seqreg soup runs/compare/baseline/seed-* -o runs/soup --greedy --evaluate

    seqreg soup runs/glue-sst2/baseline --interpolate 0.8 -o runs/wise

    seqreg soup runs/glue-sst2/baseline --interpolate best --evaluate -o runs/wise
    """
    share = _share(interpolate)
    for folder in runs:
        run_config.check_trained(folder)
    writable(output, "--output ")
    from seqreg.workbench.run.blend import Blend
    from seqreg.workbench.run.soup import make_soup

    quiet()
    blend = Blend(greedy, share, ema)
    about = make_soup(
        runs, output, blend, judge=evaluate, overwrite=overwrite, trust=trust, trust_changes=trust_changes
    )
    if evaluate and not as_json:
        metrics = scores_of(output)
        print_result(metrics, score_table({metrics["method"]: metrics}), as_json=False)
    chosen = [f"{key} {about[key]}" for key in ("alpha", "members") if key in about]
    console.print(f"{plain(', '.join([about['kind'], *chosen]))}: everything is in {plain(output)}", soft_wrap=True)
    print_result({**about, "output": str(output)}, as_json=as_json)


def _share(text: str | None) -> float | str | None:
    """A share of weights as the command line gives it."""
    try:
        return text if text in (None, "best") else float(text or "")
    except ValueError:
        raise BadInput(f"--interpolate {text}: expected a number from 0 to 1, or 'best'") from None


@app.command(rich_help_panel=PANEL)
def report(
    folders: Annotated[list[Path], typer.Argument(help="The folder of a comparison; several for one page of all.")],
    output: Annotated[
        Optional[Path],
        typer.Option("--output", "-o", help="A file; by default report.html in the folder. Needed for several."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown for a paper or a pull request.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="The tables in LaTeX.")] = False,
    as_json: Json = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Write one page about a comparison: the verdict, every number, figures, examples, and how to repeat it.

    The page is one file that needs no network. Findings of other studies of the comparison or of its runs are on it
    too. Several comparisons are on one page, with their verdicts at its top.

    seqreg report runs/compare

    seqreg report runs/rte runs/mrpc --output both.html

    seqreg report runs/compare --markdown --output results.md
    """
    for folder in folders:
        comparison_plan.read(folder)
    from seqreg.studies.compare import report

    path = report.report(folders, output, markdown=markdown, latex=latex, trust_changes=trust_changes)
    console.print(f"Written: {plain(path)}", soft_wrap=True)
    print_result({"written": str(path)}, as_json=as_json)


@app.command(rich_help_panel=PANEL)
def calibrate(
    run: Trained,
    settings: Settings = None,
    split: Split = None,
    bins: Annotated[int, typer.Option(min=1, max=1000, help="Bins of the calibration errors and diagrams.")] = 15,
    limit: Limit = 1000,
    sequences: Annotated[bool, typer.Option(help="Also generate texts, and compare log-probability and ROUGE.")] = True,
    output: Output = None,
    as_json: Json = False,
    trust: Trust = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Is a trained model as sure as it should be? ECE, Brier, NLL and diagrams, before and after a temperature.

    The temperature is fitted on the validation set and reported on the test set; where there is only one of them, on
    two halves of it. A classifier is measured on the classes that it predicts; generated text per token, with the end
    of a sequence apart, and per text.

    What the numbers mean: docs/evaluation_models.md.

    seqreg calibrate runs/quickstart/r3f

    seqreg calibrate runs/glue-sst2/r3f --bins 10 --limit 5000 --output evidence/sst2
    """
    run_config.check_studied([run], settings or [])
    from seqreg.studies.calibrate import study

    quiet()
    where = output_folder([run], output)
    finding = study.calibrate(
        run, split=split, bins=bins, limit=limit, sequences=sequences, output=where, overrides=settings or [],
        trust=trust, trust_changes=trust_changes,
    )  # fmt: skip
    finding.show(where, as_json=as_json)


@app.command(rich_help_panel=PANEL)
def robustness(
    runs: Annotated[
        list[str],
        typer.Argument(help="Output folders of finished runs on the same task, and settings to change: `key=value`."),
    ],
    noise: Annotated[
        Optional[list[str]],
        typer.Option(
            help="embeddings, characters, words, adversary, order or source (all by default); or one kind alone, such "
            "as character-swap or word-drop. May be repeated."
        ),
    ] = None,
    rates: Annotated[str, typer.Option(help="Shares of characters or words to change.")] = "0.05,0.1,0.2",
    scales: Annotated[str, typer.Option(help="Noise on embeddings, as shares of their RMS.")] = "0.1,0.3,1",
    radii: Annotated[
        str, typer.Option(help="Radii of the adversarial ascent, as shares of the embeddings' norm.")
    ] = "0.01,0.03,0.1",
    draws: Annotated[int, typer.Option(min=1, max=1000, help="How often every noise is drawn.")] = 3,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps of the adversarial ascent.")] = 5,
    restarts: Annotated[
        int, typer.Option(min=1, max=1000, help="Ascents from different starts; of every example the worst counts.")
    ] = 1,
    split: Split = None,
    limit: Limit = 500,
    output: Output = None,
    as_json: Json = False,
    trust: Trust = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Score trained models on perturbed sources: one curve per run and kind of noise.

    Noise on embeddings, in characters and in words; an adversarial ascent beside random noise of the same norm; words
    in random order; the source of another example. Every run sees the same examples and the same noise.

    What the numbers mean: docs/evaluation_models.md.

    seqreg robustness runs/quickstart/baseline runs/quickstart/r3f --limit 100

    seqreg robustness runs/glue-sst2/r3f --noise characters --rates 0.01,0.02,0.05,0.1 --draws 5
    """
    levels = {key: _numbers(key, text) for key, text in {"rates": rates, "scales": scales, "radii": radii}.items()}
    folders, settings = _folders_and_settings(runs)
    run_config.check_studied(folders, settings)
    from seqreg.studies.robustness import study

    quiet()
    where = output_folder(folders, output)
    finding = study.robustness(
        folders, noises=noise or study.DEFAULT, **levels, draws=draws, steps=steps, restarts=restarts, split=split,
        limit=limit, output=where, overrides=settings, trust=trust, trust_changes=trust_changes,
    )  # fmt: skip
    finding.show(where, as_json=as_json)


def _numbers(key: str, text: str) -> list[float]:
    if text.count(",") >= 100:
        raise BadInput(f"--{key}: {text.count(',') + 1} numbers: at most 100")
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise BadInput(f"--{key} {text}: expected numbers with commas between, such as 0.1,0.2") from None


@app.command(rich_help_panel=PANEL)
def probe(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of finished runs.")],
    tasks: Annotated[
        Optional[Path], typer.Option(help="A YAML file of tasks to probe; by default the task of the first run.")
    ] = None,
    pretrained: Annotated[
        Optional[str], typer.Option(help="The model to compare with; by default the one that the runs started from.")
    ] = None,
    pooling: Pooling = "mean",
    examples: Examples = 5000,
    output: Output = None,
    as_json: Json = False,
    trust: Trust = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Look for representational collapse: what a linear classifier can still read from a frozen encoder.

    Beside each run is the pretrained model that it started from; every layer has its effective rank and its CKA to
    that model.

    seqreg probe runs/glue-sst2/baseline runs/glue-sst2/r3f --tasks others.yaml

    A file of tasks:

        tasks:
          - {task: glue/cola, data: {path: data/cola}}
          - {task: glue/rte, data: {path: data/rte, limit: {train: 1000}}}
    """
    if tasks is not None:
        study_files.read(study_files.ProbeFile, tasks)
    for folder in runs:
        if not os.path.isdir(folder):
            raise BadInput(f"{folder}: no such folder")
    from seqreg.studies.collapse import probe

    quiet()
    where = output_folder(runs, output)
    finding = probe.study(
        runs, tasks, where, most=examples, pooling=pooling, pretrained=pretrained, trust=trust,
        trust_changes=trust_changes,
    )  # fmt: skip
    finding.show(where, as_json=as_json)


@app.command(rich_help_panel=PANEL)
def chain(
    plan: Annotated[Path, typer.Argument(help="A YAML file: the runs of the chain, in their order.")],
    settings: Settings = None,
    terms: Methods = None,
    cycles: Annotated[int, typer.Option(min=1, max=1000, help="How often to repeat the steps of the plan.")] = 1,
    seeds: Annotated[
        Optional[str], typer.Option(help="Instead of the plan's: how many seeds, or which: `5`, or `3,7,11`.")
    ] = None,
    pooling: Pooling = "mean",
    examples: Examples = 5000,
    output: Annotated[
        Optional[Path],
        typer.Option(help="The folder of all runs; by default the plan's, or runs/chain-FILE."),
    ] = None,
    as_json: Json = False,
    trust: Trust = False,
) -> None:
    """Train tasks one after the other, each from the encoder of the one before, and probe what is left of them.

    All tasks are probed in the pretrained model and after every step. The same command again resumes a chain that was
    stopped; finished runs are left alone, also with more cycles, methods or seeds.

    seqreg chain glue.yaml --terms r3f --cycles 3 optimisation.max_steps=500

    A plan:

        settings: [model.name=FacebookAI/roberta-base]
        seeds: [1, 2, 3]
        steps:
          - {recipe: glue, variants: [sst2], settings: [data.path=data/sst2]}
          - {recipe: glue, variants: [qnli], settings: [data.path=data/qnli]}
    """
    steps = study_files.read(ChainPlan, plan)
    steps = steps if seeds is None else steps.updated(seeds=read_seeds(seeds))
    _check_chain(plan, steps, terms or [], settings or [])
    from seqreg.studies.collapse import chain

    quiet()
    folder = output or Path(steps.output or f"runs/chain-{plan.stem}")
    finding = chain.study(
        steps, plan, folder, terms or [], settings or [], cycles=cycles, most=examples, pooling=pooling, trust=trust
    )
    finding.show(folder / FOLDER, as_json=as_json)


def _check_chain(path: Path, plan: ChainPlan, methods: Sequence[str], settings: Sequence[str]) -> None:
    """Refuse unknown terms and missing files, before anything slow is imported."""
    known = lookup.names("recipes/terms")
    for name in (part.recipe for method in methods for part in parse(method).parts):
        if name not in (*known, "baseline") and not name.endswith((".yaml", ".yml")):
            raise BadInput(f"--terms {name}: unknown; {nearest(name, known)}")
    for setting in settings:
        if setting.partition("=")[0] in ("output", "seed"):
            raise BadInput(f"{setting}: a chain sets it itself: see --seeds and --output")
    for step in plan.steps:
        others = [word for word in (*plan.settings, *step.settings, *settings) if not word.startswith("terms")]
        try:
            run_config.resolve(step.recipe, variants=step.variants, overrides=others, paths=["data.path", "model.name"])
        except BadInput as error:
            raise BadInput(f"{path}: step {step.title}: {str(error).removeprefix('command line: ')}") from None


@app.command(rich_help_panel=PANEL)
def shift(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUNS", help="Output folders of finished runs, and settings to change: `key=value`."),
    ],
    to: Annotated[str, typer.Option(help="The task to move the models to: a card by name or path.")],
    share: Annotated[
        Optional[list[float]],
        typer.Option(
            help="The share of the target's training examples to train on; may be repeated. 0 and 0.1 by default."
        ),
    ] = None,
    output: Output = None,
    as_json: Json = False,
    trust: Trust = False,
    trust_changes: TrustChanges = False,
) -> None:
    """Score models on a domain that they were not trained on, as they are and after a little training there.

    The examples of a share are the same for every model. Further training is an ordinary run, with the method and the
    settings of the first, in RUN/shift/; the same command again resumes it.

    seqreg shift runs/qnli/baseline runs/qnli/r3f --to glue/rte data.path=data/rte --share 0 --share 0.1
    """
    folders, settings = _folders_and_settings(runs)
    for folder in folders:
        run_config.check_trained(folder)
    cards.load(to)
    for setting in settings:
        key, _, path = setting.partition("=")
        if key == "data.path" and not os.path.exists(path):
            raise BadInput(f"{setting}: no such file or folder")
    from seqreg.studies.collapse import shift

    quiet()
    where, shares = output_folder(folders, output), share or [0.0, 0.1]
    finding = shift.study(folders, to, shares, where, settings=settings, trust=trust, trust_changes=trust_changes)
    finding.show(where, as_json=as_json)
