"""Early stopping, also of a run that is resumed; and curves that go elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from seqreg.errors import BadInput
from seqreg.workbench.config import cards, run_config
from seqreg.workbench.data import loading
from seqreg.workbench.run import launch, train
from seqreg.workbench.run.checkpoints import digest
from tests.helpers import sample_files


def run_of(tmp_path: Path, *further: str) -> run_config.Run:
    card, _ = cards.load("text_pairs")
    if not (tmp_path / "data").exists():
        sample_files.folder(tmp_path / "data", card, train=12, held=6)
    settings = ["task=text_pairs", *sample_files.tiny("bart", tmp_path / "data"), "optimisation.max_steps=9"]
    settings += ["evaluation.eval_before_training=false", "logging.tensorboard=false", f"output={tmp_path / 'run'}"]
    return run_config.resolve("quickstart", overrides=[*settings, *further])


STOPPING = ["evaluation.eval_steps=1", "evaluation.early_stopping_patience=2", "optimisation.learning_rate=1e-12",
            "checkpoints.save_steps=1", "checkpoints.save_total_limit=9"]  # fmt: skip


def test_a_resumed_run_stops_where_the_undisturbed_one_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The score never changes: the first evaluation is the best one, and two more are not better."""
    run, folder = run_of(tmp_path, *STOPPING), tmp_path / "run"
    assert train.train(run)["train"]["steps"] == 3
    assert "stopped early, after step 3: rougeL was not better in 2 evaluations" in capsys.readouterr().err
    weights = digest(folder / "model.safetensors")
    for gone in ((), ("checkpoint-3",), ("checkpoint-3", "checkpoint-2")):  # killed at the end, and at two steps before
        shutil.copytree(folder, tmp_path / "whole")
        for name in gone:
            shutil.rmtree(folder / name)
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**record, "finished": False}))
        assert train.train(run)["train"]["steps"] == 3
        assert digest(folder / "model.safetensors") == weights
        shutil.rmtree(folder)
        (tmp_path / "whole").rename(folder)


def test_early_stops_and_the_best_step_are_in_the_files(tmp_path: Path) -> None:
    kept = [*STOPPING, "evaluation.load_best_model_at_end=true"]
    for name, settings, model in (("last", STOPPING, 3), ("best", kept, 1), ("alone", STOPPING[:3], 3)):
        folder = tmp_path / name
        train.train(run_of(tmp_path, *settings, f"output={folder}"))
        stored = json.loads((folder / "metrics.json").read_text())["train"]
        found = {key: stored[key] for key in ("steps", "stopped_early", "best_step", "model_step")}
        assert found == {"steps": 3, "stopped_early": True, "best_step": 1, "model_step": model}, name
        card = (folder / "README.md").read_text()
        own = "which the model is of" if model == 1 else "and the model is that of step 3"
        assert f"for 3 steps, where it stopped early; the best validation score is that of step 1, {own}. All" in card
    whole = run_of(tmp_path, *STOPPING, "optimisation.max_steps=3", f"output={tmp_path / 'whole'}")
    assert train.train(whole)["train"]["stopped_early"] is False  # all steps were made
    train.train(run_of(tmp_path, "optimisation.max_steps=2", f"output={tmp_path / 'plain'}"))
    stored = json.loads((tmp_path / "plain/metrics.json").read_text())["train"]
    assert (stored["stopped_early"], stored["best_step"], stored["model_step"]) == (False, None, 2)
    assert "Trained with seed 1 for 2 steps. All" in (tmp_path / "plain/README.md").read_text()


def test_what_early_stopping_needs(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"early_stopping_patience=2 needs evaluation\.eval_steps > 0"):
        run_of(tmp_path, "evaluation.early_stopping_patience=2")
    config = run_of(tmp_path, *STOPPING).config.for_evaluation("folder")
    assert config.evaluation.early_stopping_patience == 0


def test_it_is_said_where_judging_examples_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, *STOPPING)
    splits = loading.load(run.card, run.config.data)
    splits.sets.pop("test", None)
    train.warn_of_choosing(run, splits)
    assert "evaluation.early_stopping_patience: the task is judged by its validation" in capsys.readouterr().err
    splits.sets["test"] = splits.sets["validation"]
    train.warn_of_choosing(run, splits)
    assert capsys.readouterr().err == ""


def test_curves_go_where_they_are_reported_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' callbacks, whatever they are; here by one that writes down what it is given."""
    logs: list[dict[str, Any]] = []

    class Recorder(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            entries.append(dict(logs))

    entries = logs
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "wandb", Recorder)
    run = run_of(tmp_path, "logging.report_to=[wandb]", "evaluation.eval_steps=1", "optimisation.max_steps=1")
    with pytest.raises(BadInput, match=r"logging\.report_to: the package wandb is not installed"):
        launch.check_trackers(["wandb"])
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(launch, "check_trackers", lambda names: None)
    train.train(run)
    assert any("part/base" in entry for entry in logs)
    assert any("eval_rougeL" in entry for entry in logs)
    assert train.arguments(run.config.for_evaluation("x"), tmp_path, True).report_to == []
    assert run_of(tmp_path, "logging.report_to=wandb").config.logging.report_to == ["wandb"]
    assert run_of(tmp_path, "logging.report_to=none").config.logging.report_to == []
    with pytest.raises(BadInput, match=r"logging\.report_to\.0='tensorboard': expected 'wandb'"):
        run_of(tmp_path, "logging.report_to=[tensorboard]")
