"""`seqreg calibrate`: whether a trained model is as sure as it should be."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqreg.errors import BadInput
from seqreg.metrics.calibration import (
    Coverage,
    Outcomes,
    Temperature,
    chance_error,
    fit_temperature,
    risk_coverage,
)
from seqreg.metrics.classification import spearman
from seqreg.workbench.console import quiet
from seqreg.workbench.evidence import calibrate_figures, subject
from seqreg.workbench.evidence.findings import FOLDER, Finding, Table
from seqreg.workbench.evidence.showing import Tell, check_output, progress, show
from seqreg.workbench.evidence.subject import Piece, Subject
from seqreg.workbench.examples import Example

COLUMNS = ["count", "accuracy", "confidence", "ece", "by chance", "adaptive_ece", "brier", "nll"]


@dataclass(frozen=True)
class Part:
    """Outcomes of a kind, before and after the temperature, with their numbers."""

    name: str
    before: Outcomes
    after: Outcomes
    bins: int
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for when, outcomes in (("before", self.before), ("after", self.after)):
            found, mass = (chance_error(outcomes.confidence, self.bins, equal) for equal in ("width", "mass"))
            self.numbers[when] = {
                **outcomes.summary(self.bins), "by chance": found[1], "adaptive by chance": mass[1],
            }  # fmt: skip

    def verdict(self) -> str:
        """In a sentence, what the numbers before the temperature say."""
        found = self.numbers["before"]
        text = (
            f"{self.name}: accuracy {found['accuracy']:.3f}, mean confidence {found['confidence']:.3f}, "
            f"ECE {found['ece']:.3f} (adaptive {found['adaptive_ece']:.3f}) on {found['count']:.0f}: "
        )
        if found["ece"] <= found["by chance"] and found["adaptive_ece"] <= found["adaptive by chance"]:
            return f"{text}no more than a perfectly calibrated model may show on so few ({found['by chance']:.3f})."
        off, chance = abs(found["overconfidence"]), f"by chance up to {found['by chance']:.3f}"
        if off < found["ece"] / 2:
            return f"{text}too sure in places and too modest in others ({chance})."
        return f"{text}{'overconfident' if found['overconfidence'] > 0 else 'underconfident'} by {off:.3f} ({chance})."


@dataclass(frozen=True)
class Texts:
    """Generated texts: their mean log-probability a token against their ROUGE-L."""

    logp: NDArray[Any]
    rouge: NDArray[Any]
    coverage: Coverage

    @property
    def rank(self) -> float:
        return spearman(self.logp, self.rouge)


def command(folder: Path, overrides: Sequence[str], *, as_json: bool, **options: Any) -> None:
    """What `seqreg calibrate` does: measure, and print."""
    check_output(options["output"])
    quiet()
    found = calibrate(folder, overrides=overrides, **options)
    show(found, options["output"] or folder / FOLDER, as_json=as_json)


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
    if bins < 1 or limit < 2:
        raise BadInput(f"--bins {bins}, --limit {limit}: expected at least 1 bin and 2 examples")
    one = subject.load(folder, overrides, trust=trust)
    if one.card.kind == "regression":
        raise BadInput(f"{folder}: {one.card.title} is a regression: there are no probabilities to calibrate")
    dev, test, names = _halves(one, split, limit)
    size = one.run.config.evaluation.batch_size
    batches = -(-len(dev) // size) + -(-len(test) // size) * (2 if one.generates and sequences else 1)
    with progress(batches) as tell:
        fitted = fit_temperature(_chunks(_pieces(one, dev, f"fitting on {len(dev)} examples", tell)))
        parts = _parts(one, _pieces(one, test, f"measuring {len(test)} examples", tell), fitted.value, bins)
        texts = _texts(one, test, tell) if one.generates and sequences else None
    coverage = texts.coverage if texts else None
    if not one.generates:
        coverage = risk_coverage(parts[0].before.confidence, ~parts[0].before.correct)
    where = output or folder / FOLDER
    figures = calibrate_figures.draw(where, parts, fitted, coverage, texts)
    words = ["seqreg", "calibrate", str(folder), *overrides, *(["--split", split] if split else [])]
    words += ["--bins", str(bins), "--limit", str(limit), *([] if sequences else ["--no-sequences"])]
    finding = Finding(
        "calibrate", f"Calibration of {one.method} ({folder})",
        shlex.join(words), _summary(parts, fitted, names, coverage, texts), _tables(parts, coverage, texts), figures,
        _values(parts, fitted, names, coverage, texts),
    )  # fmt: skip
    finding.write(where)
    return finding


def _halves(one: Subject, split: str | None, limit: int) -> tuple[list[Example], list[Example], tuple[str, str]]:
    """Examples to fit a temperature on, and others to report on, with the names of both."""
    name = one.split(split)
    if name != "validation" and "validation" in one.splits.sets:
        dev, test = (subject.sampled(one.splits.sets[key], limit) for key in ("validation", name))
        return dev, test, ("validation", name)
    both = subject.sampled(one.splits.sets[name], 2 * limit)
    if len(both) < 2:
        raise BadInput(f"{one.folder}: {name} has one example: a temperature is fitted on others than are reported")
    return both[::2], both[1::2], (f"one half of {name}", f"the other half of {name}")


def _pieces(one: Subject, examples: Sequence[Example], what: str, tell: Tell) -> list[Piece]:
    found: list[Piece] = []
    for _, batch in one.batches(examples):
        found += one.pieces(batch)
        tell(what)
    return found


def _chunks(pieces: Sequence[Piece]) -> Any:
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
    rouge = subject.rouge_l(texts, [example.target or "" for example in examples], one.card)
    return Texts(logp, rouge, risk_coverage(logp, 1 - rouge))


def _summary(
    parts: Sequence[Part],
    fitted: Temperature,
    names: tuple[str, str],
    coverage: Coverage | None,
    texts: Texts | None,
) -> list[str]:
    first = parts[0].numbers
    found = [f"Measured on {names[1]}; the temperature is fitted on {names[0]}.", *(part.verdict() for part in parts)]
    found.append(
        f"Temperature {fitted.value:.3g}: " + ", ".join(
            f"{key} {first['before'][key.lower()]:.3f} to {first['after'][key.lower()]:.3f}"
            for key in ("ECE", "Brier", "NLL")
        ) + f"; NLL where it was fitted {fitted.before:.3f} to {fitted.after:.3f}."
    )  # fmt: skip
    if fitted.at_end:
        found.append("The temperature is at the end of its range: the examples it was fitted on cannot tell it.")
    if coverage is not None:
        what = "risk (1 - ROUGE-L)" if texts else "error"
        found.append(
            f"Surest first, the area under {what} and coverage is {coverage.area:.3f}: {coverage.best:.3f} is the best "
            f"possible, {coverage.random:.3f} a confidence that knows nothing."
        )
    if texts is not None:
        found.append(f"Spearman's correlation of log-probability a token and ROUGE-L is {texts.rank:.3f}.")
    return found


def _tables(parts: Sequence[Part], coverage: Coverage | None, texts: Texts | None) -> list[Table]:
    rows = [
        [part.name, when, *(int(found[key]) if key == "count" else float(found[key]) for key in COLUMNS)]
        for part in parts
        for when, found in part.numbers.items()
    ]
    tables = [Table("Calibration before and after the temperature", ["of", "temperature", *COLUMNS], rows)]
    if coverage is not None:
        title = "Generated texts: log-probability and ROUGE-L" if texts else "Risk and coverage"
        columns, row = ["area", "best possible", "knowing nothing"], [coverage.area, coverage.best, coverage.random]
        rank = [texts.rank] if texts else []
        tables.append(Table(title, [*columns, *(["Spearman"] if texts else [])], [[*row, *rank]]))
    return tables


def _values(
    parts: Sequence[Part],
    fitted: Temperature,
    names: tuple[str, str],
    coverage: Coverage | None,
    texts: Texts | None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "fitted_on": names[0], "measured_on": names[1],
        "temperature": fitted.value, "temperature_at_end": fitted.at_end,
        "parts": {part.name: {when: dict(numbers) for when, numbers in part.numbers.items()} for part in parts},
    }  # fmt: skip
    if coverage is not None:
        found["coverage"] = {"area": coverage.area, "best": coverage.best, "random": coverage.random}
    if texts is not None:
        found["texts"] = {"spearman": texts.rank, "rougeL": float(texts.rouge.mean()), "logp": float(texts.logp.mean())}
    return found
