"""`seqreg calibrate`: whether a trained model is as sure as it should be."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqreg.errors import BadInput
from seqreg.metrics.calibration import Chunks, Outcomes, fit_temperature, risk_coverage
from seqreg.studies.calibrate import figures as calibrate_figures
from seqreg.studies.calibrate.report import Part, Study, Texts
from seqreg.studies.common import trained_model
from seqreg.studies.common.display import Tell, place, progress, show
from seqreg.studies.common.findings import Finding
from seqreg.studies.common.trained_model import Piece, Subject
from seqreg.workbench.data import loading
from seqreg.workbench.data.examples import Example
from seqreg.workbench.text.terminal import quiet


def command(folder: Path, overrides: Sequence[str], *, as_json: bool, **options: Any) -> None:
    """What `seqreg calibrate` does: measure, and print."""
    quiet()
    found = calibrate(folder, overrides=overrides, **options)
    show(found, place([folder], options["output"]), as_json=as_json)


def calibrate(
    folder: Path,
    *,
    split: str | None = None,
    bins: int = 15,
    limit: int = 1000,
    sequences: bool = True,
    output: Path | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Finding:
    """Measure, draw, and write down what was found."""
    if not 1 <= bins <= 1000:
        raise BadInput(f"--bins {bins}: expected 1 to 1000")
    if limit < 2:
        raise BadInput(f"--limit {limit}: expected at least 2 examples")
    where = place([folder], output)
    one = trained_model.load(folder, overrides, trust=trust)
    if one.card.kind == "regression":
        raise BadInput(f"{folder}: {one.card.title} is a regression: there are no probabilities to calibrate")
    dev, test, names = _halves(one, split, limit)
    size = one.run.config.evaluation.per_device_eval_batch_size
    batches = -(-len(dev) // size) + -(-len(test) // size) * (2 if one.generates and sequences else 1)
    with progress(batches) as tell:
        fitted = fit_temperature(_chunks(_pieces(one, dev, f"fitting on {len(dev)} examples", tell)))
        parts = _parts(one, _pieces(one, test, f"measuring {len(test)} examples", tell), fitted.value, bins)
        texts = _texts(one, test, tell) if one.generates and sequences else None
    coverage = texts.coverage if texts else None
    if not one.generates:
        coverage = risk_coverage(parts[0].before.confidence, ~parts[0].before.correct)
    study = Study(parts, fitted, names, (len(dev), len(test)), coverage, texts)
    words = ["seqreg", "calibrate", str(folder), *overrides, *(["--split", split] if split else [])]
    words += ["--bins", str(bins), "--limit", str(limit), *([] if sequences else ["--no-sequences"])]
    title, figures = f"Calibration of {one.method} ({folder})", calibrate_figures.draw(where, study)
    finding = Finding("calibrate", title, shlex.join(words), study.summary(), study.tables(), figures, study.values())
    finding.write(where)
    return finding


def _halves(one: Subject, split: str | None, limit: int) -> tuple[list[Example], list[Example], tuple[str, str]]:
    """The validation set and the split that is asked for; two halves where there is only one of them."""
    name = one.split(split)
    if name != "validation" and "validation" in one.splits.sets:
        dev, test = (loading.sample(one.splits.sets[key], limit) for key in ("validation", name))
        return dev, test, ("validation", name)
    both = loading.sample(one.splits.sets[name], 2 * limit)
    if len(both) < 2:
        raise BadInput(f"{one.folder}: {name} has one example: a temperature is fitted on others than are reported")
    return both[::2], both[1::2], (f"one half of {name}", f"the other half of {name}")


def _pieces(one: Subject, examples: Sequence[Example], what: str, tell: Tell) -> list[Piece]:
    found: list[Piece] = []
    for _, batch in one.batches(examples):
        found += one.pieces(batch)
        tell(what)
    return found


def _chunks(pieces: Sequence[Piece]) -> Chunks:
    return lambda: ((piece.logits(), piece.labels) for piece in pieces)


def _parts(one: Subject, pieces: Sequence[Piece], temperature: float, bins: int) -> list[Part]:
    """What was said, at both temperatures; the end of a sequence is told apart by what the model chose."""
    both: list[tuple[Outcomes, Outcomes]] = []
    for piece in pieces:
        logits = piece.logits()
        both.append((Outcomes.of(logits, piece.labels), Outcomes.of(logits, piece.labels, temperature)))
    before, after = (Outcomes.joined(list(side)) for side in zip(*both, strict=True))
    if not one.generates:
        return [Part("classes", before, after, bins)]
    ends = before.choice == one.end  # which no temperature changes
    chosen = {"all tokens": ends | True, "end of sequence": ends, "other tokens": ~ends}
    return [Part(name, before[where], after[where], bins) for name, where in chosen.items() if where.any()]


def _texts(one: Subject, examples: Sequence[Example], tell: Tell) -> Texts:
    """Generate, and ask the model how likely it finds its own texts."""
    logp, texts = np.zeros(len(examples)), [""] * len(examples)
    for rows, batch in one.batches(examples):
        ids = one.generate(batch)
        own = [
            (Outcomes.of(p.logits(), p.labels).nll, p.rows) for p in one.pieces({**batch, "labels": one.as_labels(ids)})
        ]
        nll, where = (np.concatenate(side) for side in zip(*own, strict=True))
        logp[rows] = -np.bincount(where, nll, len(rows)) / np.maximum(np.bincount(where, minlength=len(rows)), 1)
        for row, text in zip(rows, one.texts(ids), strict=True):
            texts[row] = text
        tell(f"generating {len(examples)} texts")
    rouge = trained_model.rouge_l(texts, [example.target or "" for example in examples], one.card)
    return Texts(logp, rouge, risk_coverage(logp, 1 - rouge))
