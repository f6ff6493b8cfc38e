"""Runs that must not be called finished, environments that must not be believed, and folders that are not ours."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from seqreg.errors import BadInput, DiskError, NotFinite
from seqreg.studies.collapse import chain
from seqreg.studies.common.findings import Finding
from seqreg.studies.compare import plan, study
from seqreg.workbench.config import other_names, run_config
from seqreg.workbench.data import loading
from seqreg.workbench.run import launch, run_directory, train
from seqreg.workbench.run.record import RunRecord, difference
from seqreg.workbench.run.run_directory import check_same
from seqreg.workbench.run.trainer import FaultTolerantTrainer
from seqreg.workbench.text import atomic_files
from tests.workbench.run.test_train import run_of

OFF = "logging.tensorboard=false"
FAULTY = "terms.faulty={term: tests.helpers.nonfinite_term.Faulty, at: [0], how: loss}"


def strict(path: Path) -> Any:
    """JSON as other programs read it."""

    def refused(word: str) -> None:
        raise AssertionError(f"{path}: {word} is not JSON")

    return json.loads(path.read_text(), parse_constant=refused)


# Weights and losses that are not finite


@pytest.mark.parametrize("further", [(), ("checkpoints.save_steps=1",), ("evaluation.eval_steps=1",)])
def test_an_update_that_makes_weights_infinite_does_not_finish(
    further: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.optim.AdamW.step

    def overflows(self: Any, *args: Any, **kwargs: Any) -> Any:
        for group in self.param_groups:
            group["lr"] = 1e308
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", overflows)
    with pytest.raises(NotFinite, match=r"after step \d \d\d weights are not finite \(model\.\w") as caught:
        train.train(run_of("gigaword", tmp_path, "optimisation.max_steps=2", *further, OFF, variants=[]))
    assert caught.value.code == 3
    record = run_directory.RunRecord.read(tmp_path / "run")
    assert record is not None
    assert not record.finished
    assert not list((tmp_path / "run").glob("model*"))
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_weight_that_becomes_infinite_in_the_last_step_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FaultTolerantTrainer._finalize_training

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.model.get_input_embeddings().weight.data[3, 3] = float("inf")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(FaultTolerantTrainer, "_finalize_training", spoilt)
    with pytest.raises(NotFinite, match=r"after step 1 1 weights are not finite \(model.shared.weight\)"):
        train.train(run_of("gigaword", tmp_path, OFF, variants=[]))


def test_a_trial_loss_that_is_not_finite_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, FAULTY, OFF, variants=[])
    with pytest.raises(BadInput, match=r"the loss of the first 2 training examples is not finite \(base\)"):
        train.train(run)
    assert not (tmp_path / "run").exists()


def test_numbers_that_are_not_finite_are_null_in_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultTolerantTrainer, "mean_loss", lambda self: float("nan"))
    metrics = train.train(run_of("gigaword", tmp_path, OFF, variants=[]))
    assert metrics["train"]["loss"] is None
    assert strict(tmp_path / "run" / "metrics.json") == metrics
    assert strict(tmp_path / "run" / "run.json")["finished"]
    assert atomic_files.to_json({"a": [float("inf"), 1.5], "b": (float("nan"),)}) == '{"a": [null, 1.5], "b": [null]}'
    Finding("probe", "", "", [], values={"a": float("nan")}).write(tmp_path)
    assert strict(tmp_path / "probe.json")["values"] == {"a": None}


# The environment


STRAY = [
    {"RANK": "1"}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "abc"},
    {"RANK": "-3"}, {"RANK": "1", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x"},
    {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, {"RANK": "9" * 99},
    {"PMI_SIZE": "2"}, {"OMPI_COMM_WORLD_SIZE": "x"}, {"ACCELERATE_MIXED_PRECISION": "bf16"},
    {"ACCELERATE_USE_FSDP": "true"}, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {"ACCELERATE_USE_DEEPSPEED": "1"},
    {"ACCELERATE_USE_CPU": "abc"}, {"ACCELERATE_DEBUG_MODE": "2"}, {"FORK_LAUNCHED": "2"},
]  # fmt: skip


@pytest.mark.parametrize("variables", STRAY, ids=lambda found: "-".join(f"{k}={v[:9]}" for k, v in found.items()))
def test_a_variable_that_was_left_behind_does_not_open_a_folder(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "run"
    mine.mkdir()
    (mine / "README.md").write_text("mine")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = run_of("gigaword", tmp_path, OFF, variants=[])
    with pytest.raises(BadInput, match=f"{next(iter(variables))}=.* in the environment") as caught:
        train.train(run)
    assert len(caught.value.lines) == 1
    assert [path.name for path in mine.iterdir()] == ["README.md"]
    assert (mine / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, (0, 1)),
        ({"LOCAL_RANK": "-1", "WORLD_SIZE": ""}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, (1, 2)),
    ],
)
def test_ranks_of_torchrun_are_taken_from_its_variables(
    variables: dict[str, str], found: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.processes() == found
    if found[1] > 1:
        with pytest.raises(BadInput, match="runs in one process"):
            chain.one_process()
        with pytest.raises(BadInput, match="a comparison runs in one process and starts its runs itself"):
            study.compare("quickstart", ["r3f"], "3", tmp_path / "compare")


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for accelerate, which would read a number."""
    names = {*launch.TORCHRUN, "PMI_SIZE", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"}
    for name in names:
        monkeypatch.setenv(name, "")
    assert launch.processes() == (0, 1)
    launch.check_environment("fp32")
    assert not names & set(os.environ)


# What is called finished


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("ended")
    train.train(run_of("gigaword", tmp_path, OFF, "checkpoints.save_steps=1", variants=[]))
    return tmp_path


def torn(path: Path) -> None:
    os.truncate(path, 1000)


def flipped(path: Path) -> None:
    found = bytearray(path.read_bytes())
    found[-1] ^= 1
    path.write_bytes(found)


@pytest.mark.parametrize("spoil", [torn, flipped, Path.unlink])
def test_a_finished_run_whose_model_is_not_whole_is_not_finished(
    spoil: Any, ended: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(ended / "run", tmp_path / "run"))
    whole = (folder / "model.safetensors").read_bytes()
    run = run_of("gigaword", ended, OFF, "checkpoints.save_steps=1", f"output={folder}", variants=[])
    spoil(folder / "model.safetensors")
    train.train(run)
    said = capsys.readouterr().err
    assert "this run was finished, but model.safetensors" in said
    assert (folder / "model.safetensors").read_bytes() == whole
    train.train(run)
    assert "this run is finished, nothing to do" in capsys.readouterr().err
    spoil(folder / "model.safetensors")
    shutil.rmtree(folder / "checkpoint-1")
    with pytest.raises(BadInput, match=r"was finished, but model.safetensors .*there is no checkpoint.*--overwrite"):
        train.train(run)


def test_a_folder_that_was_removed_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FaultTolerantTrainer._finalize_training

    def removed(self: Any, *args: Any, **kwargs: Any) -> Any:
        shutil.rmtree(tmp_path / "run")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(FaultTolerantTrainer, "_finalize_training", removed)
    for further in ((), ("checkpoints.save_steps=1", "checkpoints.save_minutes=0.0000001")):
        with pytest.raises(DiskError, match="the folder of this run was removed while it was training"):
            train.train(run_of("gigaword", tmp_path, OFF, *further, variants=[]))


def test_a_folder_that_was_given_to_another_run_is_left_alone(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, variants=[])
    run_directory.RunRecord.of(run).write(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(DiskError, match="was given to another run"):
        run_directory.RunDirectory(tmp_path, run, contextlib.ExitStack()).check_own()
    assert (tmp_path / "run.json").read_bytes() == before


def test_seconds_do_not_follow_the_time_of_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, jump = time.time, iter(range(0, 10**9, 3600))
    monkeypatch.setattr(time, "time", lambda: real() - next(jump))
    settings = (OFF, "evaluation.eval_steps=1", "checkpoints.save_steps=1", "optimisation.max_steps=2")
    metrics = train.train(run_of("gigaword", tmp_path, *settings, variants=[]))
    assert 0 < metrics["train"]["seconds"] < 600
    history = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    times = [entry["eval_runtime"] for entry in history if "eval_runtime" in entry]
    assert times
    assert all(0 < seconds < 600 for seconds in times)
    assert torch.tensor([entry["eval_steps_per_second"] for entry in history if "eval_loss" in entry]).gt(0).all()


def test_a_model_that_has_changed_is_not_scored(tmp_path: Path) -> None:
    train.train(run_of("gigaword", tmp_path, OFF, variants=[]))
    folder = tmp_path / "run"
    (folder / atomic_files.REMOVED).write_text("of an earlier model")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-4:] = b"\0\0\0\0" if weights[-4:] != b"\0\0\0\0" else b"\1\0\0\0"
    (folder / "model.safetensors").write_bytes(weights)
    for attempt in (lambda: train.evaluate_run(folder), lambda: train.trained(folder)):
        with pytest.raises(BadInput, match=r"model.safetensors has changed since it was written"):
            attempt()


def test_training_anew_removes_the_note_of_a_removed_model(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, OFF, variants=[])
    (tmp_path / "run").mkdir()
    train.train(run)
    (tmp_path / "run" / atomic_files.REMOVED).write_text("an earlier model was not kept")
    train.train(run, overwrite=True)
    assert not (tmp_path / "run" / atomic_files.REMOVED).exists()


def test_replacing_a_run_leaves_files_of_the_user_and_nothing_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = run_of("gigaword", tmp_path, "checkpoints.save_steps=1", variants=[]), tmp_path / "run"
    train.train(run)
    mine = [folder / name for name in ("notes.txt", "evidence/mine.txt", "model.txt")]
    for path in (*mine, folder / "evidence" / "calibrate.json", folder / "soup.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")

    def killed(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "remove_files", killed)
        with pytest.raises(ZeroDivisionError):
            train.train(run, overwrite=True)
    train.train(run)
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert not [*folder.glob("spoilt-*"), *folder.glob(f"{atomic_files.ASIDE}*"), *folder.glob("evidence/*.json")]
    assert not (folder / "soup.json").exists()
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_data_without_an_outline_tell_nothing() -> None:
    assert difference({}, loading.Splits({"train": []})) == ""


def test_a_run_from_before_settings_were_renamed_is_compared_by_their_new_names(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, variants=[])
    run_directory.RunRecord.of(run).write(tmp_path)
    path, was = tmp_path / run_directory.RECORD, {other_names.current(old): old for old in other_names.RETIRED}
    text = json.loads(path.read_text())
    text["settings"] = {was.get(key, key): value for key, value in text["settings"].items()}
    assert "optimisation.clip" in text["settings"]
    pair = [text["settings"].pop(f"optimisation.adam_beta{number}") for number in (1, 2)]
    text["settings"]["optimisation.betas"] = pair
    path.write_text(json.dumps(text))

    def check(*changed: str, allowed: tuple[str, ...] = ()) -> None:
        other = run_of("gigaword", tmp_path, *changed, variants=[])
        with contextlib.ExitStack() as stack:
            run_directory.RunDirectory(tmp_path, other, stack, allowed=allowed).check()

    check()
    with pytest.raises(BadInput, match=r"optimisation.max_grad_norm: \S+ there, 0.5 now") as caught:
        check("optimisation.max_grad_norm=0.5")
    assert len(str(caught.value).splitlines()) <= 3
    check("optimisation.max_grad_norm=0.5", allowed=("optimisation.clip",))


def test_a_setting_that_came_later_had_its_default(tmp_path: Path) -> None:
    settings = ["data.limit={train: 5}", "data.also={a/my.card.yaml: null}"]
    run = run_config.resolve("quickstart", overrides=[*settings, f"output={tmp_path}"])
    now = RunRecord.of(run)
    later = (
        "evaluation.drift_examples", "evaluation.retention", "logging.drift_steps", "logging.report_to",
        "evaluation.early_stopping_patience", "model.target_tokenizer", "data.columns.source",
    )  # fmt: skip
    assert set(later) <= set(now.settings)
    old = dataclasses.replace(now, settings={key: value for key, value in now.settings.items() if key not in later})
    assert check_same(tmp_path, old, now, ()) == []
    other = run_config.resolve("quickstart", overrides=[*settings, f"output={tmp_path}", f"{later[0]}=7"])
    with pytest.raises(BadInput, match="drift_examples: nothing there, 7 now"):
        check_same(tmp_path, old, RunRecord.of(other), ())
    new_plan, _ = plan.make("quickstart", ["r3f"], "2", settings=settings)
    resolved = {name: {k: v for k, v in some.items() if k not in later} for name, some in new_plan.resolved.items()}
    assert plan.differences(dataclasses.replace(new_plan, resolved=resolved), new_plan) == []
