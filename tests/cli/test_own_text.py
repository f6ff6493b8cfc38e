"""The recipes for people's own text: from a file to a model that was scored before and after."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from seqreg.errors import BadInput
from seqreg.workbench.config import run_config
from tests.helpers import sample_files
from tests.helpers.tiny_tasks import WORDS, seqreg

RNG = random.Random(0)
TINY = {
    "bart": "{d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_ffn_dim: 16, decoder_ffn_dim: 16}",
    "roberta": "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}",
}
STEPS = ["optimisation.max_steps=2", "evaluation.eval_steps=1", "evaluation.resamples=20", "data.limit.test=4"]


def text(words: int = 5) -> str:
    return " ".join(RNG.choices(WORDS, k=words))


FILES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "summarize": ("bart", [{"Inhalt": text(12), "Kurz": text(4)} for _ in range(40)]),
    "translate": ("bart", [{"original": text(6), "translation": text(6)} for _ in range(40)]),
    "classify": ("roberta", [{"id": n, "post": text(8), "mood": ["good", "bad"][n % 2]} for n in range(40)]),
    "pairs": ("roberta", [{"a": text(8), "b": text(8), "same": n % 2} for n in range(40)]),
    "tag": ("roberta", [{"words": text(3).split(), "tags": ["O", "B-PER", "I-PER"]} for _ in range(40)]),
}
"""A model, and a file without any usual name of a column where the recipe can do without."""


@pytest.mark.parametrize("recipe", FILES)
def test_a_recipe_needs_a_file_and_a_model(recipe: str, tmp_path: Path) -> None:
    architecture, rows = FILES[recipe]
    sample_files.write(tmp_path / "mine.jsonl", rows)
    words = [
        "data.path=mine.jsonl",
        f"model.architecture={architecture}",
        f"model.settings={TINY[architecture]}",
        *STEPS,
    ]
    said = seqreg("train", recipe, *words, "logging.tensorboard=false", "--json", cwd=tmp_path)
    scores = json.loads(said.stdout)["scores"]
    assert list(scores) == ["before", "validation", "test"]
    assert said.stderr.startswith("No GPU was found, so that by default this recipe takes a small model, ")
    folder = tmp_path / f"runs/{recipe}-mine/baseline"
    run = run_config.load(folder)  # whose card is complete
    assert (run.card.title, run.card.from_file) == ("mine", False)
    assert "| before training |" in (folder / "README.md").read_text()


def test_with_a_gpu_the_recipe_is_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sample_files.write(tmp_path / "mine.jsonl", FILES["summarize"][1])
    here = run_config.resolve("summarize", overrides=[f"data.path={path}"])
    assert (here.config.model.name, here.config.optimisation.max_steps) == ("google/flan-t5-small", 100)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    there = run_config.resolve("summarize", overrides=[f"data.path={path}"])
    assert (there.config.model.name, there.config.optimisation.num_train_epochs) == ("facebook/bart-base", 3)
    assert "the recipe as it is" in there.machine
    chosen = run_config.resolve("summarize", overrides=[f"data.path={path}", "model.name=mine"])
    assert chosen.config.model.name == "mine"


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("summarize", [], "which file has your text? Give data.path=FILE"),
        ("summarize", ["data.path=gone.csv"], "gone.csv: cannot be read: No such file"),
        ("classify", ["data.path=mine.jsonl"], "what is to be predicted? Give data.columns.label=NAME, one of x, y, z"),
        (
            "summarize",
            ["data.path=mine.jsonl"],
            "what is to be predicted? Give data.columns.target=NAME, one of x, y, z",
        ),
        ("summarize", ["data.path=mine.jsonl", "data.columns.target=w"], "there is no column 'w'"),
    ],
)
def test_what_a_file_does_not_tell_is_asked_in_one_line(
    recipe: str, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_files.write(tmp_path / "mine.jsonl", [{"x": text(), "y": text(), "z": text()} for _ in range(30)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as caught:
        run_config.resolve(recipe, overrides=words)
    assert message in str(caught.value)
    assert len(caught.value.lines) == 1
