"""The promises of docs/reliability.md about whose folder it is, and about what changes nothing."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from seqreg.workbench.data import loading
from seqreg.workbench.run import checkpoints, run_directory, train
from seqreg.workbench.run.record import difference, fingerprint
from tests.helpers import forked_process, sample_files
from tests.helpers.interrupted_runs import SETTINGS, TERMS, history, log, metrics, one_line, same
from tests.workbench.run.test_train import run_of

# Changes


def test_other_settings_are_refused_with_a_difference(copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock"}
    command = same(copy, "checkpoints.save_total_limit=9", "optimisation.learning_rate=3e-3", "terms.smart=null")
    assert command.wait() == 2
    for piece in (
        "its run was started with other settings:",
        "optimisation.learning_rate: 0.01 there, 0.003 now",
        "terms.smart",
        "nothing now",
        "--allow-change optimisation.learning_rate",
    ):
        assert piece in command.text()
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock"} == before
    wrong = same(copy, "checkpoints.save_total_limit=9", "--allow-change", "optimisation.learning_rat")
    assert wrong.wait() == 2
    assert "did you mean 'optimisation.learning_rate'?" in wrong.text()


def test_an_allowed_change_takes_effect(copy: Path, whole: Path) -> None:
    rate = "optimisation.learning_rate"
    command = same(copy, "checkpoints.save_total_limit=9", f"{rate}=3e-3", "--allow-change", rate)
    assert command.wait() == 0, command.text()
    assert f"changed since the run was started: {rate}" in command.text()
    assert forked_process.weights(copy) != forked_process.weights(whole)
    rates = {entry["step"]: entry["learning_rate"] for entry in history(copy, 8) if "loss" in entry}
    old = {entry["step"]: entry["learning_rate"] for entry in history(whole, 8) if "loss" in entry}
    assert rates[6] == old[6]
    assert rates[8] == pytest.approx(0.3 * old[8])
    assert same(copy, "checkpoints.save_total_limit=9", f"{rate}=3e-3").wait() == 0  # it is the run's own setting now


def test_changed_intervals_take_effect_on_resuming(copy: Path) -> None:
    changes = {"logging.logging_steps": 1, "evaluation.eval_steps": 1, "checkpoints.save_steps": 1}
    words = [word for key, value in changes.items() for word in (f"{key}={value}", "--allow-change", key)]
    command = same(copy, "checkpoints.save_total_limit=9", *words)
    assert command.wait() == 0, command.text()
    for key in ("loss", "eval_score"):
        assert [entry["step"] for entry in history(copy, 8) if key in entry and entry["step"] > 6] == [7, 8]
    assert (copy / "checkpoint-7").exists()


@pytest.mark.parametrize(
    ("change", "allowed", "said"),
    [
        ("terms.bregman=null", "terms", "changed since the run was started: terms.bregman"),
        ("optimisation.optim=adafactor", "optimisation.optim", "starts without the state of the other one"),
        ("logging.smoothness_steps=1", "logging", "changed since the run was started: logging.smoothness_steps"),
    ],
)
def test_a_state_of_terms_does_not_forbid_a_change(copy: Path, change: str, allowed: str, said: str) -> None:
    command = same(copy, "checkpoints.save_total_limit=9", change, "--allow-change", allowed)
    assert command.wait() == 0, command.text()
    assert said in command.text()
    assert same(copy, "checkpoints.save_total_limit=9", change).wait() == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.settings.d_model=32", "its weights are of another model"),
        ("model.settings.encoder_layers=2", "its weights are of another model: 16 missing (model.encoder.layers.1."),
        ("optimisation.max_steps=4", "6 steps are made, and the run is to end after 4"),
    ],
)
def test_an_allowed_change_that_cannot_be_made_leaves_the_run_as_it_was(
    copy: Path, whole: Path, tmp_path: Path, change: str, said: str
) -> None:
    before = {name: (copy / name).read_bytes() for name in ("run.json", "config.yaml", "task.yaml")}
    words = (*SETTINGS, "checkpoints.save_total_limit=9", change, "--allow-change", change.partition(".")[0])
    command = forked_process.train(copy, *words, terms=TERMS, log=tmp_path / "other.log")
    assert command.wait() == 2, command.text()
    one_line(command, "checkpoint-6", said)
    assert {name: (copy / name).read_bytes() for name in before} == before
    assert same(copy, "checkpoints.save_total_limit=9").wait() == 0, log(copy)
    assert forked_process.weights(copy) == forked_process.weights(whole)


def test_other_data_and_another_world_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("gigaword", tmp_path, variants=[])
    old = run_directory.RunRecord.of(run)
    old.settings[run_directory.ROWS] = "a" * 64
    new = run_directory.RunRecord.of(run)
    new.settings[run_directory.ROWS] = "b" * 64
    with pytest.raises(run_directory.BadInput, match=r'data.rows: "a+\.\.\. there, "b+\.\.\. now'):
        run_directory.check_same(tmp_path, old, new, [])
    assert run_directory.check_same(tmp_path, old, new, ["data.rows"]) == ["data.rows"]
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    new = run_directory.RunRecord.of(run)
    with pytest.raises(run_directory.BadInput, match="world_size: 1 there, 2 now"):
        run_directory.check_same(tmp_path, old, new, [])


def test_data_that_changed_between_are_noticed(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, variants=[])
    before, outline = fingerprint(samples_of(run))
    rows = sample_files.rows(run.card, 16)
    rows[7]["summary"] += " x"
    sample_files.write(tmp_path / "data" / "train.jsonl", rows)
    assert fingerprint(samples_of(run))[0] != before
    assert difference(outline, samples_of(run)).startswith("the first difference in train is example 8, now '")
    sample_files.write(tmp_path / "data" / "train.jsonl", sample_files.rows(run.card, 15))
    assert difference(outline, samples_of(run)).startswith("train had 16 examples and has 15; the first")
    sample_files.write(tmp_path / "data" / "train.jsonl", sample_files.rows(run.card, 600))
    _, many = fingerprint(samples_of(run))
    changed = sample_files.rows(run.card, 600)
    changed[301]["summary"] += " x"
    sample_files.write(tmp_path / "data" / "train.jsonl", changed)
    assert difference(many, samples_of(run)) == "the first difference in train is one of the examples 301 to 303"


def test_other_data_are_refused_with_what_changed(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, "logging.tensorboard=false", variants=[])
    train.train(run)
    sample_files.write(tmp_path / "data" / "train.jsonl", sample_files.rows(run.card, 17))
    with pytest.raises(
        run_directory.BadInput, match=r"  data.rows: train had 16 examples and has 17\n.*--allow-change"
    ):
        train.train(run)


def samples_of(run: Any) -> Any:
    return loading.load(run.card, run.config.data)


def test_only_a_run_is_replaced(tmp_path: Path, copy: Path) -> None:
    """--overwrite empties a folder: one that is not ours is refused, whatever its files are called."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "precious.txt").write_text("years of work")
    for name, text in (("config.yaml", "name: mine\n"), ("task.yaml", "a: 1\n"), ("run.json", "{}\n")):
        (folder / name).write_text(text)
        with pytest.raises(run_directory.BadInput):
            run_directory.check_folder(folder, True, False)
    with pytest.raises(run_directory.BadInput, match="choose one"):
        run_directory.check_folder(copy, True, True)
    (copy / "run.json").write_text("{")
    assert run_directory.check_folder(copy, True, False) is None
    (copy / "run.json").unlink()
    assert run_directory.check_folder(copy, True, False) is None


