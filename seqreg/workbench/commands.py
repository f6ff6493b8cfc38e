"""What the commands do: resolve, work, print."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from seqreg.errors import BadInput
from seqreg.workbench import config, rows
from seqreg.workbench.tables import METRICS, score_table
from seqreg.workbench.untrusted import plain

out = Console(highlight=False, markup=False)


def train(
    recipe: str,
    terms: Sequence[str],
    variants: Sequence[str],
    settings: Sequence[str],
    *,
    trust: bool = False,
    **ways: Any,
) -> None:
    """Train a recipe and print its scores; `ways` as in `seqreg.workbench.train.train`."""
    run = config.resolve(recipe, terms=terms, variants=variants, overrides=settings, trust=trust)
    from seqreg.workbench import train as work
    from seqreg.workbench.console import console, quiet

    quiet()
    metrics = work.train(run, **ways)
    if metrics:
        out.print(score_table({metrics["method"]: metrics}))
        console.print(f"Everything is in {plain(run.config.output)}")
        if run.config.logging.tensorboard:
            console.print(f"Curves: tensorboard --logdir {plain(run.config.output)}")


def evaluate(
    folder: Path, file: Path | None, output: Path | None, settings: Sequence[str], *, trust: bool = False
) -> None:
    """Score a trained model and print it."""
    if output is not None and output.exists() and not output.is_dir():
        raise BadInput(f"--output {output}: a file is in the way")
    if output is not None and output.exists() and not (output / METRICS).is_file() and any(output.iterdir()):
        raise BadInput(f"--output {output}: the folder is not empty, and holds no scores of seqreg: choose another")
    config.load(folder, settings)
    from seqreg.workbench import train as work
    from seqreg.workbench.console import console, quiet

    quiet()
    metrics = work.evaluate_run(folder, file=file, output=output, overrides=tuple(settings), trust=trust)
    if metrics:
        out.print(score_table({metrics.get("method", folder.name): metrics}))
        console.print(f"Scores and predictions are in {plain(output or folder)}")


def predict(folder: Path, source: str, target: str, settings: Sequence[str], *, trust: bool = False) -> None:
    """Predict, and say how many."""
    config.load(folder, settings)
    from seqreg.workbench import predict as work
    from seqreg.workbench.console import console, quiet

    quiet()
    count = work.predict(folder, source, target, tuple(settings), trust=trust)
    if target != "-":
        console.print(f"{count} predictions in {plain(target)}")


def compare(recipe: str, methods: Sequence[str], seeds: str, folder: Path, **ways: Any) -> None:
    """Train a comparison and print its verdict; `ways` as in `seqreg.workbench.evidence.compare.compare`."""
    from seqreg.workbench.console import console, quiet
    from seqreg.workbench.evidence import compare as work

    quiet()
    if work.compare(recipe, methods, seeds, folder, **ways) is None:
        return
    from seqreg.workbench.evidence import showing, verdict

    finding = verdict.judge(folder)
    out.print(verdict.shown(finding.values))
    out.print(showing.shown(next(table for table in finding.tables if table.title == verdict.CHANGES)))
    for sentence in finding.summary:
        out.print(plain(sentence), soft_wrap=True)
    console.print(f"A page about it: seqreg report {plain(shlex.quote(str(folder)))}", soft_wrap=True)


def report(folder: Path, output: Path | None, *, markdown: bool, latex: bool) -> None:
    """Write the page of a comparison."""
    from seqreg.workbench.console import console
    from seqreg.workbench.evidence import report as work

    console.print(f"Written: {plain(work.report(folder, output, markdown=markdown, latex=latex))}")


def replay(crash: Path) -> None:
    """Print what a step that was not finite gives again."""
    from seqreg.workbench import replay as work
    from seqreg.workbench.console import quiet

    quiet()
    out.print(work.replay(crash))


def check(
    recipe: str, terms: Sequence[str], variants: Sequence[str], settings: Sequence[str], *, trust: bool = False
) -> None:
    """Print what a training would do."""
    run = config.resolve(recipe, terms=terms, variants=variants, overrides=settings, trust=trust)
    from seqreg.workbench import check as work
    from seqreg.workbench.console import quiet

    quiet()
    out.print(work.check(run))


def rouge(predictions: Path, references: Path, *, as_json: bool, **options: Any) -> None:
    """Print ROUGE of two files."""
    from seqreg.metrics.rouge import rouge as score

    texts, truth = _texts(predictions, "prediction"), _texts(references, "reference")
    if len(texts) != len(truth):
        raise BadInput(f"{predictions} has {len(texts)} texts, {references} has {len(truth)}: expected as many")
    if not texts:
        raise BadInput(f"{predictions}: 0 texts")
    report = score(texts, truth, **options)
    if as_json:
        found = {"means": report.means, "intervals": report.intervals, "counts": report.counts}
        out.print_json(json.dumps({**found, "signature": report.signature}))
    else:
        out.print(str(report), soft_wrap=True)


def _texts(path: Path, key: str) -> list[str]:
    """One text a line, or the key of every JSON object."""
    if path.suffix == ".jsonl":
        found = list(rows.read(path))
        for where, row in found:
            if not isinstance(row.get(key), str):
                raise BadInput(f"{where}: no text under the key {key!r}")
        return [row[key] for _, row in found]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    lines = text.split("\n")
    return [line.removesuffix("\r").replace("<n>", "\n") for line in (lines[:-1] if lines[-1] == "" else lines)]
