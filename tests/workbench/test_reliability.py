"""The promises of docs/reliability.md, each with the fault injected for real into a real training."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers.trainer_pt_utils import safe_globals

from seqreg.build import term_names
from seqreg.workbench import cards, checkpoints, data, runs
from tests import faults, forked
from tests.workbench import samples
from tests.workbench.test_train import run_of

TERMS, SETTINGS = faults.TERMS, faults.SETTINGS
TIMES = ("seconds", "runtime", "per_second")


def log(folder: Path) -> str:
    """Everything that a training of a folder has printed, on one line."""
    path = folder.with_suffix(".log")
    return " ".join(path.read_text().split()) if path.exists() else ""


def same(folder: Path, *further: str, terms: tuple[str, ...] = TERMS) -> forked.Command:
    return forked.train(folder, *SETTINGS, *further, terms=terms)


def killed_at(folder: Path, step: int, *settings: str, terms: tuple[str, ...] = TERMS) -> Path:
    """A training that was killed, by SIGKILL, as soon as it had the checkpoint of a step."""
    command = forked.train(folder, *settings, terms=terms)
    assert command.until((folder / f"checkpoint-{step}").exists), log(folder)
    assert command.kill() == -signal.SIGKILL
    return folder


def numbers(found: Any) -> Any:
    """The same without what depends on the clock and on the run's name."""
    if isinstance(found, dict):
        kept = {key: value for key, value in found.items() if not key.endswith(TIMES)}
        return {key: numbers(value) for key, value in kept.items() if key != "best_model_checkpoint"}
    return [numbers(one) for one in found] if isinstance(found, list) else found


def metrics(folder: Path) -> Any:
    return numbers(json.loads((folder / "metrics.json").read_text()))


