"""Small files with the columns of a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from seqreg.workbench.config.cards import Card
from seqreg.workbench.data.synthetic_news import stories

TINY_BART = (
    "{d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_attention_heads: 2, decoder_attention_heads: 2, "
    "encoder_ffn_dim: 16, decoder_ffn_dim: 16}"
)
TINY_BERT = "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}"


def rows(card: Card, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows as the hub would give them: the first name of every column, labels as numbers."""
    found = []
    for index, story in enumerate(stories(count, seed)):
        row: dict[str, Any] = {_first(card.columns.source): story["document"]}
        if card.columns.second is not None:
            row[_first(card.columns.second)] = story["summary"]
        if card.columns.target is not None:
            row[_first(card.columns.target)] = story["summary"]
        if card.kind == "token_classification":
            words = story["document"].split()
            row = {_first(card.columns.source): words, _first(card.columns.label or "tags"): _tags(card, words)}
        elif card.columns.label is not None:
            row[_first(card.columns.label)] = index % len(card.labels) if card.labels else index % 6 + 0.5
        found.append(row)
    return found


def _tags(card: Card, words: list[str]) -> list[str]:
    """Tags that a model can learn: of numbers and of words that are spelt with a capital."""
    names = [label for label in card.labels or () if label != "O"]
    return [names[0] if word[0].isupper() else names[-1] if word[0].isdigit() else "O" for word in words]


def _first(names: str | list[str]) -> str:
    return names if isinstance(names, str) else names[0]


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return path


def own_text(path: Path) -> Path:
    """A file that every recipe for people's own text can be trained on."""
    texts = {name: f"{name} of" for name in ("text", "summary", "translation", "sentence1", "sentence2")}
    found = [{name: f"{text} {n}" for name, text in texts.items()} for n in range(9)]
    labels = [{"label": n % 2, "tokens": ["a", f"b{n}"], "tags": ["O", "B-X"]} for n in range(9)]
    return write(path / "mine.jsonl", [{**row, **label} for row, label in zip(found, labels, strict=True)])


def folder(path: Path, card: Card, train: int = 12, held: int = 4) -> Path:
    """A folder with a file for every split of a card."""
    for index, name in enumerate(dict.fromkeys(["train", "validation", *card.splits])):
        write(path / f"{name}.jsonl", rows(card, train if name == "train" else held, seed=index))
    return path


def tiny(architecture: str, path: Path) -> list[str]:
    """Settings that make any recipe a matter of moments."""
    size = TINY_BART if architecture in ("bart", "pegasus") else TINY_BERT
    return [
        "model.name=null", "model.lora=null", f"model.architecture={architecture}", f"model.settings={size}",
        "model.vocab_size=320", f"data.path={path}", "data.dataloader_num_workers=0", "data.max_source_length=24",
        "data.max_target_length=8", "generation.max_length=8",
        "generation.min_length=0", "optimisation.max_steps=1", "optimisation.warmup_steps=0",
        "optimisation.per_device_train_batch_size=2", "optimisation.gradient_accumulation_steps=1",
        "evaluation.per_device_eval_batch_size=4", "evaluation.resamples=10", "evaluation.eval_steps=0",
        "evaluation.eval_before_training=false",
        "checkpoints.save_steps=0",
        "logging.diagnostics_steps=0", "logging.logging_steps=1",
    ]  # fmt: skip


def accept_model(folder: Path) -> None:
    """Let a run forget what its model was, so that a changed one is scored."""
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "files": {}}))
