"""Tasks that are a word in a text, a small pretrained model, and what it takes to train it in moments."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from seqreg.cli import main as cli
from seqreg.errors import BadInput
from seqreg.workbench.data.tokenizers import train_tokenizer

WORDS = "the a of and to in that is was he for it with as his on be at by had not are but from".split()
CLUES = {"colour": ["red", "blue"], "size": ["big", "small"], "place": ["home", "sea", "town"]}
"""Tasks, and the words that give their labels away; every text has one of each."""
SHORT = [
    "data.max_source_length=24", "data.dataloader_num_workers=0", "optimisation.max_steps=3",
    "optimisation.warmup_steps=0",
    "optimisation.per_device_train_batch_size=8",
    "optimisation.max_grad_norm=1.0", "optimisation.learning_rate=1e-3", "evaluation.per_device_eval_batch_size=32",
    "evaluation.resamples=50", "evaluation.eval_before_training=false",
    "logging.tensorboard=false", "logging.diagnostics_steps=0",
]  # fmt: skip


@dataclass
class Said:
    """What a command printed; of one that was refused, the line in place of what it says on the way."""

    stdout: str
    stderr: str


def seqreg(*words: str | Path, cwd: Path, code: int = 0, app: Any = cli.app) -> Said:
    """Run the command in this process, which saves the seconds of a new one."""
    results, notes = io.StringIO(), io.StringIO()
    with _inside(cwd), contextlib.redirect_stdout(results), contextlib.redirect_stderr(notes):
        if code == 2:
            with pytest.raises(BadInput) as caught:
                app([str(word) for word in words], standalone_mode=False)
            assert len(caught.value.lines) == 1
            return Said(results.getvalue(), str(caught.value))
        app([str(word) for word in words], standalone_mode=False)
    return Said(results.getvalue(), notes.getvalue())


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    kept = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(kept)


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    rng, found = random.Random(seed), []
    for _ in range(count):
        clues = {task: rng.choice(words) for task, words in CLUES.items()}
        words = rng.choices(WORDS, k=5) + list(clues.values())
        rng.shuffle(words)
        found.append({"text": " ".join(words), **clues})
    return found


def task(folder: Path, name: str, train: int = 240, test: int = 80, seed: int = 0) -> Path:
    """The card of a task, with its data in the folder of the same name; returns the card."""
    data = folder / name
    data.mkdir(parents=True, exist_ok=True)
    for part, size in (("train", train), ("validation", 40), ("test", test)):
        rows = [{"text": row["text"], "label": row[name]} for row in texts(size, seed + len(part))]
        (data / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = folder / f"{name}.yaml"
    labels = ", ".join(CLUES[name])
    card.write_text(
        f"title: {name}\nkind: classification\ncolumns: {{source: text, label: label}}\nlabels: [{labels}]\n"
        "lengths: {source: 24}\nrule: made here\nmetric: [accuracy]\n"
    )
    return card


def bert(folder: Path, seed: int = 0) -> Path:
    """A BERT of two layers that has seen nothing, with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer([row["text"] for row in texts(300, 5)], 400)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=40, pad_token_id=tokenizer.pad_token_id, initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def plan(folder: Path, *names: str, **further: list[str]) -> Path:
    """A plan of a chain over tasks; `further` are settings of one step."""
    bert(folder / "bert")
    steps = []
    for name in names:
        card = task(folder, name)
        settings = [f"task={card}", f"data.path={folder / name}", *SHORT, *further.get(name, [])]
        steps.append({"recipe": "glue", "name": name, "settings": settings})
    path = folder / "plan.yaml"
    path.write_text(json.dumps({"settings": [f"model.name={folder / 'bert'}"], "steps": steps}))
    return path
