"""Spoilt files of a run, by a generator of damage: one line each, no traceback, no hang, nothing written elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from seqreg.cli.predict import predict
from seqreg.errors import BadInput
from seqreg.workbench.config import run_config
from seqreg.workbench.data import loading
from seqreg.workbench.data.encoding import INDEX
from seqreg.workbench.run import checkpoints, nonfinite, replay, rng, run_directory, train
from seqreg.workbench.run.nonfinite import StepAttempt
from tests.fuzz import limited
from tests.helpers import damage, sample_files
from tests.workbench.run.test_train import run_of

SETTINGS = (
    "logging.tensorboard=false",
    "optimisation.max_steps=2",
    "checkpoints.save_steps=1",
    "checkpoints.save_total_limit=9",
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has the checkpoints of its two steps, and is not finished."""
    tmp_path = tmp_path_factory.mktemp("damaged")
    train.train(run_of("gigaword", tmp_path, *SETTINGS, variants=[]))
    folder = tmp_path / "run"
    record = run_directory.RunRecord.read(folder)
    assert record is not None
    run_directory.replace(record, finished=False).write(folder)
    shutil.rmtree(folder / "checkpoint-2")
    return tmp_path


def copied(stopped: Path, tmp_path: Path) -> tuple[Path, run_config.Run]:
    folder = Path(shutil.copytree(stopped / "run", tmp_path / "run"))
    return folder, run_of("gigaword", stopped, *SETTINGS, f"output={folder}", variants=[])


def sealed_again(folder: Path) -> None:
    facts = {key: value for key, value in checkpoints.manifest(folder).items() if key != "files"}
    checkpoints.seal(folder, facts)


def refused(what: str, error: BadInput, *names: str) -> None:
    assert len(error.lines) == 1 or "other settings" in error.lines[0], what
    assert "\n" not in error.lines[0], what
    assert any(name in str(error) for name in names), (what, str(error))


def test_spoilt_records_of_a_run_are_named(stopped: Path, tmp_path: Path) -> None:
    folder, run = copied(stopped, tmp_path)
    path = folder / "run.json"
    splits = loading.load(run.card, run.config.data)
    count = 0
    for spoilt in (damage.spoilt_bytes(path), damage.spoilt_json(path, 250)):
        for what in spoilt:
            with limited(), contextlib.ExitStack() as stack:
                directory = run_directory.RunDirectory(folder, run, stack)
                try:
                    directory.check()
                    directory.check_data(splits)
                    _ = directory.finished(), directory.record.facts
                except BadInput as error:
                    count += 1
                    refused(what, error, "run.json", "its run was started with other settings", "was finished, but")
    assert count > 100


def test_spoilt_manifests_are_named(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = copied(stopped, tmp_path)
    record = run_directory.RunRecord.read(folder)
    assert record is not None
    checkpoint = folder / "checkpoint-1"
    path = checkpoint / "manifest.json"
    assert checkpoints.newest(folder, record.run) == checkpoint
    for spoilt in (damage.spoilt_bytes(path), damage.spoilt_json(path, 250)):
        for what in spoilt:
            with limited():
                found = checkpoints.newest(folder, record.run)
            said = capsys.readouterr().err
            assert found == checkpoint or "is passed over" in said, what
    for name in ("checkpoint-²", "checkpoint-x", "checkpoint-" + "9" * 200):
        (folder / name).mkdir()
    assert checkpoints.newest(folder, record.run) == checkpoint


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "trainer_state.json"]
)
def test_a_checkpoint_with_a_file_that_cannot_be_read_names_it(name: str, stopped: Path, tmp_path: Path) -> None:
    folder, run = copied(stopped, tmp_path)
    path = folder / "checkpoint-1" / name
    ways = ("truncated", "random", "text", "empty", "a state that is a list", "not UTF-8")
    for what in damage.spoilt_bytes(path):
        if what in ways:
            sealed_again(path.parent)
            with limited(), pytest.raises(BadInput) as caught:
                train.train(run)
            assert len(caught.value.lines) == 1
            refused(what, caught.value, str(path))
            assert "move checkpoint-1 away" in str(caught.value) or name == "model.safetensors"
    assert not (folder / "model.safetensors").is_symlink()


@pytest.mark.parametrize("name", ["trainer_state.json", "progress_0.json"])
def test_a_state_of_another_form_names_its_file(name: str, stopped: Path, tmp_path: Path) -> None:
    folder, run = copied(stopped, tmp_path)
    path = folder / "checkpoint-1" / name
    before = run_directory.RunRecord.read(folder)
    assert before is not None
    count = 0
    for what in damage.spoilt_json(path, 12, seed=3):
        sealed_again(path.parent)
        kept = (folder / "run.json").read_bytes()
        try:
            with limited():
                train.train(run)
        except BadInput as error:
            count += 1
            refused(what, error, "checkpoint-1")
        (folder / "run.json").write_bytes(kept)
        for later in folder.glob("*checkpoint-2*"):
            shutil.rmtree(later)
    assert count