def history(folder: Path, step: int) -> Any:
    return numbers(json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert same(folder, "checkpoints.keep=9").wait() == 0, log(folder)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training, killed when it had the checkpoints of steps 2, 4 and 6."""
    return killed_at(tmp_path_factory.mktemp("stopped") / "run", 6, *SETTINGS, "checkpoints.keep=9")


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


# P1


@pytest.mark.slow
def test_p1_kills_at_random_instants_and_inside_saves(tmp_path: Path) -> None:
    tally = faults.run(6, seed=20, folder=tmp_path)
    assert (tally.kills, tally.same, tally.lost) == (6, 6, 0)


def test_p1_the_same_command_goes_on_and_ends_with_the_same_weights(copy: Path, whole: Path) -> None:
    assert same(copy, "checkpoints.keep=9").wait() == 0, log(copy)
    assert f"goes on from {copy / 'checkpoint-6'}" in log(copy)
    assert forked.weights(copy) == forked.weights(whole)


KINDS = {
    "every term": ((*(name for name in term_names() if name != "jachess"),), ["data.workers=2"]),
    "adafactor, groups, workers": (
        ("jachess", "uegr"), ["optimisation.optimizer=adafactor", "data.group=true", "data.workers=2"],
    ),
    "epochs, bf16": (
        ("bregman", "neftune"),
        ["optimisation.steps=null", "optimisation.epochs=2", "optimisation.precision=bf16", "optimisation.batch_size=6",
         "optimisation.accumulation=1"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_p1_every_kind_of_training_goes_on(kind: str, tmp_path: Path) -> None:
    """Killed at the fourth step; with `epochs` that is where the second epoch begins."""
    terms, further = KINDS[kind]
    settings = [
        "optimisation.steps=7", "optimisation.accumulation=3", "optimisation.learning_rate=1e-2", "evaluation.every=3",
        "checkpoints.every=4", "logging.anatomy_steps=2", "terms.bregman.switch=2", *further,
    ]  # fmt: skip
    settings = [word for word in settings if "bregman" not in word or "bregman" in terms]
    whole = forked.train(tmp_path / "whole", *settings, terms=terms)
    assert whole.wait() == 0, whole.text()
    folder = killed_at(tmp_path / "run", 4, *settings, terms=terms)
    assert forked.train(folder, *settings, terms=terms).wait() == 0, log(folder)
    assert forked.weights(folder) == forked.weights(tmp_path / "whole")
    assert metrics(folder) == metrics(tmp_path / "whole")


def test_p1_the_best_model_of_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    card, _ = cards.load("glue/stsb")
    rows = samples.folder(tmp_path / "data", card, train=24, held=8)
    settings = [
        "glue", "--variant", "stsb", *samples.tiny("roberta", rows), "logging.tensorboard=false",
        "optimisation.steps=8", "optimisation.learning_rate=1e-2", "evaluation.every=2", "checkpoints.every=4",
        "evaluation.best=true", "checkpoints.keep=1",
    ]  # fmt: skip
    assert forked.command(tmp_path / "whole", *settings, terms=("r4f",)).wait() == 0, log(tmp_path / "whole")
    command = forked.command(tmp_path / "run", *settings, terms=("r4f",))
    assert command.until((tmp_path / "run" / "checkpoint-4").exists), command.text()
    command.kill()
    assert forked.command(tmp_path / "run", *settings, terms=("r4f",)).wait() == 0, command.text()
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert forked.weights(tmp_path / "run") == forked.weights(tmp_path / "whole")
    state = json.loads((tmp_path / "run" / "checkpoint-8" / "trainer_state.json").read_text())
    scores = {entry["step"]: entry["eval_score"] for entry in state["log_history"] if "eval_score" in entry}
    best = max(scores, key=lambda step: scores[step])
    assert state["best_global_step"] == best
    assert state["best_model_checkpoint"] == str(tmp_path / "run" / f"checkpoint-{best}")
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-8", f"checkpoint-{best}"}


# P2


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
def test_p2_a_damaged_checkpoint_is_named_and_passed_over(
    how: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = runs.Record.read(copy)
    assert record is not None
    assert checkpoints.newest(copy, record.run) == copy / "checkpoint-6"
    damage(copy / "checkpoint-6", how)
    left = sorted(path.name for path in (copy / "checkpoint-6").iterdir())
    assert checkpoints.newest(copy, record.run) == copy / "checkpoint-4"
    assert f"{copy / 'checkpoint-6'} is passed over" in capsys.readouterr().err
    assert sorted(path.name for path in (copy / "checkpoint-6").iterdir()) == left


def test_p2_a_run_goes_on_from_the_newest_that_verifies_and_deletes_no_other(copy: Path, whole: Path) -> None:
    damage(copy / "checkpoint-6", "one bit of model.safetensors")
    spoilt = (copy / "checkpoint-6" / "model.safetensors").read_bytes()
    torn = copy / ".tmp-checkpoint-7"
    torn.mkdir()
    assert same(copy, "checkpoints.keep=9").wait() == 0, log(copy)
    assert f"{copy / 'checkpoint-6'} is passed over: model.safetensors has changed" in log(copy)
    assert f"{torn} is left alone" in log(copy)
    assert f"goes on from {copy / 'checkpoint-4'}" in log(copy)
    assert forked.weights(copy) == forked.weights(whole)
    assert (copy / "spoilt-checkpoint-6-1" / "model.safetensors").read_bytes() == spoilt
    assert torn.exists()


def test_p2_files_are_synced_and_sealed_before_the_checkpoint_has_its_name(
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


def test_p2_the_manifest_says_what_the_checkpoint_is_of(whole: Path) -> None:
    found = checkpoints.manifest(whole / "checkpoint-4")
    files = {path.name for path in (whole / "checkpoint-4").iterdir()} - {"manifest.json"}
    assert set(found["files"]) == files
    assert all(len(entry["sha256"]) == 64 and entry["size"] > 0 for entry in found["files"].values())
    assert (found["step"], found["world_size"]) == (4, 1)
    assert len(found["configuration"]) == len(found["data"]) == 64
    assert set(found["versions"]) == {"seqreg", "torch", "transformers", "python"}


def test_p2_only_sealed_checkpoints_are_rotated_and_never_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        with checkpoints.staged(tmp_path / f"checkpoint-{step}", {"run": "x"}, True, lambda: None) as aside:
            (aside / "a").write_text("a")
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()
    checkpoints.rotate(tmp_path, "x", 1, str(tmp_path / "checkpoint-2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]


# P3


def test_p3_generators_memory_and_counts_are_in_the_checkpoint(whole: Path) -> None:
    folder = whole / "checkpoint-4"
    with safe_globals():
        draws = torch.load(folder / "rng_state.pth", weights_only=True)
    assert {"python", "numpy", "cpu"} <= set(draws)
    memory = safetensors.torch.load_file(folder / "seqreg_terms.safetensors")
    assert int(memory["bregman/updates"]) == 3
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    progress = json.loads((folder / "progress_0.json").read_text())
    assert {"loss", "total", "logged", "sums", "shares", "owed", "health", "seconds", "monitor"} <= set(progress)


def test_p3_curves_and_scores_of_a_resumed_run_are_those_of_an_undisturbed_one(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = [*SETTINGS, "logging.every=3", "logging.tensorboard=true", "logging.smoothness_steps=3"]
    assert forked.train(tmp_path / "whole", *settings).wait() == 0, log(tmp_path / "whole")
    folder = killed_at(tmp_path / "run", 4, *settings, terms=())
    assert forked.train(folder, *settings).wait() == 0, log(folder)
    assert history(folder, 8) == history(tmp_path / "whole", 8)
    assert metrics(folder) == metrics(tmp_path / "whole")
    curves = []
    for path in (folder, tmp_path / "whole"):
        events = EventAccumulator(str(path / "tensorboard"))
        events.Reload()
        names = [name for name in events.Tags()["scalars"] if not name.endswith(TIMES)]
        curves.append({name: [(one.step, one.value) for one in events.Scalars(name)] for name in names})
    assert curves[0] == curves[1]
    assert [step for step, _ in curves[0]["train/loss"]] == [3, 6]


# P4

FAULTY = "tests.workbench.faulty.Faulty"


def faulty(folder: Path, at: str, how: str, *further: str) -> forked.Command:
    steps = ("optimisation.steps=5", "checkpoints.every=1", "checkpoints.keep=9", "logging.every=1")
    term = f"terms.faulty={{term: {FAULTY}, at: {at}, how: {how}}}"
    return forked.train(folder, *steps, term, *further, terms=("bregman",))


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / f"checkpoint-{step}" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("how", "accumulation"), [("loss", 1), ("loss", 3), ("gradient", 2)])
def test_p4_a_step_that_is_not_finite_is_not_applied(how: str, accumulation: int, tmp_path: Path) -> None:
    command = faulty(tmp_path / "run", "[2]", how, f"optimisation.accumulation={accumulation}")
    assert command.wait() == 0, command.text()
    folder = tmp_path / "run"
    moments = [torch.load(folder / f"checkpoint-{n}" / "optimizer.pt", weights_only=True)["state"] for n in (2, 4)]
    assert float(moments[1][0]["step"]) == float(moments[0][0]["step"]) + 1  # of two steps one was made
    assert not (folder / "checkpoint-3").exists()  # and nothing is saved in bad times
    assert all(value.isfinite().all() for value in weights_at(folder, 5).values())
    what = "base" if how == "loss" else "gradient"
    assert f"step 3: {what}" in command.text()
    assert "not finite, the step is not made (training rows" in command.text()
    found = metrics(folder)["train"]
    assert (found["skipped"], found["dropped"], found["steps"]) == (1, {}, 5)
    story = json.loads((folder / "crash" / "step-3" / "crash.json").read_text())
    assert len(story["rows"]) == 2 * accumulation
    assert all(0 <= row < 24 for row in story["rows"])
    losses = [entry["loss"] for entry in history(folder, 5) if "loss" in entry]
    assert [loss == loss for loss in losses] == [True, True, False, True, True]  # the third is not a number, not 0


def test_p4_one_term_that_is_not_finite_is_dropped_for_the_step(tmp_path: Path) -> None:
    command = faulty(tmp_path / "run", "[1, 3]", "term")
    assert command.wait() == 0, command.text()
    assert "step 2: faulty not finite, the step is made without (training rows" in command.text()
    assert metrics(tmp_path / "run")["train"]["dropped"] == {"faulty": 2}
    plain = faulty(tmp_path / "plain", "[]", "term")
    assert plain.wait() == 0, plain.text()
    assert forked.weights(tmp_path / "run") == forked.weights(tmp_path / "plain")


@pytest.mark.parametrize("how", ["loss", "term"])
def test_p4_too_many_in_a_row_stop_the_run_and_leave_the_last_checkpoint(how: str, tmp_path: Path) -> None:
    command = faulty(tmp_path / "run", "[2, 3, 4]", how)
    assert command.wait() == 3
    assert "3 steps in a row were not finite" in command.text()
    assert "Traceback" not in command.text()
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-1", "checkpoint-2"]
    assert checkpoints.fault(tmp_path / "run" / "checkpoint-2") is None


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_p4_the_crash_folder_replays_the_step(how: str, tmp_path: Path) -> None:
    command = faulty(tmp_path / "run", "[2]", how, "optimisation.accumulation=2")
    assert command.wait() == 0, command.text()
    crash = tmp_path / "run" / "crash" / "step-3"
    again = forked.Command("replay", crash, log=tmp_path / "replay.log")
    assert again.wait() == 0, again.text()
    bad = "base │ nan" if how == "loss" else "faulty │ 0 "
    assert bad in again.text()
    assert ("first module whose output is not finite: model." in again.text()) == (how == "loss")
    assert "gradients that are not finite: 0 parameters" not in again.text()
    os.truncate(crash / "batch.safetensors", 50)
    refused = forked.Command("replay", crash, log=tmp_path / "refused.log")
    assert refused.wait() == 2
    assert "cannot be replayed: batch.safetensors has 50 bytes" in refused.text()


# P5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_p5_a_signal_finishes_the_step_and_saves(number: int, code: int, tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    command = same(folder, "checkpoints.keep=9", "logging.every=2")
    assert command.until(lambda: "step 4 loss" in log(folder))
    command.send(number)
    assert command.wait() == code, log(folder)
    (line,) = [line for line in folder.with_suffix(".log").read_text().splitlines() if line.startswith("seqreg: ")]
    assert "the same command goes on" in line or "stopped by signal" in line
    assert "Traceback" not in log(folder)
    newest = checkpoints.sealed(folder, json.loads((folder / "run.json").read_text())["run"])[-1]
    assert checkpoints.fault(newest) is None
    assert same(folder, "checkpoints.keep=9").wait() == 0, log(folder)
    assert f"goes on from {newest}" in log(folder)
    assert forked.weights(folder) == forked.weights(whole)
    assert history(folder, 8) == history(whole, 8)


LONG = ("data.limit={train: 24, validation: 50, test: 10}", "evaluation.batch_size=1", "logging.every=2")
"""Evaluations that take seconds."""


@pytest.mark.parametrize("where", ["an evaluation", "the last evaluation"])
def test_p5_a_signal_during_an_evaluation(where: str, tmp_path: Path) -> None:
    last = where == "the last evaluation"
    settings = [word for word in SETTINGS if last <= ("evaluation" not in word and "checkpoints" not in word)]
    settings += [*LONG, "optimisation.steps=4", *([] if last else ["evaluation.every=2"])]
    assert forked.train(tmp_path / "whole", *settings).wait() == 0, log(tmp_path / "whole")
    folder = tmp_path / "run"
    command = forked.train(folder, *settings)
    step = 4 if last else 2
    assert command.until(lambda: f"step {step} loss" in log(folder))
    time.sleep(0.3)
    command.send(signal.SIGTERM)
    assert command.wait() == 143, log(folder)
    assert "Traceback" not in log(folder)
    assert "validation score" not in log(folder)  # it did not wait for the end
    assert checkpoints.fault(folder / f"checkpoint-{step}") is None
    assert forked.train(folder, *settings).wait() == 0, log(folder)
    assert ("step 2 validation score" in log(folder)) != last  # made up for
    assert forked.weights(folder) == forked.weights(tmp_path / "whole")
    assert metrics(folder) == metrics(tmp_path / "whole")


def test_p5_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = same(folder, *LONG)
    assert command.until(lambda: "step 2 loss" in log(folder))
    os.kill(command.process.pid or 0, signal.SIGSTOP)  # both are there before it can look
    command.send(signal.SIGTERM)
    command.send(signal.SIGINT)
    command.send(signal.SIGCONT)
    assert command.wait() in (-signal.SIGTERM, -signal.SIGINT)


# P6


def test_p6_other_settings_are_refused_with_a_difference(copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock"}
    command = same(copy, "checkpoints.keep=9", "optimisation.learning_rate=3e-3", "terms.smart=null")
    assert command.wait() == 2
    for piece in (
        "its run was begun with other settings:",
        "optimisation.learning_rate: 0.01 there, 0.003 now",
        "terms.smart.",
        "nothing now",
        "--allow-change optimisation.learning_rate",
    ):
        assert piece in command.text()
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != ".lock"} == before
    wrong = same(copy, "checkpoints.keep=9", "--allow-change", "optimisation.learning_rat")
    assert wrong.wait() == 2
    assert "did you mean 'optimisation.learning_rate'?" in wrong.text()


def test_p6_an_allowed_change_takes_effect(copy: Path, whole: Path) -> None:
    rate = "optimisation.learning_rate"
    command = same(copy, "checkpoints.keep=9", f"{rate}=3e-3", "--allow-change", rate)
    assert command.wait() == 0, command.text()
    assert f"changed since the run was begun: {rate}" in command.text()
    assert forked.weights(copy) != forked.weights(whole)
    rates = {entry["step"]: entry["learning_rate"] for entry in history(copy, 8) if "loss" in entry}
    old = {entry["step"]: entry["learning_rate"] for entry in history(whole, 8) if "loss" in entry}
    assert rates[6] == old[6]
    assert rates[8] == pytest.approx(0.3 * old[8])
    assert same(copy, "checkpoints.keep=9", f"{rate}=3e-3").wait() == 0  # it is the run's own setting now


def test_p6_other_data_and_another_world_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("gigaword", tmp_path, variants=[])
    old = runs.Record.of(run)
    old.settings[runs.ROWS] = "a" * 64
    new = runs.Record.of(run)
    new.settings[runs.ROWS] = "b" * 64
    with pytest.raises(runs.BadInput, match=r'data.rows: "a+\.\.\. there, "b+\.\.\. now'):
        runs.check_same(tmp_path, old, new, [])
    assert runs.check_same(tmp_path, old, new, ["data.rows"]) == ["data.rows"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    new = runs.Record.of(run)
    with pytest.raises(runs.BadInput, match="world_size: 1 there, 2 now"):
        runs.check_same(tmp_path, old, new, [])


def test_p6_data_that_changed_between_are_noticed(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, variants=[])
    splits = runs.fingerprint(samples_of(run))
    rows = samples.rows(run.card, 16)
    rows[7]["summary"] += " x"
    samples.write(tmp_path / "data" / "train.jsonl", rows)
    assert runs.fingerprint(samples_of(run)) != splits


def samples_of(run: Any) -> Any:
    return data.load(run.card, run.config.data)


# P7


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    """Mounts small disks of memory."""
    mounted: list[Path] = []

    def mount(size: str, *options: str) -> Path:
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        words = ",".join([f"size={size}", *options])
        if os.system(f"mount -t tmpfs -o {words} tmpfs {path} 2>/dev/null"):
            pytest.skip("only root may mount a disk; test_p7_a_file_that_cannot_grow does without")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        os.system(f"umount {path}")


def one_line(command: forked.Command, *pieces: str) -> None:
    lines = [line for line in command.log.read_text().splitlines() if line.startswith("seqreg: ")]
    assert len(lines) == 1, command.text()
    assert all(piece in lines[0] for piece in pieces), lines[0]
    assert "Traceback" not in command.text()


def test_p7_a_disk_that_fills_up(disk: Any, tmp_path: Path, whole: Path) -> None:
    folder = disk("4m") / "run"
    command = forked.train(folder, *SETTINGS, terms=TERMS, log=tmp_path / "log")
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
    again = forked.train(folder, *SETTINGS, terms=TERMS, log=tmp_path / "log")
    assert again.wait() == 0, again.text()
    assert forked.weights(folder) == forked.weights(whole)


def test_p7_room_is_looked_for_before_training(disk: Any, tmp_path: Path) -> None:
    folder = disk("200k") / "run"
    command = forked.train(folder, *SETTINGS, terms=TERMS, log=tmp_path / "log")
    assert command.wait() == 4
    one_line(command, f"{folder}: ", "bytes free, about", "needed (3 checkpoints of")
    assert not folder.exists()


def test_p7_an_output_that_cannot_be_written(disk: Any, tmp_path: Path) -> None:
    folder = disk("4m", "ro") / "run"
    command = forked.train(folder, *SETTINGS, terms=TERMS, log=tmp_path / "log")
    assert command.wait() == 4
    one_line(command, f"{folder}: Read-only file system", "bytes free")


@pytest.mark.parametrize("size", [20_000, 60_000, 100_000])
def test_p7_a_file_that_cannot_grow(size: int, tmp_path: Path) -> None:
    """Whichever file of a checkpoint fails: weights, the memory of terms, the optimizer's state."""
    folder = tmp_path / "run"
    command = forked.train(folder, *SETTINGS, terms=TERMS, file_size=size)
    assert command.wait() == 4, command.text()
    one_line(command, str(folder / "checkpoint-2"), "bytes free", "there is no checkpoint")
    assert not list(folder.glob("*checkpoint-*"))


def test_p7_curves_that_cannot_be_written_do_not_stop_a_training(disk: Any, tmp_path: Path) -> None:
    folder, small = tmp_path / "run", disk("4k")
    killed_at(folder, 2, *SETTINGS, "logging.tensorboard=true", terms=())
    shutil.rmtree(folder / "tensorboard")
    (folder / "tensorboard").symlink_to(small)
    command = forked.train(folder, *SETTINGS, "logging.tensorboard=true")
    assert command.wait() == 0, command.text()
    assert command.text().count("curves are no longer written") == 1
    assert "Traceback" not in command.text()


# P8


def test_p8_a_finished_run_is_left_alone(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"}
    for further in ([], ["--resume"]):
        command = same(whole, "checkpoints.keep=9", *further)
        assert command.wait() == 0, command.text()
        assert "this run is finished, nothing to do" in command.text()
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.name != ".lock"} == before


def test_p8_no_step_too_many_after_the_last(copy: Path, whole: Path, tmp_path: Path) -> None:
    for path in copy.glob("checkpoint-*"):
        shutil.rmtree(path)
    record, other = runs.Record.read(copy), runs.Record.read(whole)
    assert record is not None
    assert other is not None
    for step in (2, 8):
        shutil.copytree(whole / f"checkpoint-{step}", copy / f"checkpoint-{step}")
    (copy / "run.json").write_text((copy / "run.json").read_text().replace(record.run, other.run))
    assert same(copy, "checkpoints.keep=9").wait() == 0, log(copy)
    assert f"goes on from {copy / 'checkpoint-8'}" in log(copy)
    assert metrics(copy) == metrics(whole)
    assert forked.weights(copy) == forked.weights(whole)


# P9


def test_p9_looking_does_not_change_the_weights(tmp_path: Path) -> None:
    settings = ["optimisation.steps=5", "optimisation.learning_rate=1e-2", "data.workers=1"]
    off = ["logging.every=1000", "checkpoints.minutes=0"]
    on = [
        "logging.every=1", "logging.tensorboard=true", "logging.anatomy_steps=1", "logging.smoothness_steps=1",
        "evaluation.every=1", "evaluation.before=true", "checkpoints.every=1", "checkpoints.minutes=0.0001",
    ]  # fmt: skip
    for name, further in (("off", off), ("on", on)):
        command = forked.train(tmp_path / name, *settings, *further, terms=TERMS)
        assert command.wait() == 0, command.text()
    assert forked.weights(tmp_path / "on") == forked.weights(tmp_path / "off")


# One process a folder, and nothing that can run code


def test_a_second_process_is_refused_at_once(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    first = same(folder, "checkpoints.keep=9")
    assert first.until((folder / "run.json").exists)
    os.kill(first.process.pid or 0, signal.SIGSTOP)
    for further in ([], ["--overwrite"], ["--resume"]):
        second = forked.train(
            folder, *SETTINGS, "checkpoints.keep=9", *further, terms=TERMS, log=tmp_path / "second.log"
        )
        assert second.wait(30) == 2
        assert f"process {first.process.pid} on" in second.text()
    os.kill(first.process.pid or 0, signal.SIGCONT)
    assert first.wait() == 0, log(folder)
    assert forked.weights(folder) == forked.weights(whole)


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
    command = same(copy, "checkpoints.keep=9")
    assert command.wait() == 2
    one_line(command, "checkpoint-6", "holds more than numbers")
    assert not (tmp_path / "owned").exists()
