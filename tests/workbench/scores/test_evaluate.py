"""Scores of splits: what an average is taken over, and that output which has collapsed is noticed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqreg.cli import predict, training
from seqreg.errors import BadInput
from seqreg.metrics.variety import collapse, variety
from seqreg.studies.common import trained_model
from seqreg.workbench.config import cards, run_config
from seqreg.workbench.data.encoding import by_length
from seqreg.workbench.data.examples import Example
from seqreg.workbench.run import train
from seqreg.workbench.scores import evaluate
from seqreg.workbench.scores.evaluate import Scored, Scorer, score_classes, score_texts, warn_of_collapse, with_average
from seqreg.workbench.scores.results import score_table
from tests.helpers import sample_files


def test_the_xnli_average_is_over_the_tested_languages() -> None:
    card, _ = cards.load("xnli")
    found = {"validation": Scored({"score": 99.0, "accuracy": 99.0})}
    found |= {name: Scored({"score": place, "accuracy": place}) for place, name in enumerate(card.evaluations)}
    assert len(card.evaluations) == 15
    average = with_average(found, card)["average"]
    assert average.metrics == {"score": 7.0, "accuracy": 7.0}
    assert average.signature.startswith("mean of 15 sets: test, test_fr, ")
    few = {name: found[name] for name in ("validation", "test")}
    assert with_average(few, card) == few  # one language is no average


def test_predictions_are_in_the_order_of_the_examples_whatever_the_order_of_evaluation() -> None:
    run = run_config.resolve("glue", overrides=["task=glue/sst2", "evaluation.resamples=100"])
    examples = [Example("word " * count, None, None, label=count // 5 % 2) for count in (3, 9, 1, 7, 5)]
    order = by_length(examples)
    assert order == [1, 3, 4, 0, 2]
    logits = np.array([[0.5, examples[place].label or 0] for place in order])
    repeated = np.concatenate([logits, logits[:1]])  # as several processes do
    scorer = Scorer(examples, run, None)
    assert scorer(SimpleNamespace(predictions=repeated))["accuracy"] == 100
    assert [line["index"] for line in scorer.last.predictions] == [0, 1, 2, 3, 4]
    assert [line["reference"] for line in scorer.last.predictions] == [
        "negative",
        "positive",
        "negative",
        "positive",
        "positive",
    ]


def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(evaluate, "warn", lines.append)
    monkeypatch.setattr(predict, "warn", lines.append)
    return lines


def texts(said: list[str]) -> Scored:
    card, _ = cards.load("text_pairs")
    return score_texts(said, [Example("a", None, f"headline {n}") for n in range(len(said))], card, resamples=5)


def test_one_text_for_all_is_a_warning_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = told(monkeypatch)
    scored = texts(["police say two dead"] * 60)
    numbers = {key: scored.metrics[key] for key in ("distinct", "most_common", "most_common_reference", "collapsed")}
    assert numbers == pytest.approx(
        {"distinct": 100 / 60, "most_common": 100, "most_common_reference": 100 / 60, "collapsed": 1}
    )
    assert warn_of_collapse(scored, "test")
    assert lines == [
        "seqreg: warning: test: 1 distinct prediction for 60 examples, the most common one for 100% of them "
        "(of the references: 2%): the output has collapsed, and its score means little"
    ]
    assert not warn_of_collapse(texts([f"text {n}" for n in range(60)]), "test")
    assert warn_of_collapse(texts([""] * 60), "test")
    assert lines[1:] == ["seqreg: warning: test: all 60 predictions are empty: has the model learnt anything yet?"]


@pytest.mark.parametrize(
    ("said", "fallen"),
    [(["x"] * 31 + [str(n) for n in range(29)], True), (["x"] * 29 + [str(n) for n in range(31)], False),
     ([str(n % 6) for n in range(60)], True), ([str(n % 9) for n in range(60)], False)],
    ids=["half the same", "less than half", "six texts", "nine texts"],
)  # fmt: skip
def test_texts_have_collapsed_above_the_bound(said: list[str], fallen: bool) -> None:
    assert bool(variety(said, list(range(60)), texts=True)["collapsed"]) is fallen


@pytest.mark.parametrize(
    ("ones", "true_ones", "fallen"),
    [(100, 50, True), (96, 50, True), (90, 50, False), (100, 100, False), (98, 97, False)],
)
def test_a_classifier_that_predicts_one_class_has_collapsed(ones: int, true_ones: int, fallen: bool) -> None:
    card, _ = cards.load("glue/sst2")
    outputs = np.array([[0.0, 1.0]] * ones + [[1.0, 0.0]] * (100 - ones))
    rows = [Example("a", None, None, int(n < true_ones)) for n in range(100)]
    scored = score_classes(outputs, rows, card, resamples=0)
    assert scored.metrics["most_common"] == ones
    assert scored.metrics["most_common_reference"] == true_ones
    assert bool(collapse(scored.metrics, 100)) is fallen


def test_a_regression_that_predicts_one_number_has_collapsed() -> None:
    card, _ = cards.load("glue/stsb")
    rows = [Example("a", "b", None, float(n % 6)) for n in range(30)]
    flat = score_classes(np.full((30, 1), 2.5), rows, card, resamples=0)
    assert "the predicted numbers hardly differ" in collapse(flat.metrics, 30)
    varied = score_classes(np.arange(30.0)[:, None] % 6, rows, card, resamples=0)
    assert varied.metrics["spread"] == pytest.approx(100)
    assert collapse(varied.metrics, 30) == ""


def test_collapse_is_in_metrics_tensorboard_and_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = told(monkeypatch)
    card, _ = cards.load("text_pairs")
    sample_files.folder(tmp_path / "data", card, train=8, held=6)
    sample_files.write(tmp_path / "data" / "test.jsonl", sample_files.rows(card, 6, seed=9))
    settings = [
        "task=text_pairs", *sample_files.tiny("bart", tmp_path / "data"), f"output={tmp_path / 'run'}",
        "evaluation.eval_steps=1", "evaluation.eval_before_training=false",
    ]  # fmt: skip
    monkeypatch.setattr(evaluate, "decode", lambda ids, *_: ["the same"] * len(ids))
    metrics = train.train(run_config.resolve("quickstart", overrides=settings))
    assert metrics["scores"]["test"]["most_common"] == 100
    kept = json.loads((tmp_path / "run" / "metrics.json").read_text())["scores"]["test"]
    assert (kept["distinct"], kept["collapsed"]) == (pytest.approx(100 / 6, abs=1e-4), 1)
    reader = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    reader.Reload()
    assert {"validation_outputs/distinct", "validation_outputs/most_common", "trained/test/most_common"} <= set(
        reader.Tags()["scalars"]
    )
    shown = Console(file=io.StringIO(), width=160)
    shown.print(score_table({"run": metrics}))
    assert "100.0%, references 16.7% (collapsed)" in shown.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split(":")[2].strip() for line in lines] == ["validation", "validation", "test"]
    assert "  step 1  validation rougeL 0.00" in capsys.readouterr().err.splitlines()


def test_predict_says_how_many_are_empty(writer_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = told(monkeypatch)
    (tmp_path / "in.txt").write_text("a\nb\nc\n")
    answers: Any = iter(["", "x", ""])
    monkeypatch.setattr(trained_model, "decode", lambda ids, *_: [next(answers) for _ in ids])
    assert predict.predict(writer_run, str(tmp_path / "in.txt"), str(tmp_path / "out.txt")) == 3
    assert lines == ["seqreg: warning: 2 of 3 predictions are empty"]


@pytest.fixture
def writer_run(tmp_path: Path) -> Path:
    card, _ = cards.load("text_pairs")
    sample_files.folder(tmp_path / "pairs", card, train=4, held=2)
    settings = ["task=text_pairs", *sample_files.tiny("bart", tmp_path / "pairs"), "logging.tensorboard=false"]
    train.train(run_config.resolve("quickstart", overrides=[*settings, f"output={tmp_path / 'writer'}"]))
    return tmp_path / "writer"


def test_evaluate_does_not_write_into_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(BadInput, match="the folder is not empty, and holds no scores of seqreg"):
        training.evaluate(tmp_path / "run", output=tmp_path / "mine")