@pytest.fixture(scope="module")
def crashed(stopped: Path) -> Path:
    """A step that was kept for a replay."""
    run = run_of("gigaword", stopped, *SETTINGS, variants=[])
    with contextlib.ExitStack() as stack:
        directory = run_directory.RunDirectory(stopped / "run", run, stack)
        directory.check()
        directory.take()
    trainer = train.make_trainer(train.prepare(run), stopped / "run", directory=directory)
    rows = [trainer.train_dataset[index] for index in range(2)]
    batch = {key: value for key, value in trainer.data_collator(rows).items() if key != INDEX}
    attempt = StepAttempt(rows=[0, 1], batches=[batch], faults={"base"}, rng_state=rng.rng_state())
    found = nonfinite.write_crash(trainer, attempt, True)
    assert found is not None
    return found


def test_spoilt_crash_folders_are_named(crashed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(crashed.parents[1], tmp_path / "run")) / "crash" / crashed.name
    replay.replay(folder)
    count = 0
    for name, most in (("crash.json", 120), ("batch.safetensors", 0), ("manifest.json", 60)):
        path = folder / name
        for spoilt in (damage.spoilt_bytes(path), damage.spoilt_json(path, most) if most else ()):
            for what in spoilt:
                if name != "manifest.json" and os.path.isfile(path):
                    sealed_again(folder)
                try:
                    with limited():
                        nonfinite.read_crash(folder)
                except BadInput as error:
                    count += 1
                    refused(what, error, str(folder))
        sealed_again(folder)
    assert count > 60
    story = (folder / "crash.json").read_text()
    (folder / "crash.json").write_text(story.replace('"batches": 1', f'"batches": {10**12}'))
    sealed_again(folder)
    with limited(), pytest.raises(BadInput, match=r"tells of 1000000000000 batches, and batch.safetensors holds 1"):
        replay.replay(folder)


# Folders that cannot be


def test_impossible_output_paths_are_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    names = ("x" * 256, "x" * 100_000, "a/" * 3000, "loop", "loop/run", "a\0b")
    for name in names:
        run = run_of("gigaword", tmp_path, *SETTINGS, variants=[])
        made = run_config.Run(run.config.model_copy(update={"output": str(tmp_path / name)}), run.card, run.origins)
        with pytest.raises(BadInput, match=r"output=") as caught:
            train.train(made)
        assert len(caught.value.lines) == 1
        assert len(str(caught.value)) < 600


# Links, and modules of others


def test_links_in_a_run_s_folder_are_not_followed(stopped: Path, tmp_path: Path) -> None:
    folder, run = copied(stopped, tmp_path)
    victim, others = tmp_path / "victim", tmp_path / "others"
    victim.write_text("precious")
    others.mkdir()
    (others / "precious.txt").write_text("precious")
    for name in (
        ".lock",
        "crash",
        "checkpoint-2",
        ".tmp-model",
        ".tmp-run.json",
        ".tmp-checkpoint-2",
        ".old-x",
        "tensorboard",
        "evidence",
    ):
        for target in (victim, others):
            link = folder / name
            _ = shutil.rmtree(link) if link.is_dir() and not link.is_symlink() else link.unlink(missing_ok=True)
            link.symlink_to(target)
            for overwrite in (False, True):
                with pytest.raises(BadInput, match=r"a symbolic link: a run writes to its own folder alone"):
                    train.train(run, overwrite=overwrite)
        link.unlink()
    for name in ("metrics.json", "README.md", "config.yaml", "predictions.jsonl", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
    train.train(run, overwrite=True)
    assert victim.read_text() == "precious"
    assert [path.name for path in others.iterdir()] == ["precious.txt"]


@pytest.fixture
def foreign(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody else's run, whose config.yaml names a module that says when it is imported."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "evil_term.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder, _ = copied(stopped, tmp_path)
    record = run_directory.RunRecord.read(folder)
    assert record is not None
    run_directory.replace(record, finished=True).write(folder)
    text = (folder / "config.yaml").read_text()
    assert "terms: {}" in text
    (folder / "config.yaml").write_text(text.replace("terms: {}", "terms: {x: {term: evil_term.Term}}"))
    return folder


def test_a_run_of_others_is_used_without_importing_its_modules(foreign: Path, tmp_path: Path) -> None:
    train.evaluate_run(foreign)
    source = sample_files.write(tmp_path / "in.jsonl", [{"document": "the cat sat", "summary": "cat"}])
    assert predict(foreign, str(source), str(tmp_path / "out.jsonl")) == 1
    assert "evil_term" not in sys.modules


def test_commands_that_import_modules_of_a_run_ask_first(foreign: Path, crashed: Path) -> None:
    shutil.copytree(crashed, foreign / "crash" / "step-1", dirs_exist_ok=True)
    for attempt in (lambda: replay.replay(foreign / "crash" / "step-1"), lambda: run_config.load(foreign)):
        with pytest.raises(BadInput, match=r"terms.x: the module evil_term.Term would be imported.*--trust"):
            attempt()
    assert "evil_term" not in sys.modules
    with pytest.raises(BadInput, match="cannot be imported: SystemExit: imported"):
        run_config.load(foreign, trust=True)


def test_a_state_with_code_is_not_run(stopped: Path, tmp_path: Path) -> None:
    folder, run = copied(stopped, tmp_path)
    torch.save({"state": Path("x")}, folder / "checkpoint-1" / "scheduler.pt")
    sealed_again(folder / "checkpoint-1")
    with pytest.raises(BadInput, match=r"scheduler.pt: holds more than numbers"):
        train.train(run)
