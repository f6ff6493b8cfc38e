"""`seqreg robustness`: what is left of a trained model's answers when its source is perturbed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from seqreg.errors import BadInput, nearest
from seqreg.metrics import text_noise
from seqreg.metrics.calibration import Outcomes
from seqreg.metrics.classification import pearson
from seqreg.studies.common.findings import BatchDone, Finding, command, output_folder, progress
from seqreg.studies.common.trained_model import NO_NOISE, TrainedModel, load_all
from seqreg.studies.robustness import figures, perturbations, report
from seqreg.studies.robustness.report import CLEAN, ConditionScore
from seqreg.workbench.data import loading
from seqreg.workbench.data.examples import Example
from seqreg.workbench.scores.evaluate import score_classes, score_texts

DEFAULT = ("embeddings", "characters", "words", "adversary", "order", "source")
NOISES = (*DEFAULT, *(name for name in text_noise.KINDS if name not in DEFAULT))


@dataclass(frozen=True)
class Condition:
    """A way to perturb a source: `level` is a rate, a scale or a radius."""

    noise: str
    level: float = 0.0
    seed: int = 0

    def change(self, steps: int = perturbations.STEPS) -> perturbations.Change | None:
        """The change of the embeddings; None for a noise that leaves them alone.

        Args:
            steps: of an ascent
        """
        if self.noise == "embeddings":
            return perturbations.embedding_noise(self.level, self.seed)
        if self.noise in ("adversary", "random"):
            return perturbations.attack(self.level, self.seed, ascent=self.noise == "adversary", steps=steps)
        return None

    def texts(self, examples: Sequence[Example]) -> list[Example]:
        if self.noise in text_noise.KINDS:
            return perturbations.text_noise(examples, self.noise, self.level, self.seed)
        if self.noise == "order":
            return perturbations.word_order(examples, self.seed)
        return perturbations.other_source(examples, self.seed) if self.noise == "source" else list(examples)


@dataclass(frozen=True)
class NoiseGrid:
    """Kinds of noise, the levels of each, and how often each is drawn.

    Args:
        steps: of the adversarial ascent
        restarts: ascents for every draw; of every example the one with the highest loss counts
    """

    noises: Sequence[str] = DEFAULT
    rates: Sequence[float] = (0.05, 0.1, 0.2)
    scales: Sequence[float] = (0.1, 0.3, 1.0)
    radii: Sequence[float] = (0.01, 0.03, 0.1)
    draws: int = 3
    steps: int = perturbations.STEPS
    restarts: int = 1

    def __post_init__(self) -> None:
        for noise in self.noises:
            if noise not in NOISES:
                raise BadInput(f"--noise {noise}: unknown; {nearest(noise, NOISES)}")
        for key, levels in self.levels.items():
            most = 1.0 if key == "rates" else float("inf")
            for level in levels:
                if not 0 < level <= most or level == float("inf"):
                    raise BadInput(f"--{key}: {level:g}: expected numbers above 0{' and up to 1' if most == 1 else ''}")
            if not 1 <= len(levels) <= 100 or len(set(levels)) < len(levels):
                raise BadInput(f"--{key}: expected at least one number, at most 100, and none twice")
        if not 1 <= self.draws <= 1000:
            raise BadInput(f"--draws {self.draws}: expected 1 to 1000")
        for key, count in (("steps", self.steps), ("restarts", self.restarts)):
            if not 1 <= count <= 1000:
                raise BadInput(f"--{key} {count}: expected 1 to 1000")

    @property
    def levels(self) -> dict[str, Sequence[float]]:
        return {"rates": self.rates, "scales": self.scales, "radii": self.radii}

    def conditions(self) -> list[Condition]:
        """In the order of the noises; an ascent is followed by random noise of the same norm."""
        others = {"embeddings": self.scales, "adversary": self.radii, "order": (1.0,), "source": (1.0,)}
        return [
            Condition(kind, level, seed)
            for noise in dict.fromkeys(self.noises)
            for kind in ((noise, "random") if noise == "adversary" else (noise,))
            for level in sorted(others.get(noise, self.rates))
            for seed in range(self.draws)
        ]

    def starts(self, condition: Condition) -> list[Condition]:
        """A condition with the seed of every restart."""
        count = self.restarts if condition.noise == "adversary" else 1
        return [replace(condition, seed=condition.seed + place * self.draws) for place in range(count)]

    def passes(self, conditions: Sequence[Condition]) -> int:
        """How often all examples are answered, once of them clean."""
        return 1 + sum(len(self.starts(condition)) for condition in conditions)

    def words(self) -> list[str]:
        """The options of the command."""
        levels = [f"--{key}={','.join(f'{level:g}' for level in levels)}" for key, levels in self.levels.items()]
        return [
            *(f"--noise={noise}" for noise in self.noises),
            *levels,
            f"--draws={self.draws}",
            f"--steps={self.steps}",
            f"--restarts={self.restarts}",
        ]


@dataclass(frozen=True)
class Answers:
    """What a model answers to all examples.

    Args:
        outputs: class scores [n, C], numbers [n, 1], or texts
        loss: mean over labels or tokens
        losses: mean loss of every example     # [n]
    """

    outputs: Any
    loss: float
    losses: Any


def robustness(
    folders: Sequence[Path], *, split: str | None = None, limit: int = 500, output: Path | None = None,
    overrides: Sequence[str] = (), trust: bool = False, trust_changes: bool = False, **noise: Any,
) -> Finding:  # fmt: skip
    """Score every run under every condition, draw, and write what was found; `noise` as in `NoiseGrid`."""
    grid = NoiseGrid(**noise)
    if limit < 2:
        raise BadInput(f"--limit {limit}: expected at least 2 examples")
    output, conditions = output_folder(folders, output), grid.conditions()
    models = load_all(folders, overrides, trust=trust, trust_changes=trust_changes)
    for model in models.values():
        if model.card.kind == "token_classification":
            raise BadInput(
                f"{model.folder}: noise in a text parts its words from their tags: not for token classification"
            )
    if {"embeddings", "adversary"} & set(grid.noises):
        for model in models.values():
            if model.causal:
                raise BadInput(f"{model.folder}: {NO_NOISE}")
            model.unload()
    if grid.restarts > 1 and (writers := [model for model in models.values() if model.generates]):
        raise BadInput(f"{writers[0].folder}: --restarts {grid.restarts}: for classes and numbers, not for texts")
    split_name, examples = _shared_examples(list(models.values()), split, limit)
    scores: list[ConditionScore] = []
    for name, model in models.items():
        with progress(model.count_batches(examples) * grid.passes(conditions)) as done:
            scores += examine(model, name, examples, conditions, done, grid)
        model.unload()
    words = ["robustness", *folders, *overrides, *grid.words(), f"--limit={limit}"]
    about, card = f"{len(examples)} examples of {split_name}", model.card
    return Finding(
        "robustness", f"Robustness of {', '.join(models)}", command(*words, *([f"--split={split}"] if split else [])),
        report.summary(scores, card, about), report.tables(scores, card, about), figures.draw(output, scores, card),
        {"examples": len(examples), "split": split_name, "draws": grid.draws, "rows": [asdict(s) for s in scores]},
    ).write(output)  # fmt: skip


def _shared_examples(models: Sequence[TrainedModel], split: str | None, limit: int) -> tuple[str, list[Example]]:
    """The split, and the examples of it, which must be the same for all models."""
    shared: list[Example] = []
    for model in models:
        name = model.split(split)
        examples = loading.sample(model.splits.sets[name], limit)
        if (shared and examples != shared) or len(examples) < 2:
            what = f"other examples than {models[0].folder}" if shared else "fewer than two examples"
            raise BadInput(f"{model.folder}: {name} has {what}: runs are compared on the same, two or more")
        if any(example.chat for example in examples):
            raise BadInput(f"{model.folder}: its examples are chats, whose messages are not perturbed")
        shared = examples
    return name, shared


def examine(
    model: TrainedModel, name: str, examples: Sequence[Example], conditions: Sequence[Condition], done: BatchDone,
    grid: NoiseGrid,
) -> list[ConditionScore]:  # fmt: skip
    """The scores of one model, those of the clean source first."""
    clean: Answers | None = None
    scores = []
    for condition in [Condition(CLEAN), *conditions]:
        what = f"{name}: {condition.noise} {condition.level:g}"
        starts = grid.starts(condition)
        answers = worst([answer(model, one.texts(examples), one.change(grid.steps), done, what) for one in starts])
        clean = clean or answers
        score, same = _score(answers.outputs, examples, model), agreement(answers.outputs, clean.outputs, model)
        common = most_common(answers.outputs, model)
        scores.append(
            ConditionScore(name, condition.noise, condition.level, condition.seed, score, same, answers.loss, common)
        )
    return scores


def worst(starts: Sequence[Answers]) -> Answers:
    """Of every example the answer with the highest loss."""
    if len(starts) == 1:
        return starts[0]
    losses = np.stack([answers.losses for answers in starts])
    chosen, every = losses.argmax(0), np.arange(losses.shape[1])
    outputs = np.stack([answers.outputs for answers in starts])[chosen, every]
    return Answers(outputs, float(losses.max(0).mean()), losses.max(0))


def most_common(outputs: Any, model: TrainedModel) -> float | None:
    """The share of the most common class among the answers, in percent; None where there are no classes."""
    if model.card.kind != "classification":
        return None
    return 100 * float(np.bincount(np.asarray(outputs).argmax(-1)).max() / len(outputs))


def answer(
    model: TrainedModel, examples: Sequence[Example], change: perturbations.Change | None, done: BatchDone, what: str
) -> Answers:
    """All answers under one condition."""
    outputs: list[Any] = [None] * len(examples)
    losses, owners = list[Any](), list[Any]()
    for chosen, batch in model.batches(examples):
        delta = None if change is None else change(model, [examples[index] for index in chosen], batch)
        predictions = model.predictions(batch, delta)
        for some in predictions:
            logits, regression = some.logits(), model.card.kind == "regression"
            losses.append((logits[:, 0] - some.labels) ** 2 if regression else Outcomes.of(logits, some.labels).nll)
            owners.append(np.asarray(chosen)[some.examples])
        answers = model.texts(model.generate(batch, delta)) if model.generates else list(predictions[0].logits())
        for index, output in zip(chosen, answers, strict=True):
            outputs[index] = output
        done(what)
    every, owner = np.concatenate(losses), np.concatenate(owners)
    by_example = np.bincount(owner, every, len(examples)) / np.maximum(np.bincount(owner, minlength=len(examples)), 1)
    return Answers(outputs if model.generates else np.stack(outputs), float(every.mean()), by_example)


def _score(outputs: Any, examples: Sequence[Example], model: TrainedModel) -> float:
    """The task's score, in percent."""
    if model.generates:
        return score_texts(outputs, examples, model.card, resamples=1).metrics["score"]
    return score_classes(outputs, examples, model.card, resamples=0).metrics["score"]


def agreement(outputs: Any, clean: Any, model: TrainedModel) -> float:
    """With the clean answers, in percent: equal classes, Pearson's correlation of numbers, or how alike texts are."""
    if model.card.kind == "classification":
        return 100 * float((outputs.argmax(-1) == clean.argmax(-1)).mean())
    if model.card.kind == "regression":
        return 100.0 if np.array_equal(outputs, clean) else 100 * pearson(outputs[:, 0], clean[:, 0])
    same = [a == b for a, b in zip(outputs, clean, strict=True)]
    return 100 * float(np.where(same, 1.0, model.likeness(outputs, [(text,) for text in clean])).mean())