# Finished runs


def test_a_finished_run_is_left_alone(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"}
    for further in ([], ["--resume"]):
        command = same(whole, "checkpoints.save_total_limit=9", *further)
        assert command.wait() == 0, command.text()
        assert "this run is finished, nothing to do" in command.text()
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"} == before


def test_a_run_stopped_after_its_last_step_makes_no_other(copy: Path, whole: Path, tmp_path: Path) -> None:
    for path in copy.glob("checkpoint-*"):
        shutil.rmtree(path)
    record, other = run_directory.RunRecord.read(copy), run_directory.RunRecord.read(whole)
    assert record is not None
    assert other is not None
    for step in (2, 8):
        shutil.copytree(whole / f"checkpoint-{step}", copy / f"checkpoint-{step}")
    (copy / "run.json").write_text((copy / "run.json").read_text().replace(record.run, other.run))
    assert same(copy, "checkpoints.save_total_limit=9").wait() == 0, log(copy)
    assert f"resumes from {copy / 'checkpoint-8'}" in log(copy)
    assert metrics(copy) == metrics(whole)
    assert forked_process.weights(copy) == forked_process.weights(whole)


# Measuring


def test_measuring_does_not_change_the_weights(tmp_path: Path) -> None:
    settings = ["optimisation.max_steps=5", "optimisation.learning_rate=1e-2", "data.dataloader_num_workers=1"]
    off = ["logging.logging_steps=1000", "checkpoints.save_minutes=0"]
    on = [
        "logging.logging_steps=1", "logging.tensorboard=true", "logging.diagnostics_steps=1",
        "logging.smoothness_steps=1",
        "evaluation.eval_steps=1", "evaluation.eval_before_training=true", "checkpoints.save_steps=1",
        "checkpoints.save_minutes=0.0001",
    ]  # fmt: skip
    for name, further in (("off", off), ("on", on)):
        command = forked_process.train(tmp_path / name, *settings, *further, terms=TERMS)
        assert command.wait() == 0, command.text()
    assert forked_process.weights(tmp_path / "on") == forked_process.weights(tmp_path / "off")


# One process a folder, and nothing that can run code


def test_a_second_process_is_refused_at_once(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    first = same(folder, "checkpoints.save_total_limit=9")
    assert first.until((folder / "run.json").exists)
    os.kill(first.process.pid or 0, signal.SIGSTOP)
    for further in ([], ["--overwrite"], ["--resume"]):
        second = forked_process.train(
            folder, *SETTINGS, "checkpoints.save_total_limit=9", *further, terms=TERMS, log=tmp_path / "second.log"
        )
        assert second.wait(30) == 2
        assert f"process {first.process.pid} on" in second.text()
    os.kill(first.process.pid or 0, signal.SIGCONT)
    assert first.wait() == 0, log(folder)
    assert forked_process.weights(folder) == forked_process.weights(whole)


class Payload:
    """What a malicious pickle would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_checkpoint_holds_no_pickle_of_arguments_and_runs_none(copy: Path, tmp_path: Path) -> None:
    names = {path.name for path in copy.rglob("*") if path.is_file()}
    assert "training_args.bin" not in names
    assert not [name for name in names if name.endswith((".bin", ".pkl", ".ckpt"))]
    folder = copy / "checkpoint-6"
    facts = {key: value for key, value in checkpoints.manifest(folder).items() if key != "files"}
    (folder / "optimizer.pt").write_bytes(pickle.dumps(Payload(tmp_path / "owned")))
    checkpoints.seal(folder, facts)
    command = same(copy, "checkpoints.save_total_limit=9")
    assert command.wait() == 2
    one_line(command, "checkpoint-6", "holds more than numbers")
    assert not (tmp_path / "owned").exists()
