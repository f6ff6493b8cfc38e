"""`seqreg calibrate`: whether a trained model is as sure as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from seqreg.errors import BadInput
from seqreg.metrics.calibration import Outcomes, fit_temperature, risk_coverage
from seqreg.metrics.texts import LIKENESS
from seqreg.studies.calibrate import figures
from seqreg.studies.calibrate.report import Calibration, CalibrationPart, GeneratedTexts
from seqreg.studies.common.findings import BatchDone, Finding, command, output_folder, progress
from seqreg.studies.common.trained_model import Predictions, TrainedModel
from seqreg.workbench.data import loading
from seqreg.workbench.data.examples import Example


def calibrate(
    folder: Path, *, split: str | None = None, bins: int = 15, limit: int = 1000, sequences: bool = True,
    output: Path | None = None, overrides: Sequence[str] = (), trust: bool = False,
    trust_changes: bool = False,
) -> Finding:  # fmt: skip
    """Measure, draw, and write what was found."""
    if not 1 <= bins <= 1000:
        raise BadInput(f"--bins {bins}: expected 1 to 1000")
    if limit < 2:
        raise BadInput(f"--limit {limit}: expected at least 2 examples")
    output = output_folder([folder], output)
    model = TrainedModel.load(folder, overrides, trust=trust, trust_changes=trust_changes)
    if model.card.kind == "regression":
        raise BadInput(f"{folder}: {model.card.title} is a regression: there are no probabilities to calibrate")
    dev, test, names = _halves(model, split, limit)
    batches = model.count_batches(dev) + model.count_batches(test) * (2 if model.generates and sequences else 1)
    with progress(batches) as done:
        fitting = _predictions(model, dev, f"fitting on {len(dev)} examples", done)
        fitted = fit_temperature(lambda: ((some.logits(), some.labels) for some in fitting))
        measured = _predictions(model, test, f"measuring {len(test)} examples", done)
        parts = _parts(model, measured, fitted.value, bins)
        texts = _texts(model, test, done) if model.generates and sequences else None
    coverage = texts.coverage if texts else None
    if not model.generates:
        coverage = risk_coverage(parts[0].before.confidence, ~parts[0].before.correct)
    calibration = Calibration(parts, fitted, names, (len(dev), len(test)), coverage, texts)
    words = ["calibrate", folder, *overrides, *(["--split", split] if split else [])]
    words += ["--bins", bins, "--limit", limit, *([] if sequences else ["--no-sequences"])]
    return Finding(
        "calibrate", f"Calibration of {model.method} ({folder})", command(*words), calibration.summary(),
        calibration.tables(), figures.draw(output, calibration), calibration.values(),
    ).write(output)  # fmt: skip


def _halves(model: TrainedModel, split: str | None, limit: int) -> tuple[list[Example], list[Example], tuple[str, str]]:
    """The validation set and the chosen split; two halves where there is only one of them."""
    name, sets = model.split(split), model.splits.sets
    if name != "validation" and "validation" in sets:
        dev, test = (loading.sample(sets[key], limit) for key in ("validation", name))
        return dev, test, ("validation", name)
    both = loading.sample(sets[name], 2 * limit)
    if len(both) < 2:
        raise BadInput(f"{model.folder}: {name} has one example: a temperature is fitted on others than are reported")
    return both[::2], both[1::2], (f"one half of {name}", f"the other half of {name}")


def _predictions(model: TrainedModel, examples: Sequence[Example], what: str, done: BatchDone) -> list[Predictions]:
    predictions: list[Predictions] = []
    for _, batch in model.batches(examples):
        predictions += model.predictions(batch)
        done(what)
    return predictions


def _parts(
    model: TrainedModel, predictions: Sequence[Predictions], temperature: float, bins: int
) -> list[CalibrationPart]:
    """Outcomes at both temperatures; the end of a sequence is told apart by what the model chose."""
    both: list[tuple[Outcomes, Outcomes]] = []
    for some in predictions:
        logits = some.logits()
        both.append((Outcomes.of(logits, some.labels), Outcomes.of(logits, some.labels, temperature)))
    before, after = (Outcomes.joined(list(side)) for side in zip(*both, strict=True))
    if not model.generates:
        return [CalibrationPart("classes", before, after, bins)]
    ends = before.choice == model.end  # which no temperature changes
    chosen = {"all tokens": ends | True, "end of sequence": ends, "other tokens": ~ends}
    return [CalibrationPart(name, before[where], after[where], bins) for name, where in chosen.items() if where.any()]


def _texts(model: TrainedModel, examples: Sequence[Example], done: BatchDone) -> GeneratedTexts:
    """Generate, and compute how likely the model finds its own texts."""
    logp, texts = np.zeros(len(examples)), [""] * len(examples)
    for chosen, batch in model.batches(examples):
        ids = model.generate(batch)
        generated = model.predictions(model.with_generated(batch, ids))
        nll = np.concatenate([Outcomes.of(some.logits(), some.labels).nll for some in generated])
        where = np.concatenate([some.examples for some in generated])
        sizes = np.maximum(np.bincount(where, minlength=len(chosen)), 1)
        logp[chosen] = -np.bincount(where, nll, len(chosen)) / sizes
        for index, text in zip(chosen, model.texts(ids), strict=True):
            texts[index] = text
        done(f"generating {len(examples)} texts")
    likeness = model.likeness(texts, [example.accepted for example in examples])
    measure = LIKENESS[model.card.metric[0]]
    return GeneratedTexts(logp, likeness, risk_coverage(logp, 1 - likeness), measure)
