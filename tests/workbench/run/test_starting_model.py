"""Drift and retention of whole runs: in every file, again by `evaluate`, and never of the wrong starting model."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqreg.errors import BadInput, Interrupted
from seqreg.workbench.config import run_config
from seqreg.workbench.run import starting_model, train
from seqreg.workbench.run.record import RunRecord
from seqreg.workbench.run.trainer import FaultTolerantSeq2SeqTrainer
from seqreg.workbench.scores import evaluate as evaluation
from seqreg.workbench.scores.results import score_table
from tests.helpers import tiny_tasks
from tests.helpers.interrupted_runs import numbers

SMALL = [
    "data.limit={train: 24, validation: 10, test: 6}", "optimisation.max_steps=3", "optimisation.warmup_steps=0",
    "evaluation.eval_before_training=false", "evaluation.eval_steps=0", "evaluation.resamples=20",
    "generation.num_beams=1", "generation.max_length=8", "logging.diagnostics_steps=0", "model.vocab_size=400",
    "evaluation.drift_examples=8", "evaluation.per_device_eval_batch_size=4",
]  # fmt: skip
KL = ("kl_trained_start", "kl_start_trained")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BART from scratch, trained for a moment."""
    folder = tmp_path_factory.mktemp("pretrained") / "run"
    settings = [*SMALL, "logging.tensorboard=false", f"output={folder}"]
    train.train(run_config.resolve("quickstart", overrides=settings))
    return folder


def tuned(pretrained: Path, folder: Path, *further: str) -> run_config.Run:
    """A run on another task, with the first one as what may be forgotten."""
    settings = [*SMALL, "model.vocab_size=2000", f"model.name={pretrained}", f"output={folder}", *further]
    return run_config.resolve("quickstart", variants=["people"], overrides=settings)


