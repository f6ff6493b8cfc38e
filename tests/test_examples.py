"""Every script in examples/ runs, on tiny models, and its loss falls."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seqreg.build import build_term
from seqreg.integrations import strict_yaml
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models, tiny_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
MODELS = {
    "accelerate_loop": "bart", "attach_trainer": "roberta", "own_head": "roberta", "own_model": "", "own_term": "bart",
    "sentence_pairs": "bert", "sft_lora": "llama", "training_loop": "bart",
}  # fmt: skip
RANKS = "accelerate_fsdp2"
"""The example that torchrun starts."""
PLUGIN = "axolotl_plugin"
"""A class without a script: tests/test_axolotl_example.py."""


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_model(example: str, model: str, folder: str) -> None:
    """A tiny model with the words of an example."""
    words = re.findall(r"\w+", (EXAMPLES / f"{example}.py").read_text().lower())
    tokenizer = tiny_tokenizer.tokenizer(words)
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    extra = {"num_labels": 2} if model == "roberta" else {}
    tiny_models.make(model, spread=2.0, **sizes, **extra).save_pretrained(folder)


@pytest.mark.parametrize("name", MODELS)
def test_an_example_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "sft_lora":
        pytest.importorskip("trl", reason="trl is not installed: pip install trl runs this example")
    folder, model = str(tmp_path / "model"), MODELS[name]
    if model:
        save_model(name, model, folder)
    losses = loaded(name).main(*([folder] if model else []), 25)
    assert len(losses) == 25
    assert sum(losses[-5:]) < sum(losses[:5])
    assert len(capsys.readouterr().out) > 0


def test_the_example_on_several_ranks_runs(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    save_model(RANKS, "bart", folder)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / f"{RANKS}.py"), folder]
    done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    steps = re.findall(r"step (\d): ([\d.]+)", done.stdout)
    assert [step for step, _ in steps] == ["0", "1", "2"]  # two ranks share four rows, two in a step each
    assert float(steps[-1][1]) < float(steps[0][1])


def test_the_fairseq_example_gives_fairseq_what_the_plug_in_reads(tmp_path: Path) -> None:
    """With a stand-in for fairseq-train, which writes its arguments; tests/fairseq has the real one."""
    stand_in, written = tmp_path / "fairseq-train", tmp_path / "arguments"
    stand_in.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {written}\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", str(EXAMPLES / "fairseq_train.sh"), "data-bin", "--arch", "bart_base"]
    subprocess.run(command, check=True, env={**os.environ, "PATH": path}, cwd=tmp_path)
    words = written.read_text().splitlines()
    assert words[:3] == ["data-bin", "--arch", "bart_base"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert (Path(flags["--user-dir"]) / "criterions.py").is_file()
    assert flags["--criterion"] == "seqreg"
    (name, settings), *others = strict_yaml.parse(flags["--seqreg-terms"], "flag")["terms"].items()
    assert build_term(name, settings) == R3F(weight=0.1, scale=0.1, relative=True, dropout="shared")
    assert others == []


def test_every_example_is_run_and_listed() -> None:
    text = (EXAMPLES.parent / "docs" / "library.md").read_text()
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted([*MODELS, RANKS, PLUGIN])
    scripts = [*(f"{name}.py" for name in (*MODELS, RANKS, PLUGIN)), "fairseq_train.sh"]
    assert [name for name in scripts if f"examples/{name}" not in text] == []
