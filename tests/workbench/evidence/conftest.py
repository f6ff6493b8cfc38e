"""Tiny models that have learnt something, for studies of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from seqreg.workbench import config, train
from tests.workbench import samples

GOOD, BAD = "good fine lovely bright warm".split(), "bad awful dull grim cold".split()
OTHER = "the film story was is a very quite and plot actor scene in on with today".split()


def reviews(count: int, seed: int, wrong: float = 0.0) -> list[dict[str, Any]]:
    """Sentences with two words that tell their label; a share of the labels is wrong."""
    dice, rows = random.Random(seed), []
    for _ in range(count):
        label = dice.randrange(2)
        words = [*dice.choices(OTHER, k=dice.randint(3, 7)), *dice.choices((BAD, GOOD)[label], k=2)]
        dice.shuffle(words)
        rows.append({"sentence": " ".join(words), "label": 1 - label if dice.random() < wrong else label})
    return rows


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that tells good from bad reviews."""
    folder = tmp_path_factory.mktemp("classifier")
    samples.write(folder / "data" / "train.jsonl", reviews(200, 0))
    samples.write(folder / "data" / "validation.jsonl", reviews(120, 1, wrong=0.1))
    settings = [
        *samples.tiny("bert", folder / "data"), f"output={folder / 'run'}", "optimisation.steps=60",
        "optimisation.batch_size=16", "optimisation.learning_rate=1e-2", "evaluation.batch_size=32",
        "logging.tensorboard=false",
    ]  # fmt: skip
    train.train(config.resolve("glue", variants=["sst2"], overrides=settings))
    return folder / "run"


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BART that has begun to write headlines."""
    folder = tmp_path_factory.mktemp("writer")
    size = samples.TINY_BART.replace("16", "32")
    settings = [
        f"model.settings={size}", "model.vocabulary=500", f"output={folder / 'run'}", "optimisation.steps=80",
        "optimisation.learning_rate=1e-2", "optimisation.warmup=5", "evaluation.every=0", "evaluation.before=false",
        "evaluation.batch_size=20", "evaluation.resamples=10", "data.limit={train: 600, validation: 40, test: 40}",
        "generation.num_beams=2", "generation.max_length=16", "logging.anatomy_steps=0", "logging.tensorboard=false",
    ]  # fmt: skip
    train.train(config.resolve("quickstart", overrides=settings))
    return folder / "run"
