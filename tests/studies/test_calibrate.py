"""`seqreg calibrate` on tiny trained models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from seqreg.cli.main import app
from seqreg.errors import BadInput
from seqreg.metrics.calibration import Outcomes
from seqreg.studies.calibrate import study as calibrate
from seqreg.studies.common.findings import FOLDER, Finding
from seqreg.studies.common.trained_model import TrainedModel
from seqreg.workbench.data import loading
from tests.cli.test_main import seqreg
from tests.helpers import sample_files
from tests.studies.conftest import reviews


def test_a_classifier_through_the_command(classifier: Path, tmp_path: Path) -> None:
    result = seqreg("calibrate", classifier, "--output", tmp_path / "found", cwd=tmp_path)
    found = Finding.read(tmp_path / "found" / "calibrate.json")
    assert "adaptive_ece" in result.stdout
    assert all(sentence.split(",")[0][:30] in result.stdout for sentence in found.summary)
    assert found.values["fitted_on"] == "validation"
    numbers = found.values["parts"]["classes"]
    assert numbers["before"]["count"] == 120
    assert numbers["before"]["accuracy"] == numbers["after"]["accuracy"]
    for name in found.figures:
        assert (tmp_path / "found" / name).stat().st_size > 3000
    assert {"calibrate.png", "calibrate.svg", "calibrate_coverage.svg"} <= set(found.figures)
    assert not (classifier / FOLDER).exists()


def test_json_is_the_finding(classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", classifier, "--bins", "5", "--output", tmp_path, "--json"]
    app([str(word) for word in words], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "calibrate.json").read_text())


def test_numbers_are_those_of_the_model(classifier: Path, tmp_path: Path) -> None:
    one = TrainedModel.load(classifier)
    found = calibrate.calibrate(classifier, output=tmp_path).values
    examples = one.splits.sets["test"]
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    with torch.no_grad():
        logits = torch.cat([model(**one.tokenizer(e.source, return_tensors="pt")).logits for e in examples])
    slow = Outcomes.of(logits.numpy(), [e.label for e in examples], found["temperature"]).summary(15)
    for key, value in slow.items():
        assert found["parts"]["classes"]["after"][key] == pytest.approx(value, abs=1e-5), key


def test_a_writer_through_the_command(writer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["calibrate", str(writer), "--limit", "30", "--bins", "10"], standalone_mode=False)
    assert "Spearman" in capsys.readouterr().out
    found = Finding.read(writer / FOLDER / "calibrate.json")
    assert (found.values["fitted_on"], found.values["measured_on"]) == ("validation", "test")
    parts = found.values["parts"]
    assert parts["all tokens"]["before"]["count"] == (
        parts["end of sequence"]["before"]["count"] + parts["other tokens"]["before"]["count"]
    )
    assert 0 <= found.values["coverage"]["best"] <= found.values["coverage"]["area"]
    assert -1 <= found.values["texts"]["spearman"] <= 1
    assert "calibrate_end_of_sequence.png" in found.figures


def test_tokens_and_texts_are_those_of_the_model(writer: Path) -> None:
    one = TrainedModel.load(writer)
    examples = loading.sample(one.splits.sets["test"], 5)
    pieces = [piece for _, batch in one.batches(examples) for piece in one.predictions(batch)]
    nll = np.concatenate([Outcomes.of(piece.logits(), piece.labels).nll for piece in pieces])
    model = AutoModelForSeq2SeqLM.from_pretrained(writer).eval()
    slow, logp = [], []
    order = sorted(range(5), key=lambda index: -len(examples[index].source))
    for index in order:
        example = examples[index]
        row = dict(one.tokenizer(example.source, return_tensors="pt", truncation=True, max_length=24))
        labels = one.tokenizer(example.target, return_tensors="pt")["input_ids"]
        slow += _nll(model, row, labels)
        ids = one.model.generate(**row)
        ends = (ids[0, 1:] == one.end).nonzero()
        stop = int(ends[0]) + 2 if len(ends) else ids.shape[1]
        logp.append(-np.mean(_nll(model, row, ids[:, 1:stop])))
    assert nll == pytest.approx(slow, abs=1e-4)
    found = calibrate._texts(one, examples, lambda _: None)
    assert found.logp[order] == pytest.approx(logp, abs=1e-4)


def _nll(model: Any, row: dict[str, Any], labels: torch.Tensor) -> list[float]:
    with torch.no_grad():
        logp = model(**row, labels=labels).logits.log_softmax(-1)
    return [-float(logp[0, place, token]) for place, token in enumerate(labels[0])]


def test_an_overconfident_model_is_found_and_cured(classifier: Path, tmp_path: Path) -> None:
    """The head of a classifier times eight, judged by labels of which a fifth are wrong."""
    folder = Path(shutil.copytree(classifier, tmp_path / "run"))
    weights = load_file(folder / "model.safetensors")
    weights = {key: value * 8 if key.startswith("classifier") else value for key, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sample_files.accept_model(folder)
    sample_files.write(tmp_path / "data" / "validation.jsonl", reviews(400, 5, wrong=0.2))
    found = calibrate.calibrate(folder, overrides=[f"data.path={tmp_path / 'data'}"])
    numbers = found.values["parts"]["classes"]
    assert any("overconfident by 0.1" in line or "overconfident by 0.2" in line for line in found.summary)
    assert found.values["temperature"] > 5
    assert not found.values["temperature_at_end"]
    assert numbers["after"]["ece"] < numbers["before"]["ece"] / 2
    assert numbers["after"]["nll"] < numbers["before"]["nll"]


def test_logits_of_a_data_set_are_never_held(writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqreg.studies.common.trained_model.CHUNK", 7)
    one = TrainedModel.load(writer)
    examples = loading.sample(one.splits.sets["test"], 8)
    for _, batch in one.batches(examples):
        found = one.predictions(batch)
        assert len(found) > 1
        assert all(
            len(piece.labels) <= 7 and piece.logits().shape == (len(piece.labels), len(one.tokenizer))
            for piece in found
        )


def test_bad_input_is_one_line(classifier: Path, writer: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"not a run of seqreg: it has no config\.yaml"):
        calibrate.calibrate(tmp_path / "empty")
    with pytest.raises(BadInput, match=r"--split tset: .* did you mean 'test'"):
        calibrate.calibrate(writer, split="tset")
    with pytest.raises(BadInput, match="--bins 0"):
        calibrate.calibrate(classifier, bins=0)
    shutil.copy(classifier / "config.yaml", tmp_path / "empty")
    shutil.copy(classifier / "task.yaml", tmp_path / "empty")
    with pytest.raises(BadInput, match="no trained model in it"):
        calibrate.calibrate(tmp_path / "empty")
    halfway = Path(shutil.copytree(classifier, tmp_path / "halfway"))  # an older model, a run that is under way
    record = json.loads((halfway / "run.json").read_text())
    (halfway / "run.json").write_text(json.dumps({**record, "finished": False}))
    with pytest.raises(BadInput, match="its run has not finished"):
        calibrate.calibrate(halfway)
    sample_files.write(tmp_path / "data" / "validation.jsonl", reviews(1, 0))
    with pytest.raises(BadInput, match="test has one example"):
        calibrate.calibrate(classifier, overrides=[f"data.path={tmp_path / 'data'}"])
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="is a file and in the way"):
        app(["calibrate", str(classifier), "--output", str(tmp_path / "file")], standalone_mode=False)


def test_a_regression_is_refused(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = TrainedModel.load(classifier)
    card = one.card.model_copy(update={"kind": "regression"})
    monkeypatch.setattr(TrainedModel, "load", lambda *_, **__: replace(one, run=replace(one.run, card=card)))
    with pytest.raises(BadInput, match="no probabilities to calibrate"):
        calibrate.calibrate(classifier)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    app(["calibrate", "--help"], standalone_mode=False)
    assert "seqreg calibrate runs/quickstart/r3f" in capsys.readouterr().out
