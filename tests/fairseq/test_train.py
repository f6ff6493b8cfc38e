"""fairseq's own commands with --user-dir: training, resuming, generating, hydra."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from seqreg.integrations.fairseq_plugin import fold_checkpoint
from tests.helpers import tiny_fairseq

TERMS = {
    "r3f": "{weight: 0.1, scale: 1e-2}",
    "smart": "{weight: 0.5}",
    "rdrop": "{weight: 0.5}",
}
SEQREG = ["--user-dir", str(tiny_fairseq.PLUGIN), "--criterion", "seqreg", "--label-smoothing", "0.1"]
LOGGED = "--log-format json --log-interval 1".split()
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONPATH": str(tiny_fairseq.ROOT)}
SAVED = "--no-epoch-checkpoints --seed 1".split()


def run(command: str, *arguments: str, cwd: Path | None = None, code: int = 0) -> str:
    """The output of one of fairseq's commands."""
    path = Path(sys.executable).with_name(command)
    result = subprocess.run(
        [str(path), *arguments], cwd=cwd, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    assert result.returncode == code, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr


def logged(output: str, name: str) -> list[dict[str, Any]]:
    """What was logged at the end of every epoch, by fairseq or by hydra."""
    return [json.loads(line) for line in re.findall(rf"(?:INFO \| {name} \||\[{name}\]\[INFO\] -) (\{{.*\}})", output)]


def train(data: Path, folder: Path, *flags: str, updates: int = 40) -> str:
    return run(
        "fairseq-train", str(data), *flags, *LOGGED, *SAVED, "--save-dir", str(folder), "--max-update", str(updates)
    )


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=False)["model"]


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("arch", ["transformer", "bart"])
def test_training(pairs: Path, tmp_path: Path, arch: str, term: str) -> None:
    """Perplexity falls, and every part of the loss is logged by name."""
    (tmp_path / "terms.yaml").write_text(f"terms: {{{term}: {TERMS[term]}}}\n")
    flags = {"transformer": tiny_fairseq.TRANSFORMER, "bart": tiny_fairseq.BART}[arch]
    output = train(pairs, tmp_path / "out", *flags, *SEQREG, "--seqreg-terms", str(tmp_path / "terms.yaml"))
    valid = [float(epoch["valid_ppl"]) for epoch in logged(output, "valid")]
    assert len(valid) >= 2
    assert valid[-1] < 0.9 * valid[0]
    epoch = logged(output, "train")[-1]
    parts = [float(value) for key, value in epoch.items() if key.startswith("train_part/")]
    assert len(parts) == 2
    assert float(epoch[f"train_value/{term}"]) > 0
    assert sum(parts) == pytest.approx(float(epoch["train_loss"]), abs=2e-3)
    assert not [key for key in logged(output, "valid")[-1] if "part/" in key]