@pytest.fixture(scope="module")
def finished(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, train.train(tuned(pretrained, folder))


def stored(folder: Path) -> Any:
    return json.loads((folder / "metrics.json").read_text())


def printed(metrics: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(score_table({"baseline": metrics}))
    return out.getvalue()


def test_a_model_from_scratch_is_compared_with_its_initial_weights(pretrained: Path) -> None:
    section = stored(pretrained)["drift"]
    assert section["examples"] == 8
    assert all(section[key] > 0 for key in (*KL, "weight_distance"))
    assert 0 < section["cka"] <= 1
    assert "retention" not in stored(pretrained)
    record = RunRecord.read(pretrained)
    run = run_config.load(pretrained)
    tokenizer = train.models.load_tokenizer(train.trained(pretrained).config, ())
    assert record is not None
    assert starting_model.digest(starting_model.rebuild(run, tokenizer, record.start)) == record.start


def test_every_file_has_the_same_numbers(pretrained: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    folder, metrics = finished
    section, kept = metrics["drift"], metrics["retention"]["synthetic_news"]
    assert stored(folder)["drift"] == section
    before, after = (stored(place)["scores"] for place in (pretrained, folder))
    assert kept["loss"]["before"] == pytest.approx(before["test"]["loss"], rel=1e-5)
    for name, key in (("loss", "loss"), ("rougeL", "score")):
        assert kept[name]["after"] == pytest.approx(after["synthetic_news"][key], abs=1e-6)
    assert kept["loss"]["before"] != kept["loss"]["after"]
    card, table = (folder / "README.md").read_text(), printed(metrics)
    for text in (card.replace("\\|", "|"), table):
        assert "KL(trained || start)" in text
        assert f"{section['kl_start_trained']:.4g}" in text
        assert f"{kept['loss']['before']:.4g}, {kept['loss']['after']:.4g}" in text
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for key in (*KL, "weight_distance", "cka"):
        assert [(one.step, one.value) for one in events.Scalars(f"trained_drift/{key}")] == [
            (0, key == "cka"), (3, pytest.approx(section[key], rel=1e-5))  # the start is where it is itself
        ]  # fmt: skip
    curve = events.Scalars("trained_retention/synthetic_news/loss")
    assert [(one.step, one.value) for one in curve] == [
        (0, pytest.approx(kept["loss"]["before"], rel=1e-5)), (3, pytest.approx(kept["loss"]["after"], rel=1e-5))
    ]  # fmt: skip
    (change,) = events.Scalars("trained_retention/score_change")
    assert change.value == pytest.approx(kept["rougeL"]["after"] - kept["rougeL"]["before"], rel=1e-5, abs=1e-5)
    (final,) = events.Tensors("result/text_summary")
    text = final.tensor_proto.string_val[0].decode()
    assert "| retention: synthetic\\_news |" in text or "| retention: synthetic_news |" in text
    assert f"{kept['loss']['before']:.4g}, {kept['loss']['after']:.4g}" in text


def test_evaluate_computes_them_again(finished: tuple[Path, dict[str, Any]], pretrained: Path, tmp_path: Path) -> None:
    folder, metrics = finished
    again = train.evaluate_run(folder, output=tmp_path / "again")
    assert again["retention"] == metrics["retention"]
    for key, value in numbers(metrics["drift"]).items():
        assert again["drift"][key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key
    start = train.measure(pretrained, folder)  # any folder: here the starting model itself
    assert [start["drift"][key] for key in (*KL, "weight_distance", "cka")] == [0.0, 0.0, 0.0, 1.0]
    kept = start["retention"]["synthetic_news"]["loss"]
    assert kept["before"] == kept["after"] == metrics["retention"]["synthetic_news"]["loss"]["before"]


def test_another_starting_model_is_noticed(
    finished: tuple[Path, dict[str, Any]], pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, folder = Path(shutil.copytree(pretrained, tmp_path / "start")), tmp_path / "run"
    train.train(tuned(start, folder, "logging.tensorboard=false", "data.also={}"))
    section = stored(folder)["drift"]
    assert numbers(section) == numbers(finished[1]["drift"])  # whatever is scored beside it
    weights = safetensors.torch.load_file(start / "model.safetensors")
    weights = {key: value + 1e-3 for key, value in weights.items()}
    safetensors.torch.save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    assert train.evaluate_run(folder)["drift"] == section  # what was measured stays
    assert "these are not the weights that the run started from" in " ".join(capsys.readouterr().err.split())
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "start": ""}))
    with pytest.raises(BadInput, match="does not say which weights the run started from"):
        starting_model.rebuild(run_config.load(folder), None, "")
    assert train.evaluate_run(folder)["drift"] == section


def test_a_run_that_was_stopped_does_not_score_the_start_twice(
    finished: tuple[Path, dict[str, Any]], pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []
    real = evaluation.evaluate

    def counted(*args: Any, **options: Any) -> Any:
        scored.append(f"{args[4]}{' before' if options.get('untrained') else ''}")
        return real(*args, **options)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "evaluate", counted)
    run = tuned(pretrained, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(FaultTolerantSeq2SeqTrainer, "train", stop)
        with pytest.raises(KeyboardInterrupt):
            train.train(run)
    assert scored == ["synthetic_news before"]
    metrics = train.train(run)
    assert scored == ["synthetic_news before", "validation", "test", "synthetic_news"]
    assert numbers(metrics["drift"]) == numbers(finished[1]["drift"])
    assert metrics["retention"] == finished[1]["retention"]


def struck(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    pytest.fail("the signal was not noticed")


def struck_in_a_library(*_: Any) -> None:
    """A signal while a model is loaded: what is raised is taken for an error of its files."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Interrupted as error:
        raise BadInput(f"no model can be loaded: {error}") from None


@pytest.mark.parametrize(("module", "name", "stop"), [
    (starting_model.drift, "measure", struck), (starting_model, "rebuild", struck_in_a_library),
])  # fmt: skip
def test_a_signal_while_it_is_measured_resumes_with_the_same_numbers(
    module: Any, name: str, stop: Any, finished: tuple[Path, dict[str, Any]], pretrained: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run = tuned(pretrained, tmp_path / "run", "logging.tensorboard=false")
    with monkeypatch.context() as patch:
        patch.setattr(module, name, stop)
        with pytest.raises(Interrupted, match="stopped after the last step, 3: run the same command to resume"):
            train.train(run)
    assert not (tmp_path / "run" / "metrics.json").exists()
    metrics = train.train(run)
    assert numbers(metrics["drift"]) == numbers(finished[1]["drift"])
    assert metrics["retention"] == finished[1]["retention"]


def test_both_can_be_switched_off(pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting_model, "rebuild", lambda *_: pytest.fail("the starting model was loaded"))
    off = ["evaluation.drift_examples=0", "evaluation.retention=false", "logging.tensorboard=false"]
    metrics = train.train(tuned(pretrained, tmp_path / "run", *off))
    assert not {"drift", "retention"} & set(metrics)
    assert "drift" not in printed(metrics)
    assert "synthetic_news" in metrics["scores"]


def test_a_new_head_has_a_drift_of_its_body_and_knew_nothing_before(tmp_path: Path) -> None:
    tiny_tasks.bert(tmp_path / "bert")
    colour, size = tiny_tasks.task(tmp_path, "colour"), tiny_tasks.task(tmp_path / "more", "colour", seed=9)
    run = run_config.resolve(
        "glue",
        terms=["r4f"],
        overrides=[
            f"task={colour}", f"data.path={tmp_path / 'colour'}", *tiny_tasks.SHORT, f"output={tmp_path / 'run'}",
            f"model.name={tmp_path / 'bert'}", f"data.also={{{size}: {tmp_path / 'more' / 'colour'}}}",
        ],
    )  # fmt: skip
    metrics = train.train(run)
    section = metrics["drift"]
    assert section["new_parameters"] == ["classifier.bias", "classifier.weight"]
    assert not set(KL) & set(section)
    assert section["body_kl_trained_start"] > 0
    assert "retention" not in metrics
    again = train.evaluate_run(tmp_path / "run")["drift"]
    for key in ("body_kl_trained_start", "body_kl_start_trained", "weight_distance", "cka"):
        assert again[key] == pytest.approx(section[key], rel=1e-4)
