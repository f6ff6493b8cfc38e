"""`seqreg robustness`: what is left of a trained model's answers when its source is disturbed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seqreg.errors import BadInput, nearest
from seqreg.metrics import text_noise
from seqreg.metrics.calibration import Outcomes
from seqreg.metrics.classification import pearson
from seqreg.studies.common import trained_model
from seqreg.studies.common.display import Tell, place, progress, show
from seqreg.studies.common.findings import Finding
from seqreg.studies.common.trained_model import Material, Subject
from seqreg.studies.robustness import perturbations
from seqreg.studies.robustness import report as robustness_report
from seqreg.workbench.config import run_config
from seqreg.workbench.config.cards import Card
from seqreg.workbench.data import loading
from seqreg.workbench.data.examples import Example
from seqreg.workbench.scores.evaluate import score_classes
from seqreg.workbench.text.terminal import quiet

RATES, SCALES, RADII = (0.05, 0.1, 0.2), (0.1, 0.3, 1.0), (0.01, 0.03, 0.1)
DEFAULT = ("embeddings", "characters", "words", "adversary", "order", "source")
NOISES = (*DEFAULT, *(name for name in text_noise.KINDS if name not in DEFAULT))
CLEAN = "none"


@dataclass(frozen=True)
class Condition:
    """A way to disturb a source: `level` is a rate, a scale or a radius."""

    noise: str
    level: float = 0.0
    seed: int = 0

    def change(self) -> perturbations.Change | None:
        """Of the embeddings; None where it is none."""
        if self.noise == "embeddings":
            return perturbations.embedding_noise(self.level, self.seed)
        if self.noise in ("adversary", "random"):
            return perturbations.attack(self.level, self.seed, ascent=self.noise == "adversary")
        return None

    def texts(self, examples: Sequence[Example]) -> list[Example]:
        if self.noise in text_noise.KINDS:
            return perturbations.text_noise(examples, self.noise, self.level, self.seed)
        if self.noise == "order":
            return perturbations.word_order(examples, self.seed)
        return perturbations.other_source(examples, self.seed) if self.noise == "source" else list(examples)


@dataclass(frozen=True)
class Answers:
    """What a model says about all examples: class scores [n, C], numbers [n, 1], or texts; and the mean loss."""

    outputs: Any
    loss: float


@dataclass(frozen=True)
class Row:
    """One condition of one run: score and agreement with the clean answers in percent, loss a label or a token."""

    run: str
    noise: str
    level: float
    seed: int
    score: float
    agreement: float
    loss: float


def command(
    words: Sequence[str], noises: Sequence[str], levels: Mapping[str, str], *, as_json: bool, **options: Any
) -> None:
    """What `seqreg robustness` does: measure, and print."""
    folders = [Path(word) for word in words if "=" not in word or Path(word).is_dir()]
    if not folders:
        raise BadInput("no run: give the output folder of at least one training")
    overrides = [word for word in words if Path(word) not in folders]
    chosen: dict[str, Any] = {key: _numbers(key, text) for key, text in levels.items()}
    quiet()
    found = robustness(folders, noises=noises or DEFAULT, overrides=overrides, **chosen, **options)
    show(found, place(folders, options["output"]), as_json=as_json)


def _numbers(key: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise BadInput(f"--{key} {text}: expected numbers with commas between, such as 0.1,0.2") from None


def robustness(
    folders: Sequence[Path],
    *,
    noises: Sequence[str] = DEFAULT,
    rates: Sequence[float] = RATES,
    scales: Sequence[float] = SCALES,
    radii: Sequence[float] = RADII,
    draws: int = 3,
    split: str | None = None,
    limit: int = 500,
    output: Path | None = None,
    overrides: Sequence[str] = (),
    trust: bool = False,
) -> Finding:
    """Ask every run under every condition, draw, and write down what was found."""
    _check(noises, rates, scales, radii, draws, limit)
    where, names = place(folders, output), _names(folders, overrides)
    asked = conditions(noises, rates, scales, radii, draws)
    runs = [trained_model.prepare(folder, overrides, trust=trust) for folder in folders]
    chosen, shared = _examples(runs, split, limit)
    card = runs[0].card
    rows: list[Row] = []
    for name, run in zip(names, runs, strict=True):
        one = run.open(trust=trust)
        batches = -(-len(shared) // run.run.config.evaluation.per_device_eval_batch_size)
        with progress(batches * (len(asked) + 1)) as tell:
            rows += examine(one, name, shared, asked, tell)
    words = ["seqreg", "robustness", *map(str, folders), *overrides, *(f"--noise={noise}" for noise in noises)]
    words += [f"--{key}={','.join(f'{x:g}' for x in values)}" for key, values in _levels(rates, scales, radii).items()]
    words += [f"--draws={draws}", f"--limit={limit}", *([f"--split={split}"] if split else [])]
    about = f"{len(shared)} examples of {chosen}"
    finding = Finding(
        "robustness", f"Robustness of {', '.join(names)}", shlex.join(words),
        robustness_report.summary(rows, card, about), robustness_report.tables(rows, card, about),
        robustness_report.draw(where, rows, card),
        {"examples": len(shared), "split": chosen, "draws": draws, "rows": [asdict(row) for row in rows]},
    )  # fmt: skip
    finding.write(where)
    return finding


def _examples(runs: Sequence[Material], split: str | None, limit: int) -> tuple[str, list[Example]]:
    """The split, and the examples of it that all runs have."""
    shared: list[Example] = []
    for run in runs:
        chosen = run.split(split)
        found = loading.sample(run.splits.sets[chosen], limit)
        if (shared and found != shared) or len(found) < 2:
            what = f"other examples than {runs[0].folder}" if shared else "fewer than two examples"
            raise BadInput(f"{run.folder}: {chosen} has {what}: runs are compared on the same, two or more")
        shared = found
    return chosen, shared


def _levels(rates: Sequence[float], scales: Sequence[float], radii: Sequence[float]) -> dict[str, Sequence[float]]:
    return {"rates": rates, "scales": scales, "radii": radii}


def _check(
    noises: Sequence[str],
    rates: Sequence[float],
    scales: Sequence[float],
    radii: Sequence[float],
    draws: int,
    limit: int,
) -> None:
    for noise in noises:
        if noise not in NOISES:
            raise BadInput(f"--noise {noise}: unknown; {nearest(noise, NOISES)}")
    for key, values in _levels(rates, scales, radii).items():
        most = 1.0 if key == "rates" else float("inf")
        for value in values:
            if not 0 < value <= most or value == float("inf"):
                raise BadInput(f"--{key}: {value:g}: expected numbers above 0{' and up to 1' if most == 1 else ''}")
        if not 1 <= len(values) <= 100 or len(set(values)) < len(values):
            raise BadInput(f"--{key}: expected at least one number, at most 100, and none twice")
    if not 1 <= draws <= 1000:
        raise BadInput(f"--draws {draws}: expected 1 to 1000")
    if limit < 2:
        raise BadInput(f"--limit {limit}: expected at least 2 examples")


def _names(folders: Sequence[Path], overrides: Sequence[str]) -> list[str]:
    """Short names that tell runs apart: their methods, their folders' names, or their whole paths."""
    methods = [run_config.load(folder, overrides, build_terms=False).config.method for folder in folders]
    for names in (methods, [folder.resolve().name for folder in folders], [str(folder) for folder in folders]):
        if len(set(names)) == len(folders):
            return names
    raise BadInput(f"{', '.join(map(str, folders))}: the same run twice")