def test_the_example_trains(pairs: Path, tmp_path: Path) -> None:
    flags = [*tiny_fairseq.TRANSFORMER, *LOGGED, *SAVED, "--save-dir", str(tmp_path / "out"), "--max-update", "9"]
    stand_in = tmp_path / "bin" / "seqreg"  # the command line needs more than is in this environment
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!/bin/sh\necho {tiny_fairseq.PLUGIN}\n")
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **ENVIRONMENT, "PATH": path}
    command = ["bash", str(tiny_fairseq.ROOT / "examples" / "fairseq_train.sh"), str(pairs), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    epoch = logged(result.stdout + result.stderr, "train")[-1]
    assert float(epoch["train_value/r3f"]) > 0


def test_resume_and_generate(pairs: Path, tmp_path: Path) -> None:
    """A resumed run goes on where it was, as does a term that remembers; and generation needs no plug-in.

    fairseq's own runs are not bit-identical after a resume, so that this one cannot be either.
    """
    terms = "{terms: {r3f: {scale: 1e-2}, bregman: {}}}"
    flags = [*tiny_fairseq.TRANSFORMER, *SEQREG, "--seqreg-terms", terms]
    first = train(pairs, tmp_path / "half", *flags, updates=9)
    before = torch.load(tmp_path / "half" / "checkpoint_last.pt", weights_only=False)["criterion"][
        "memory._extra_state"
    ]
    second = train(pairs, tmp_path / "half", *flags, updates=16)
    assert re.search(r"Loaded checkpoint .*@ 9 updates", second)
    after = torch.load(tmp_path / "half" / "checkpoint_last.pt", weights_only=False)["criterion"]["memory._extra_state"]
    assert (before["bregman/updates"], after["bregman/updates"]) == (8, 15)  # once a step, but for the first
    starts, ends = (float(logged(output, "valid")[-1]["valid_ppl"]) for output in (first, second))
    assert ends < starts
    for more in (["--user-dir", str(tiny_fairseq.PLUGIN)], []):
        generated = run(
            "fairseq-generate", str(pairs), "--path", str(tmp_path / "half" / "checkpoint_last.pt"), "--cpu",
            "--required-batch-size-multiple", "1", "--num-workers", "0", *more,
        )  # fmt: skip
        assert len(re.findall(r"^H-\d+", generated, re.M)) == 8


def test_a_term_that_remembers_begins_from_any_checkpoint(pairs: Path, tmp_path: Path) -> None:
    """Of a training without it, and of a released model, whose file has no place for a criterion."""
    train(pairs, tmp_path / "plain", *tiny_fairseq.TRANSFORMER, *SEQREG, updates=2)
    plain = tmp_path / "plain" / "checkpoint_last.pt"
    state = torch.load(plain, weights_only=False)
    assert state.pop("criterion") is None
    torch.save(state, tmp_path / "released.pt")
    fresh = "--reset-optimizer --reset-dataloader --reset-meters --reset-lr-scheduler".split()
    for path in (plain, tmp_path / "released.pt"):
        flags = [
            *tiny_fairseq.TRANSFORMER,
            *SEQREG,
            "--seqreg-terms",
            "{terms: {bregman: {}}}",
            "--restore-file",
            str(path),
        ]
        output = train(pairs, tmp_path / path.stem, *flags, *fresh, updates=3)
        assert f"Loaded checkpoint {path}" in output
        assert "train_part/bregman" in output
    other = [
        *tiny_fairseq.TRANSFORMER,
        *SEQREG,
        "--seqreg-terms",
        "{terms: {jachess: {}}}",
        *LOGGED,
        "--max-update",
        "5",
    ]
    folder = ["--save-dir", str(tmp_path / "released")]
    output = run("fairseq-train", str(pairs), *other, *folder, code=2)
    assert "seqreg: the saved state is of a term 'bregman' that this criterion does not have" in output.splitlines()


def test_hydra(pairs: Path, tmp_path: Path) -> None:
    """The same from YAML; a relative path counts from where the command was given."""
    (tmp_path / "terms.yaml").write_text("terms: {r3f: {weight: 0.1, scale: 1e-2}}\n")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(f"""
common: {{user_dir: {tiny_fairseq.PLUGIN}, cpu: true, log_format: json, log_interval: 1, seed: 1}}
task: {{_name: translation, data: {pairs}, source_lang: src, target_lang: tgt}}
criterion: {{_name: seqreg, label_smoothing: 0.1, seqreg_terms: terms.yaml}}
model:
  _name: transformer
  share_all_embeddings: true
  encoder: {{embed_dim: 16, ffn_embed_dim: 32, layers: 1, attention_heads: 2}}
  decoder: {{embed_dim: 16, ffn_embed_dim: 32, layers: 1, attention_heads: 2}}
dataset: {{max_tokens: 256, num_workers: 0, required_batch_size_multiple: 1}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
optimization: {{lr: [0.003], max_update: 20}}
checkpoint: {{save_dir: {tmp_path / "out"}, no_epoch_checkpoints: true}}
""")
    output = run("fairseq-hydra-train", "--config-dir", "conf", "--config-name", "mine", cwd=tmp_path)
    epochs = logged(output, "train")
    assert float(epochs[-1]["train_part/r3f"]) > 0
    assert float(epochs[-1]["train_loss"]) < float(epochs[0]["train_loss"])
    assert (tmp_path / "out" / "checkpoint_last.pt").exists()


def test_a_misspelt_term_is_one_line_and_exit_code_2(pairs: Path, tmp_path: Path) -> None:
    (tmp_path / "terms.yaml").write_text("terms: {r3f: {wieght: 0.1}}\n")
    output = run(
        "fairseq-train", str(pairs), *tiny_fairseq.TRANSFORMER, *SEQREG, "--seqreg-terms", str(tmp_path / "terms.yaml"),
        "--save-dir", str(tmp_path / "out"), code=2,
    )  # fmt: skip
    assert "Traceback" not in output
    expected = (
        f"seqreg: {tmp_path}/terms.yaml: terms.r3f.wieght=0.1: R3F: unknown setting 'wieght'; did you mean 'weight'?"
    )
    assert expected in output.splitlines()


def test_r4f_can_be_resumed_validated_and_folded(classes: Path, tmp_path: Path) -> None:
    """What fairseq's own --spectral-norm-classification-head cannot."""
    terms = ["--seqreg-terms", "{terms: {r3f: {weight: 1.0, scale: 1e-2}}}"]
    criterion = ["--user-dir", str(tiny_fairseq.PLUGIN), "--criterion", "seqreg_sentence_prediction"]
    flags = [*tiny_fairseq.HEADED, "--arch", "r4f_roberta_base", *criterion, *terms]
    train(classes, tmp_path / "out", *flags, updates=12)
    output = train(classes, tmp_path / "out", *flags, updates=24)
    assert re.search(r"Loaded checkpoint .*@ 12 updates", output)
    last = tmp_path / "out" / "checkpoint_last.pt"
    assert sum(name.endswith("weight.original") for name in weights(last)) == 2
    valid = [
        "--task",
        "sentence_prediction",
        "--num-classes",
        "2",
        "--init-token",
        "0",
        *LOGGED,
        "--cpu",
        "--batch-size",
        "8",
    ]
    valid += ["--required-batch-size-multiple", "1", "--num-workers", "0", "--valid-subset", "valid"]
    ours = run("fairseq-validate", str(classes), "--path", str(last), *valid, *criterion)
    fold_checkpoint(last, tmp_path / "plain.pt")
    plain = weights(tmp_path / "plain.pt")
    for layer in ("dense", "out_proj"):
        weight = plain[f"classification_heads.sentence_classification_head.{layer}.weight"]
        assert torch.linalg.matrix_norm(weight, 2) == pytest.approx(1, abs=0.02)
    theirs = run(
        "fairseq-validate",
        str(classes),
        "--path",
        str(tmp_path / "plain.pt"),
        *valid,
        "--criterion",
        "sentence_prediction",
    )
    assert logged(ours, "valid")[-1]["valid_loss"] == logged(theirs, "valid")[-1]["valid_loss"]
