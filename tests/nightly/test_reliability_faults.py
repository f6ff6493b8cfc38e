"""The promises of docs/reliability.md about losses, signals and disks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqreg.errors import BadInput, Interrupted
from seqreg.workbench.run import checkpoints, train
from seqreg.workbench.run.record import RunRecord
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.run.tensorboard import TensorBoardWriter
from seqreg.workbench.run.trainer import FaultTolerantTrainer
from tests.helpers import forked_process
from tests.helpers.interrupted_runs import SETTINGS, TERMS, history, killed_at, log, metrics, one_line, same
from tests.workbench.run.test_train import run_of

# Steps that are not finite

FAULTY = "tests.helpers.nonfinite_term.Faulty"


def faulty(folder: Path, at: str, how: str, *further: str) -> forked_process.Command:
    steps = (
        "optimisation.max_steps=5",
        "checkpoints.save_steps=1",
        "checkpoints.save_total_limit=9",
        "logging.logging_steps=1",
    )
    term = f"terms.faulty={{term: {FAULTY}, at: {at}, how: {how}}}"
    return forked_process.train(folder, *steps, term, *further, terms=("bregman",))


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"checkpoint-{step}" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("how", "accumulation"), [("loss", 1), ("loss", 3), ("gradient", 2)])
def test_a_step_that_is_not_finite_is_not_applied(how: str, accumulation: int, tmp_path: Path) -> None:
    command = faulty(tmp_path / "run", "[2]", how, f"optimisation.gradient_accumulation_steps={accumulation}")
    assert command.wait() == 0, command.text()
    folder = tmp_path / "run"
    moments = [torch.load(folder / f"checkpoint-{n}" / "optimizer.pt", weights_only=True)["state"] for n in (2, 4)]
    assert float(moments[1][0]["step"]) == float(moments[0][0]["step"]) + 1  # of two steps one was made
    assert not (folder / "checkpoint-3").exists()  # and nothing is saved in bad times
    assert all(value.isfinite().all() for value in weights_at(folder, 5).values())
    what = "base" if how == "loss" else "gradient"
    assert f"step 3: {what}" in command.text()
    assert "not finite, the step is skipped (training examples" in command.text()
    found = metrics(folder)["train"]
    assert (found["skipped"], found["dropped"], found["steps"]) == (1, {}, 5)
    story = json.loads((folder / "crash" / "step-3" / "crash.json").read_text())
    assert len(story["rows"]) == 2 * accumulation
    assert all(0 <= row < 24 for row in story["rows"])
    losses = [entry["loss"] for entry in history(folder, 5) if "loss" in entry]
    assert [loss == loss for loss in losses] == [True, True, False, True, True]  # the third is not a number, not 0


def test_one_term_that_is_not_finite_is_dropped_for_the_step(tmp_path: Path) -> None:
    command = faulty(tmp_path / "run", "[1, 3]", "term")
    assert command.wait() == 0, command.text()
    assert "step 2: faulty not finite, the step is made without (training examples" in command.text()
    assert metrics(tmp_path / "run")["train"]["dropped"] == {"faulty": 2}
    plain = faulty(tmp_path / "plain", "[]", "term")
    assert plain.wait() == 0, plain.text()
    assert forked_process.weights(tmp_path / "run") == forked_process.weights(tmp_path / "plain")


@pytest.mark.parametrize("how", ["loss", "term"])
def test_bad_steps_in_a_row_stop_the_run_and_leave_the_last_checkpoint(how: str, tmp_path: Path) -> None:
    command = faulty(tmp_path / "run", "[2, 3, 4]", how)
    assert command.wait() == 3
    assert "3 steps in a row were not finite" in command.text()
    assert "Traceback" not in command.text()
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-1", "checkpoint-2"]
    assert checkpoints.fault(tmp_path / "run" / "checkpoint-2") is None


def test_the_mean_loss_of_a_run_without_a_step_is_not_0(tmp_path: Path) -> None:
    command = faulty(tmp_path / "run", "[0, 1]", "gradient", "optimisation.max_steps=2", "optimisation.warmup_steps=0")
    assert command.wait() == 0, command.text()
    found = metrics(tmp_path / "run")["train"]
    assert (found["steps"], found["skipped"]) == (2, 2)
    assert found["loss"] is None


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_the_crash_folder_replays_the_step(how: str, tmp_path: Path) -> None:
    command = faulty(tmp_path / "run", "[2]", how, "optimisation.gradient_accumulation_steps=2")
    assert command.wait() == 0, command.text()
    crash = tmp_path / "run" / "crash" / "step-3"
    own = forked_process.Command("replay", crash, log=tmp_path / "own.log")
    assert own.wait() == 2
    one_line(own, "config.yaml: terms.faulty: the module tests.helpers.nonfinite_term.Faulty", "--trust-remote-code")
    again = forked_process.Command("replay", crash, "--trust-remote-code", log=tmp_path / "replay.log")
    assert again.wait() == 0, again.text()
    bad = "base │ nan" if how == "loss" else "faulty │ 0 "
    assert bad in again.text()
    assert ("first module whose output is not finite: model." in again.text()) == (how == "loss")
    assert "gradients that are not finite: 0 parameters" not in again.text()
    assert "settings of the run have changed" not in again.text()
    record = RunRecord.read(tmp_path / "run")
    assert record is not None
    record.settings["optimisation.learning_rate"] = 1.0
    record.write(tmp_path / "run")
    other = forked_process.Command("replay", crash, "--trust-remote-code", log=tmp_path / "other.log")
    assert other.wait() == 0, other.text()
    assert "the settings of the run have changed since this step" in other.text()
    os.truncate(crash / "batch.safetensors", 50)
    refused = forked_process.Command("replay", crash, log=tmp_path / "refused.log")
    assert refused.wait() == 2
    assert "cannot be replayed: batch.safetensors has 50 bytes" in refused.text()


def test_overflows_of_float16_are_left_to_the_scaler(tmp_path: Path) -> None:
    trainer = train.make_trainer(train.prepare(run_of("gigaword", tmp_path, variants=[])), tmp_path / "run")
    trainer._tr_loss = torch.zeros(())  # as at the beginning of a run
    for scale, skipped in ((None, 1), (2.0**16, 0), (1.0, 1)):
        trainer.accelerator.scaler = None if scale is None else SimpleNamespace(get_scale=lambda: scale)  # noqa: B023
        trainer.nonfinite.skipped = trainer.nonfinite.streak = 0
        for parameter in trainer.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer._get_grad_norm(trainer.model, torch.tensor(float("inf")))
        assert trainer.nonfinite.skipped == skipped
        assert all((parameter.grad is None) == bool(skipped) for parameter in trainer.model.parameters())


# Checkpoints, when training ends


def test_a_best_checkpoint_that_was_spoilt_is_named_and_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, found = FaultTolerantTrainer._load_best_model, []

    def spoilt(self: Any) -> None:
        best = Path(self.state.best_model_checkpoint)
        os.truncate(best / "model.safetensors", 1000)
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        real(self)
        found.append((best, equal(before, self.model.state_dict())))

    monkeypatch.setattr(FaultTolerantTrainer, "_load_best_model", spoilt)
    settings = (
        "optimisation.max_steps=2",
        "evaluation.eval_steps=1",
        "checkpoints.save_steps=1",
        "evaluation.load_best_model_at_end=true",
    )
    train.train(run_of("gigaword", tmp_path, *settings, "logging.tensorboard=false", variants=[]))
    ((best, kept),) = found
    assert kept
    assert f"{best}, the best checkpoint, is passed over: model.safetensors has 1000 bytes" in capsys.readouterr().err


# Signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_and_saves(number: int, code: int, tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    command = same(folder, "checkpoints.save_total_limit=9", "logging.logging_steps=2")
    assert command.until(lambda: "step 4 of 8" in log(folder))
    command.send(number)
    assert command.wait() == code, log(folder)
    (line,) = [
        line for line in folder.with_suffix(".log").read_text().splitlines() if re.match("seqreg: (?!warning)", line)
    ]
    assert "run the same command to resume" in line or "stopped by signal" in line
    assert "Traceback" not in log(folder)
    newest = checkpoints.sealed(folder, json.loads((folder / "run.json").read_text())["run"])[-1]
    assert checkpoints.fault(newest) is None
    assert same(folder, "checkpoints.save_total_limit=9").wait() == 0, log(folder)
    assert f"resumes from {newest}" in log(folder)
    assert forked_process.weights(folder) == forked_process.weights(whole)
    assert history(folder, 8) == history(whole, 8)


LONG = (
    "data.limit={train: 24, validation: 50, test: 10}",
    "evaluation.per_device_eval_batch_size=1",
    "logging.logging_steps=2",
)
"""Evaluations that take seconds."""


@pytest.mark.parametrize("where", ["an evaluation", "one at the end of the last epoch", "the last evaluation"])
def test_a_signal_during_an_evaluation_cuts_it_short(where: str, tmp_path: Path) -> None:
    """Two epochs of two steps: at the end of the last one there is no epoch left to resume."""
    last = where == "the last evaluation"
    settings = [word for word in SETTINGS if last <= ("evaluation" not in word and "checkpoints" not in word)]
    settings += [*LONG, "optimisation.max_steps=4", *([] if last else ["evaluation.eval_steps=2"])]
    if where == "one at the end of the last epoch":
        settings += ["data.limit={train: 8, validation: 50, test: 10}", "optimisation.gradient_accumulation_steps=2"]
    assert forked_process.train(tmp_path / "whole", *settings).wait() == 0, log(tmp_path / "whole")
    folder = tmp_path / "run"
    command = forked_process.train(folder, *settings)
    step = 2 if where == "an evaluation" else 4
    assert command.until(lambda: f"step {step} of 4" in log(folder))
    time.sleep(0.3)
    command.send(signal.SIGTERM)
    assert command.wait() == 143, log(folder)
    assert "Traceback" not in log(folder)
    assert f"step {step} validation rougeL" not in log(folder)  # it did not wait for the end
    said = "stopped after the last step, 4" if last else f"stopped at step {step} with everything saved"
    assert f"seqreg: {said}: run the same command to resume" in log(folder)
    assert checkpoints.fault(folder / f"checkpoint-{step}") is None
    assert forked_process.train(folder, *settings).wait() == 0, log(folder)
    assert (f"step {step} validation rougeL" in log(folder)) != last  # made up for
    assert forked_process.weights(folder) == forked_process.weights(tmp_path / "whole")
    assert metrics(folder) == metrics(tmp_path / "whole")


def test_a_signal_while_points_are_written_does_not_write_them_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(
        "gigaword", tmp_path, "optimisation.max_steps=4", "evaluation.eval_steps=2", "checkpoints.save_steps=2",
        variants=[]
    )  # fmt: skip
    with monkeypatch.context() as patch:
        real = TensorBoardWriter.on_evaluate

        def struck(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGTERM)

        patch.setattr(TensorBoardWriter, "on_evaluate", struck)
        with pytest.raises(Interrupted):
            train.train(run)
    train.train(run)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("eval/score")] == [2, 4]
    assert [entry["step"] for entry in history(tmp_path / "run", 4) if "eval_score" in entry] == [2, 4]


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = same(folder, *LONG)
    assert command.until(lambda: "step 2 of" in log(folder))
    os.kill(command.process.pid or 0, signal.SIGSTOP)  # both are there before it can look
    command.send(signal.SIGTERM)
    command.send(signal.SIGINT)
    command.send(signal.SIGCONT)
    assert command.wait() in (-signal.SIGTERM, -signal.SIGINT)


# Disks


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    """Mounts small disks of memory."""
    mounted: list[Path] = []

    def mount(size: str, *options: str, path: Path | None = None) -> Path:
        path = path or tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        words = ",".join([f"size={size}", *options])
        if os.system(f"mount -t tmpfs -o {words} tmpfs {path} 2>/dev/null"):
            pytest.skip("only root may mount a disk; test_a_file_that_cannot_grow_keeps_what_was_saved does without")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        os.system(f"umount {path}")


def test_a_disk_that_fills_up_keeps_what_was_saved(disk: Any, tmp_path: Path, whole: Path) -> None:
    folder = disk("4m") / "run"
    command = forked_process.train(folder, *SETTINGS, terms=TERMS, log=tmp_path / "log")
    assert command.until((folder / "checkpoint-2").exists)
    filler = folder.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    assert command.wait() == 4, command.text()
    one_line(command, str(folder / "checkpoint-"), "bytes free, about", "needed", "the last checkpoint is")
    run = json.loads((folder / "run.json").read_text())["run"]
    assert checkpoints.fault(checkpoints.sealed(folder, run)[-1]) is None
    assert not list(folder.glob(".tmp-checkpoint-*"))
    filler.unlink()
    again = forked_process.train(folder, *SETTINGS, terms=TERMS, log=tmp_path / "log")
    assert again.wait() == 0, again.text()
    assert forked_process.weights(folder) == forked_process.weights(whole)


def test_disk_space_is_checked_before_training(disk: Any, tmp_path: Path) -> None:
    folder = disk("200k") / "run"
    command = forked_process.train(folder, *SETTINGS, terms=TERMS, log=tmp_path / "log")
    assert command.wait() == 4
    one_line(command, f"{folder}: ", "bytes free, about", "needed (3 checkpoints of")
    assert not folder.exists()


def test_an_output_that_cannot_be_written_is_one_line(disk: Any, tmp_path: Path) -> None:
    folder = disk("4m", "ro") / "run"
    command = forked_process.train(folder, *SETTINGS, terms=TERMS, log=tmp_path / "log")
    assert command.wait() == 4
    one_line(command, f"{folder}: Read-only file system", "bytes free")


@pytest.mark.parametrize("size", [20_000, 60_000, 100_000])
def test_a_file_that_cannot_grow_keeps_what_was_saved(size: int, tmp_path: Path) -> None:
    """Whichever file of a checkpoint fails: weights, the memory of terms, the optimizer's state."""
    folder = tmp_path / "run"
    command = forked_process.train(folder, *SETTINGS, terms=TERMS, file_size=size)
    assert command.wait() == 4, command.text()
    one_line(command, str(folder / "checkpoint-2"), "bytes free", "there is no checkpoint")
    assert not list(folder.glob("*checkpoint-*"))


def test_curves_that_cannot_be_written_do_not_stop_a_run(disk: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed_at(folder, 2, *SETTINGS, "logging.tensorboard=true", terms=())
    shutil.rmtree(folder / "tensorboard")
    disk("4k", path=folder / "tensorboard")
    command = forked_process.train(folder, *SETTINGS, "logging.tensorboard=true")
    assert command.wait() == 0, command.text()
    assert command.text().count("curves are no longer written") == 1
    assert "Traceback" not in command.text()


def test_a_signal_that_a_library_took_for_an_error_ends_the_run_as_one() -> None:
    def load() -> None:
        with Signals():
            with contextlib.suppress(Interrupted):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            raise BadInput("BartForConditionalGeneration cannot compute a loss: stopped")

    with pytest.raises(Interrupted) as stop:
        load()
    assert stop.value.code == 128 + signal.SIGTERM