def conditions(
    noises: Sequence[str], rates: Sequence[float], scales: Sequence[float], radii: Sequence[float], draws: int
) -> list[Condition]:
    """All of them, in the order of the noises; an ascent is followed by random noise of the same norm."""
    found: list[Condition] = []
    for noise in dict.fromkeys(noises):
        levels = {"embeddings": scales, "adversary": radii, "order": (1.0,), "source": (1.0,)}.get(noise, rates)
        found += [Condition(noise, level, seed) for level in sorted(levels) for seed in range(draws)]
        if noise == "adversary":
            found += [Condition("random", level, seed) for level in sorted(levels) for seed in range(draws)]
    return found


def examine(one: Subject, name: str, examples: Sequence[Example], asked: Sequence[Condition], tell: Tell) -> list[Row]:
    """The rows of one run, the clean one first."""
    clean: Answers | None = None
    rows = []
    for condition in [Condition(CLEAN), *asked]:
        what = f"{name}: {condition.noise} {condition.level:g}"
        answers = ask(one, condition.texts(examples), condition.change(), tell, what)
        clean = clean or answers
        score, same = _score(answers.outputs, examples, one.card), agreement(answers.outputs, clean.outputs, one.card)
        rows.append(Row(name, condition.noise, condition.level, condition.seed, score, same, answers.loss))
    return rows


def ask(
    one: Subject, examples: Sequence[Example], change: perturbations.Change | None, tell: Tell, what: str
) -> Answers:
    """All answers under one condition."""
    outputs: list[Any] = [None] * len(examples)
    losses: list[Any] = []
    for rows, batch in one.batches(examples):
        delta = None if change is None else change(one, [examples[row] for row in rows], batch)
        pieces = one.pieces(batch, delta)
        for piece in pieces:
            logits = piece.logits()
            regression = one.card.kind == "regression"
            losses.append((logits[:, 0] - piece.labels) ** 2 if regression else Outcomes.of(logits, piece.labels).nll)
        found = one.texts(one.generate(batch, delta)) if one.generates else list(pieces[0].logits())
        for row, answer in zip(rows, found, strict=True):
            outputs[row] = answer
        tell(what)
    return Answers(outputs if one.generates else np.stack(outputs), float(np.concatenate(losses).mean()))


def _score(outputs: Any, examples: Sequence[Example], card: Card) -> float:
    """The task's own score, in percent."""
    if card.kind == "generation":
        return 100 * float(trained_model.rouge_l(outputs, [example.target or "" for example in examples], card).mean())
    return score_classes(outputs, examples, card, resamples=0).metrics["score"]


def agreement(outputs: Any, clean: Any, card: Card) -> float:
    """With the clean answers, in percent: equal classes, Pearson's correlation of numbers, or ROUGE-L of texts."""
    if card.kind == "classification":
        return 100 * float((outputs.argmax(-1) == clean.argmax(-1)).mean())
    if card.kind == "regression":
        return 100.0 if np.array_equal(outputs, clean) else 100 * pearson(outputs[:, 0], clean[:, 0])
    same = [a == b for a, b in zip(outputs, clean, strict=True)]
    return 100 * float(np.where(same, 1.0, trained_model.rouge_l(outputs, clean, card)).mean())
