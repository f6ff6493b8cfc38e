"""Controls of the bench: effects that are known must be found, and a term that does nothing must change nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers.tiny_tasks import CLUES, SHORT, bert, seqreg, texts

pytestmark = pytest.mark.slow
LABELS = ("first", "second")
NO_DROPOUT = 'model.settings={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}'


def examples(skill: str, count: int, seed: int, wrong: float = 0.0) -> list[dict[str, str]]:
    """Texts that begin with the name of a skill; the label is the place of the skill's word among its two.

    Args:
        wrong: the share of labels that are those of the other class
    """
    rng = random.Random(seed)
    rows = []
    for row in texts(count, seed):
        label = CLUES[skill].index(row[skill]) ^ (rng.random() < wrong)
        rows.append({"text": f"{skill} {row['text']}", "label": LABELS[label]})
    return rows


def write(folder: Path, train: list[dict[str, str]], skill: str) -> Path:
    """A dataset with these training examples, and clean ones of a skill to test."""
    folder.mkdir(parents=True)
    parts = {"train": train, "validation": examples(skill, 100, 1), "test": examples(skill, 400, 2)}
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = folder.parent / "skill.yaml"
    card.write_text(
        "title: a skill\nkind: classification\ncolumns: {source: text, label: label}\n"
        f"labels: [{', '.join(LABELS)}]\nlengths: {{source: 24}}\nrule: made here\nmetric: [accuracy]\n"
    )
    return folder


def train(data: Path, model: Path, output: Path, steps: int, *settings: str) -> dict[str, Any]:
    """Train a model on a dataset; the content of its metrics.json."""
    common = [
        f"task={data.parent / 'skill.yaml'}", f"data.path={data}", f"model.name={model}", *SHORT,
        f"optimisation.max_steps={steps}", "evaluation.drift_examples=0", "seed=1",
    ]  # fmt: skip
    seqreg("train", "glue", *common, *settings, f"output={output}", cwd=output.parent)
    return dict(json.loads((output / "metrics.json").read_text()))


def test_label_smoothing_lowers_the_nll_of_a_model_that_overfits(tmp_path: Path) -> None:
    """A model that has learnt wrong labels by heart is sure of what is wrong; smoothing makes it less sure."""
    data, model = write(tmp_path / "noisy", examples("colour", 80, 0, wrong=0.3), "colour"), bert(tmp_path / "bert")
    plain = train(data, model, tmp_path / "plain", 600, NO_DROPOUT)
    smoothed = train(data, model, tmp_path / "smoothed", 600, NO_DROPOUT, "loss.label_smoothing=0.1")
    assert plain["train"]["last_nll"] < 0.1  # learnt by heart
    assert smoothed["scores"]["test"]["nll"] < 0.8 * plain["scores"]["test"]["nll"]


@pytest.mark.parametrize("term", ["r3f", "vat", "smart", "sift", "jachess", "freelb", "anchor"])
def test_a_term_of_no_weight_changes_nothing(term: str, tmp_path: Path) -> None:
    """Weights after 30 steps without dropout, whose masks a term would shift, agree within the rounding of float32."""
    data, model = write(tmp_path / "data", examples("colour", 240, 0), "colour"), bert(tmp_path / "bert")
    train(data, model, tmp_path / "plain", 30, NO_DROPOUT)
    train(data, model, tmp_path / "term", 30, NO_DROPOUT, f"terms.{term}={{weight: 1e-9}}")
    plain, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "term"))
    assert plain.keys() == other.keys()
    for name, weight in plain.items():
        assert (weight - other[name]).abs().max() < 1e-4, name
    start = load_file(model / "model.safetensors")
    moved = [(plain[f"bert.{name}"] - weight).abs().max() for name, weight in start.items() if f"bert.{name}" in plain]
    assert max(moved) > 0.01  # a hundred times as far


def test_replay_keeps_a_skill_that_training_without_it_erases(tmp_path: Path) -> None:
    """A tenth of old examples among the new ones keeps what is lost without them."""
    old = write(tmp_path / "old", examples("colour", 480, 0), "colour")
    learnt = train(old, bert(tmp_path / "bert"), tmp_path / "start", 300)
    assert learnt["scores"]["test"]["accuracy"] > 95
    after = {}
    for name, replayed in (("none", 0), ("tenth", 48)):
        rows = examples("size", 480 - replayed, 3) + examples("colour", replayed, 4)
        random.Random(0).shuffle(rows)
        new = write(tmp_path / name, rows, "size")
        also = f"data.also={{{old.parent / 'skill.yaml'}: {old}}}"
        scores = train(new, tmp_path / "start", tmp_path / f"after-{name}", 300, "model.new_head=false", also)["scores"]
        assert scores["test"]["accuracy"] > 95
        (retained,) = [scores[split]["accuracy"] for split in scores if split not in ("validation", "test", "before")]
        after[name] = retained
    assert after["tenth"] > after["none"] + 20
