"""Every script in examples/ runs, on tiny models, and its loss falls."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_models, tiny_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
MODELS = {
    "accelerate_loop": "bart", "attach_trainer": "roberta", "own_head": "roberta", "own_model": "", "own_term": "bart",
    "sentence_pairs": "bert", "sft_lora": "llama", "training_loop": "bart",
}  # fmt: skip


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MODELS)
def test_an_example_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "sft_lora":
        pytest.importorskip("trl", reason="trl is not installed: pip install trl runs this example")
    folder, model = str(tmp_path / "model"), MODELS[name]
    if model:
        words = re.findall(r"\w+", (EXAMPLES / f"{name}.py").read_text().lower())
        tokenizer = tiny_tokenizer.tokenizer(words)
        tokenizer.save_pretrained(folder)
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
        extra = {"num_labels": 2} if model == "roberta" else {}
        tiny_models.make(model, spread=2.0, **sizes, **extra).save_pretrained(folder)
    losses = loaded(name).main(*([folder] if model else []), 25)
    assert len(losses) == 25
    assert sum(losses[-5:]) < sum(losses[:5])
    assert len(capsys.readouterr().out) > 0


def test_every_example_is_run_and_listed() -> None:
    text = (EXAMPLES.parent / "docs" / "library.md").read_text()
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(MODELS)
    assert [name for name in MODELS if f"examples/{name}.py" not in text] == []
