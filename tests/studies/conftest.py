"""Tiny models that have learnt something, for studies of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from seqreg.workbench.config import run_config
from seqreg.workbench.run import train
from tests.helpers import sample_files

GOOD, BAD = "good fine lovely bright warm".split(), "bad awful dull grim cold".split()
SAYINGS = "this was a bad one", "this was a good one"
OTHER = "the film story was is a very quite and plot actor scene in on with today".split()


def reviews(count: int, seed: int, wrong: float = 0.0) -> list[dict[str, Any]]:
    """Sentences with two words that tell their label; a share of the labels is wrong."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        label = rng.randrange(2)
        words = [*rng.choices(OTHER, k=rng.randint(3, 7)), *rng.choices((BAD, GOOD)[label], k=2)]
        rng.shuffle(words)
        rows.append({"sentence": " ".join(words), "label": 1 - label if rng.random() < wrong else label})
    return rows


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that tells good from bad reviews."""
    folder = tmp_path_factory.mktemp("classifier")
    sample_files.write(folder / "data" / "train.jsonl", reviews(200, 0))
    sample_files.write(folder / "data" / "validation.jsonl", reviews(120, 1, wrong=0.1))
    settings = [
        *sample_files.tiny("bert", folder / "data"), f"output={folder / 'run'}", "optimisation.max_steps=60",
        "optimisation.per_device_train_batch_size=16", "optimisation.learning_rate=1e-2",
        "evaluation.per_device_eval_batch_size=32",
        "logging.tensorboard=false",
    ]  # fmt: skip
    train.train(run_config.resolve("glue", variants=["sst2"], overrides=settings))
    return folder / "run"


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BART that says in a sentence what a review says."""
    folder = tmp_path_factory.mktemp("writer")
    for name, count, seed in (("train", 300, 0), ("validation", 40, 1), ("test", 40, 2)):
        rows = [{"source": row["sentence"], "target": SAYINGS[row["label"]]} for row in reviews(count, seed, wrong=0.1)]
        sample_files.write(folder / "data" / f"{name}.jsonl", rows)
    settings = [
        "task=text_pairs", *sample_files.tiny("bart", folder / "data"), f"output={folder / 'run'}",
        "optimisation.max_steps=80",
        "optimisation.per_device_train_batch_size=16", "optimisation.learning_rate=1e-2",
        "evaluation.per_device_eval_batch_size=20",
        "data.max_target_length=20", "generation.num_beams=2", "generation.max_length=20",
        "evaluation.eval_before_training=false",
        "logging.tensorboard=false", "logging.logging_steps=20", "loss.label_smoothing=0",
        "model.settings.init_std=0.15",
        "model.settings.dropout=0", "model.vocab_size=400",
    ]  # fmt: skip
    train.train(run_config.resolve("quickstart", overrides=settings))
    return folder / "run"
