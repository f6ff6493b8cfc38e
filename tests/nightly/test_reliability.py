"""The promises of docs/reliability.md about checkpoints: each fault is injected for real into a real training."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers.trainer_pt_utils import safe_globals

from seqreg.build import term_names
from seqreg.workbench.config import cards
from seqreg.workbench.run import checkpoints, run_directory
from tests import faults
from tests.helpers import forked_process, sample_files
from tests.helpers.interrupted_runs import SETTINGS, TERMS, TIMES, history, killed_at, log, metrics, same

# Resuming


@pytest.mark.slow
def test_kills_at_random_instants_lose_nothing(tmp_path: Path) -> None:
    tally = faults.run(6, seed=20, folder=tmp_path)
    assert (tally.kills, tally.same, tally.lost) == (6, 6, 0)


def test_the_command_again_resumes_to_identical_weights(copy: Path, whole: Path) -> None:
    assert same(copy, "checkpoints.save_total_limit=9").wait() == 0, log(copy)
    assert f"resumes from {copy / 'checkpoint-6'}" in log(copy)
    assert forked_process.weights(copy) == forked_process.weights(whole)


def test_checkpoints_by_the_clock_go_when_the_run_is_finished(tmp_path: Path, whole: Path) -> None:
    settings = [word for word in SETTINGS if "checkpoints" not in word] + ["checkpoints.save_minutes=0.00001"]
    folder = killed_at(tmp_path / "run", 3, *settings)
    assert forked_process.train(folder, *settings, terms=TERMS).wait() == 0, log(folder)
    assert f"resumes from {folder / 'checkpoint-'}" in log(folder)
    assert forked_process.weights(folder) == forked_process.weights(whole)
    assert not list(folder.glob("*checkpoint-*"))


KINDS = {
    "every term": ((*(name for name in term_names() if name != "jachess"),), ["data.dataloader_num_workers=2"]),
    "adafactor, groups, workers": (
        ("jachess", "uegr"),
        ["optimisation.optim=adafactor", "data.group_by_length=true", "data.dataloader_num_workers=2"],
    ),
    "epochs, bf16": (
        ("bregman", "neftune"),
        ["optimisation.max_steps=null", "optimisation.num_train_epochs=2", "optimisation.precision=bf16",
     "optimisation.per_device_train_batch_size=6",
         "optimisation.gradient_accumulation_steps=1"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_training_resumes_to_identical_weights(kind: str, tmp_path: Path) -> None:
    """Killed at the fourth step; with `epochs` that is where the second epoch begins."""
    terms, further = KINDS[kind]
    settings = [
        "optimisation.max_steps=7", "optimisation.gradient_accumulation_steps=3", "optimisation.learning_rate=1e-2",
        "evaluation.eval_steps=3",
        "checkpoints.save_steps=4", "logging.diagnostics_steps=2", "terms.bregman.switch=2", *further,
    ]  # fmt: skip
    settings = [word for word in settings if "bregman" not in word or "bregman" in terms]
    whole = forked_process.train(tmp_path / "whole", *settings, terms=terms)
    assert whole.wait() == 0, whole.text()
    folder = killed_at(tmp_path / "run", 4, *settings, terms=terms)
    assert forked_process.train(folder, *settings, terms=terms).wait() == 0, log(folder)
    assert forked_process.weights(folder) == forked_process.weights(tmp_path / "whole")
    assert metrics(folder) == metrics(tmp_path / "whole")


def test_the_best_model_of_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    """With this seed the best score is that of step 4, at which no checkpoint is due."""
    card, _ = cards.load("glue/stsb")
    rows = sample_files.folder(tmp_path / "data", card, train=80, held=8)
    settings = [
        "glue", "--variant", "stsb", *sample_files.tiny("roberta", rows), "logging.tensorboard=false", "seed=14",
        "optimisation.max_steps=8", "optimisation.learning_rate=1e-2", "evaluation.eval_steps=2",
        "checkpoints.save_steps=8",
        "evaluation.load_best_model_at_end=true", "checkpoints.save_total_limit=1",
    ]  # fmt: skip
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert forked_process.command(whole, *settings, terms=("r4f",)).wait() == 0, log(whole)
    command = forked_process.command(folder, *settings, terms=("r4f",))
    assert command.until((folder / "checkpoint-4").exists), log(folder)
    command.kill()
    assert forked_process.command(folder, *settings, terms=("r4f",)).wait() == 0, log(folder)
    assert f"resumes from {folder / 'checkpoint-4'}" in log(folder)
    assert metrics(folder) == metrics(whole)
    assert forked_process.weights(folder) == forked_process.weights(whole)
    state = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())
    scores = {entry["step"]: entry["eval_score"] for entry in state["log_history"] if "eval_score" in entry}
    assert max(scores, key=lambda step: scores[step]) == state["best_global_step"] == 4
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}


# Checkpoints


def damage(folder: Path, how: str) -> None:
    if how == "truncated weights":
        os.truncate(folder / "model.safetensors", 20000)
    elif how == "truncated generators":
        os.truncate(folder / "rng_state.pth", 100)
    elif how == "no optimizer":
        (folder / "optimizer.pt").unlink()
    elif how == "no manifest":
        (folder / "manifest.json").unlink()
    elif how == "half a manifest":
        os.truncate(folder / "manifest.json", 300)
    elif how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        path = folder / how.removeprefix("one bit of ")
        found = bytearray(path.read_bytes())
        found[len(found) // 2] ^= 1
        path.write_bytes(found)


DAMAGES = [
    "truncated weights", "truncated generators", "no optimizer", "no manifest", "half a manifest", "empty",
    "one bit of model.safetensors", "one bit of optimizer.pt", "one bit of seqreg_terms.safetensors",
    "one bit of trainer_state.json",
]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    how: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_directory.RunRecord.read(copy)
    assert record is not None
    assert checkpoints.newest(copy, record.run) == copy / "checkpoint-6"
    damage(copy / "checkpoint-6", how)
    left = sorted(path.name for path in (copy / "checkpoint-6").iterdir())
    assert checkpoints.newest(copy, record.run) == copy / "checkpoint-4"
    assert f"{copy / 'checkpoint-6'} is passed over" in capsys.readouterr().err
    assert sorted(path.name for path in (copy / "checkpoint-6").iterdir()) == left


def test_no_flipped_bit_of_a_manifest_is_more_than_a_checkpoint_passed_over(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-3"
    with checkpoints.staged(final, {"run": "x", "step": 3}, True, lambda: None) as aside:
        for name in checkpoints.NEEDED:
            (aside / name).write_text(name)
    path = final / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in (0, 2, 5):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            found = checkpoints.manifest(final)
            good = found.get("run") == "x" and found["files"] == json.loads(whole)["files"]
            assert checkpoints.newest(tmp_path, "x") == (final if good else None)
    path.write_bytes(whole)
    assert checkpoints.newest(tmp_path, "x") == final


def test_a_run_goes_on_from_the_newest_that_verifies_and_deletes_no_other(copy: Path, whole: Path) -> None:
    damage(copy / "checkpoint-6", "one bit of model.safetensors")
    spoilt = (copy / "checkpoint-6" / "model.safetensors").read_bytes()
    torn = copy / ".tmp-checkpoint-7"
    torn.mkdir()
    assert same(copy, "checkpoints.save_total_limit=9").wait() == 0, log(copy)
    assert f"{copy / 'checkpoint-6'} is passed over: model.safetensors has changed" in log(copy)
    assert f"{torn} is left alone" in log(copy)
    assert f"resumes from {copy / 'checkpoint-4'}" in log(copy)
    assert forked_process.weights(copy) == forked_process.weights(whole)
    assert (copy / "spoilt-checkpoint-6-1" / "model.safetensors").read_bytes() == spoilt
    assert torn.exists()


def test_files_are_synced_and_sealed_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_sync, real_rename = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        real_sync(handle)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename {Path(target).name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    final = tmp_path / "checkpoint-3"
    with checkpoints.staged(final, {"run": "x"}, True, lambda: None) as aside:
        (aside / "a").write_text("a")
        (aside / "inner").mkdir()
        (aside / "inner" / "b").write_text("b")
        assert not final.exists()
    done = events.index("rename checkpoint-3")
    for name in ("a", "b", "inner", ".tmp-manifest.json", ".tmp-checkpoint-3"):
        assert f"sync {name}" in events[:done]
    assert f"sync {tmp_path.name}" in events[done:]
    with pytest.raises(RuntimeError), checkpoints.staged(tmp_path / "checkpoint-4", {}, True, lambda: None) as aside:
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]


def test_the_manifest_says_what_the_checkpoint_is_of(whole: Path) -> None:
    found = checkpoints.manifest(whole / "checkpoint-4")
    files = {path.name for path in (whole / "checkpoint-4").iterdir()} - {"manifest.json"}
    assert set(found["files"]) == files
    assert all(len(entry["sha256"]) == 64 and entry["size"] > 0 for entry in found["files"].values())
    assert (found["step"], found["world_size"]) == (4, 1)
    assert len(found["configuration"]) == len(found["data"]) == 64
    assert set(found["versions"]) == {"seqreg", "torch", "transformers", "python"}


def test_only_sealed_checkpoints_are_rotated_and_never_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        with checkpoints.staged(tmp_path / f"checkpoint-{step}", {"run": "x"}, True, lambda: None) as aside:
            (aside / "a").write_text("a")
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()
    for more in (3, 4, 5, 9):  # as many as there are, or more
        checkpoints.rotate(tmp_path, "x", more, None)
        assert len(list(tmp_path.iterdir())) == 4
    checkpoints.rotate(tmp_path, "x", 1, str(tmp_path / "checkpoint-2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]


# State


def test_generators_memory_and_counts_are_in_the_checkpoint(whole: Path) -> None:
    folder = whole / "checkpoint-4"
    with safe_globals():
        draws = torch.load(folder / "rng_state.pth", weights_only=True)
    assert {"python", "numpy", "cpu"} <= set(draws)
    memory = safetensors.torch.load_file(folder / "seqreg_terms.safetensors")
    assert int(memory["bregman/updates"]) == 3
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    progress = json.loads((folder / "progress_0.json").read_text())
    names = ("loss", "total", "logged", "sums", "shares", "evaluation_due", "nonfinite", "seconds", "tensorboard")
    assert set(names) <= set(progress)


def test_the_mean_loss_that_is_printed_is_that_of_the_whole_run(tmp_path: Path) -> None:
    folder = killed_at(tmp_path / "run", 6, *SETTINGS, "logging.logging_steps=1000")
    assert same(folder, "logging.logging_steps=1000").wait() == 0, log(folder)
    assert f"loss {metrics(folder)['train']['loss']:.4g} = base" in log(folder)


def test_curves_and_scores_of_a_resumed_run_are_those_of_an_undisturbed_one(tmp_path: Path) -> None:
    settings = [*SETTINGS, "logging.logging_steps=3", "logging.tensorboard=true", "logging.smoothness_steps=3"]
    settings += ["logging.drift_steps=3"]
    assert forked_process.train(tmp_path / "whole", *settings).wait() == 0, log(tmp_path / "whole")
    folder = killed_at(tmp_path / "run", 4, *settings, terms=())
    assert forked_process.train(folder, *settings).wait() == 0, log(folder)
    assert history(folder, 8) == history(tmp_path / "whole", 8)
    assert metrics(folder) == metrics(tmp_path / "whole")
    curves = []
    for path in (folder, tmp_path / "whole"):
        events = EventAccumulator(str(path / "tensorboard"))
        events.Reload()
        names = [name for name in events.Tags()["scalars"] if not name.endswith(TIMES)]
        curves.append({name: [(one.step, one.value) for one in events.Scalars(name)] for name in names})
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]["train/loss"]] == [3, 6, 8]
    assert [step for step, _ in curves[0]["train_drift/kl_trained_start"]] == [3, 6]
    assert curves[0]["trained_drift/kl_trained_start"] == [
        (0, 0.0), (8, pytest.approx(metrics(folder)["drift"]["kl_trained_start"]))
    ]  # fmt: skip
