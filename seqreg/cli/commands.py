"""What the commands do: resolve, work, print."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from seqreg.errors import BadInput
from seqreg.workbench.config import run_config
from seqreg.workbench.data import readers
from seqreg.workbench.scores.results import METRICS, score_table
from seqreg.workbench.text.atomic_files import regular, writable
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import print_json

out = Console(highlight=False, markup=False)


def train(
    recipe: str,
    terms: Sequence[str],
    variants: Sequence[str],
    settings: Sequence[str],
    *,
    trust: bool = False,
    as_json: bool = False,
    **ways: Any,
) -> None:
    """Train a recipe and print its scores; `ways` as in `seqreg.workbench.run.train.train`."""
    run = run_config.resolve(
        recipe, terms=terms, variants=variants, overrides=settings, trust=trust, paths=run_config.PATHS
    )
    from seqreg.workbench.run import train as work
    from seqreg.workbench.text.terminal import console, quiet

    quiet()
    writable(run.config.output, "output=")
    metrics = work.train(run, **ways)
    if metrics:
        if as_json:
            print_json({**metrics, "output": run.config.output})
        else:
            out.print(score_table({metrics["method"]: metrics}))
        if run.note:
            console.print(run.note, soft_wrap=True)
        console.print(f"Everything is in {plain(run.config.output)}")
        if run.config.logging.tensorboard:
            console.print(f"Curves: tensorboard --logdir {plain(run.config.output)}")


def quickstart(words: Sequence[str], folder: Path, *, as_json: bool) -> None:
    """Train the quickstart and print what it found."""
    from seqreg.cli import quickstart as work

    source, tuned = work.plan(words, folder)
    from seqreg.workbench.text.terminal import console, quiet

    quiet()
    found = work.quickstart(source, tuned)
    if as_json:
        print_json(found)
    else:
        out.print(work.shown(found))
        out.print(work.HONEST, soft_wrap=True)
    console.print(f"Curves: tensorboard --logdir {plain(folder)}")


def evaluate(
    folder: Path,
    file: Path | None,
    output: Path | None,
    settings: Sequence[str],
    *,
    trust: bool = False,
    as_json: bool = False,
) -> None:
    """Score a trained model and print it."""
    if output is not None:
        writable(output, "--output ")
        if output.exists() and not output.is_dir():
            raise BadInput(f"--output {output}: a file is in the way")
        if output.exists() and not (output / METRICS).is_file() and any(output.iterdir()):
            raise BadInput(f"--output {output}: the folder is not empty, and holds no scores of seqreg: choose another")
    run_config.check_trained(folder)
    if file is not None and not os.path.isfile(file):
        raise BadInput(f"{file}: no such file")
    paths = ["data.path"] if file is None else []
    run_config.resolve(str(folder / "config.yaml"), overrides=settings, paths=paths, build_terms=False)
    from seqreg.workbench.run import train as work
    from seqreg.workbench.text.terminal import console, quiet

    quiet()
    metrics = work.evaluate_run(folder, file=file, output=output, overrides=tuple(settings), trust=trust)
    if metrics:
        if as_json:
            print_json(metrics)
        else:
            out.print(score_table({metrics.get("method", folder.name): metrics}))
        console.print(f"Scores and predictions are in {plain(output or folder)}")


def predict(
    folder: Path, source: str, target: str, settings: Sequence[str], *, trust: bool = False, as_json: bool = False
) -> None:
    """Predict, and say how many."""
    run_config.check_trained(folder)
    if source != "-" and not os.path.isfile(source):
        raise BadInput(f"{source}: no such file")
    run_config.load(folder, settings, build_terms=False)
    from seqreg.cli import predict as work
    from seqreg.workbench.text.terminal import console, quiet

    quiet()
    count = work.predict(folder, source, target, tuple(settings), trust=trust, as_json=as_json)
    if target != "-":
        console.print(f"{count} predictions in {plain(target)}")
        if as_json:
            print_json({"predictions": count, "output": target})


def compare(
    recipe: str, methods: Sequence[str], seeds: str, folder: Path, *, as_json: bool = False, **ways: Any
) -> None:
    """Train a comparison and print its verdict; `ways` as in `seqreg.studies.compare.study.compare`."""
    if as_json and ways.get("launcher") is not None:
        raise BadInput("--json and --launcher: there is no result yet; use --json with --collect, when all have ended")
    others = [word for word in ways.get("settings", ()) if not word.startswith("terms")]
    run_config.resolve(recipe, variants=ways.get("variants", ()), overrides=others, paths=["data.path", "model.name"])
    from seqreg.studies.compare import study as work
    from seqreg.workbench.text.terminal import console, quiet

    quiet()
    if work.compare(recipe, methods, seeds, folder, **ways) is None:
        return
    from seqreg.studies.common import display
    from seqreg.studies.compare import conclusions

    finding = conclusions.judge(folder)
    console.print(f"A page about it: seqreg report {plain(shlex.quote(str(folder)))}", soft_wrap=True)
    if as_json:
        print_json(asdict(finding))
        return
    out.print(conclusions.shown(finding.values))
    out.print(display.shown(next(table for table in finding.tables if table.title == conclusions.CHANGES)))
    for sentence in finding.summary:
        out.print(plain(sentence), soft_wrap=True)


def report(folder: Path, output: Path | None, *, markdown: bool, latex: bool, as_json: bool = False) -> None:
    """Write the page of a comparison."""
    from seqreg.studies.compare import comparison

    comparison.read(folder)
    from seqreg.studies.compare import report as work
    from seqreg.workbench.text.terminal import console

    written = work.report(folder, output, markdown=markdown, latex=latex)
    console.print(f"Written: {plain(written)}", soft_wrap=True)
    if as_json:
        print_json({"written": str(written)})


def replay(crash: Path, *, trust: bool = False, as_json: bool = False) -> None:
    """Print what a step that was not finite gives again."""
    if not os.path.isdir(crash):
        raise BadInput(f"{crash}: no such folder; a training writes one as RUN/crash/step-N")
    from seqreg.workbench.run import replay as work
    from seqreg.workbench.text.terminal import quiet

    quiet()
    found = work.replay(crash, trust=trust)
    if as_json:
        print_json(asdict(found))
    else:
        out.print(work.shown(found))


def check(
    recipe: str,
    terms: Sequence[str],
    variants: Sequence[str],
    settings: Sequence[str],
    *,
    trust: bool = False,
    as_json: bool = False,
) -> None:
    """Print what a training would do."""
    run = run_config.resolve(
        recipe, terms=terms, variants=variants, overrides=settings, trust=trust, paths=run_config.PATHS
    )
    from seqreg.cli import check as work
    from seqreg.workbench.text.terminal import quiet

    quiet()
    found = work.check(run)
    if as_json:
        print_json(found.json())
    else:
        out.print(found)


def rouge(predictions: Path, references: Path, *, as_json: bool, **options: Any) -> None:
    """Print ROUGE of two files."""
    texts, truth = _texts(predictions, "prediction"), _texts(references, "reference")
    if len(texts) != len(truth):
        raise BadInput(f"{predictions} has {len(texts)} texts, {references} has {len(truth)}: expected as many")
    if not texts:
        raise BadInput(f"{predictions}: 0 texts")
    from seqreg.metrics.rouge.score import rouge as score

    report = score(texts, truth, **options)
    if as_json:
        found = {"means": report.means, "intervals": report.intervals, "counts": report.counts}
        print_json({**found, "signature": report.signature})
    else:
        out.print(str(report), soft_wrap=True)


def _texts(path: Path, key: str) -> list[str]:
    """One text a line, or the key of every JSON object."""
    if path.suffix == ".jsonl":
        found = list(readers.read(path))
        for where, row in found:
            if not isinstance(row.get(key), str):
                raise BadInput(f"{where}: no text under the key {key!r}")
        return [row[key] for _, row in found]
    try:
        texts = [line for _, line in readers.lines(regular(path))]
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    return [line.removesuffix("\n").removesuffix("\r").replace("<n>", "\n") for line in texts]
