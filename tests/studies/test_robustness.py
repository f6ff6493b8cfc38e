"""`seqreg robustness` on tiny trained models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from seqreg.cli.main import app
from seqreg.errors import BadInput
from seqreg.noise import norm, rms
from seqreg.studies.common.findings import FOLDER, Finding
from seqreg.studies.common.trained_model import TrainedModel
from seqreg.studies.robustness import perturbations
from seqreg.studies.robustness import study as robustness
from seqreg.studies.robustness.study import Condition
from seqreg.workbench.config import run_config
from seqreg.workbench.data import loading
from seqreg.workbench.run import train
from tests.cli.test_main import seqreg
from tests.helpers import sample_files
from tests.studies.conftest import reviews


def means(found: Finding, run: str, noise: str, key: str) -> list[float]:
    """Of every level, over draws."""
    rows = [row for row in found.values["rows"] if (row["run"], row["noise"]) == (run, noise)]
    levels = dict.fromkeys(row["level"] for row in rows)
    return [float(np.mean([row[key] for row in rows if row["level"] == level])) for level in levels]


def changed(folder: Path, target: Path, change: Any) -> Path:
    """A copy of a run with other weights."""
    shutil.copytree(folder, target)
    weights = {name: change(name, value) for name, value in load_file(target / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    sample_files.accept_model(target)
    return target


def test_two_classifiers_through_the_command(classifier: Path, tmp_path: Path) -> None:
    shutil.copytree(classifier, tmp_path / "one")
    changed(classifier, tmp_path / "two", lambda name, value: value * 0.7 if "classifier" in name else value)
    words = ["one", "two", "--limit", "60", "--draws", "2", "--radii", "0.05,0.3"]
    result = seqreg("robustness", *words, cwd=tmp_path)
    found = Finding.read(tmp_path / FOLDER / "robustness.json")
    assert "mean over levels" in result.stdout
    assert "random noise of the same norm" in " ".join(result.stdout.split())
    assert [(tmp_path / FOLDER / name).stat().st_size > 3000 for name in found.figures] == [True, True]
    assert [row["seed"] for row in found.values["rows"] if row["noise"] == "characters"][:2] == [0, 1]
    one = [row for row in found.values["rows"] if row["run"] == "one"]
    two = [row for row in found.values["rows"] if row["run"] == "two"]
    assert len(one) == len(two) == 1 + 2 * (3 + 3 + 3 + 2 + 2 + 1 + 1)
    for a, b in zip(one, two, strict=True):  # a smaller head is less sure, and chooses the same
        assert a["loss"] != b["loss"]
        if a["noise"] not in ("adversary", "random"):
            assert a["score"] == b["score"]
    assert one[0]["agreement"] == 100


def test_the_clean_score_is_the_runs_own(classifier: Path, writer: Path, tmp_path: Path) -> None:
    for folder, name in ((classifier, "test"), (writer, "test")):
        found = robustness.robustness([folder], noises=["source"], draws=1, output=tmp_path / folder.parent.name)
        scores = json.loads((folder / "metrics.json").read_text())["scores"][name]
        assert found.values["rows"][0]["score"] == pytest.approx(scores["score"], abs=1e-4)
        if folder == classifier:  # the writer's is label-smoothed there
            assert found.values["rows"][0]["loss"] == pytest.approx(scores["loss"], abs=1e-5)
        assert found.figures == []


def test_a_writer_through_the_command(writer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--limit", "12", "--draws", "1", "--rates", "0.3", "--scales", "0.5,2", "--radii", "0.2", "--json"]
    noises = [f"--noise={noise}" for noise in ("word-drop", "embeddings", "adversary", "order")]
    app(["robustness", str(writer), *words, *noises], standalone_mode=False)
    found = Finding.read(writer / FOLDER / "robustness.json")
    assert json.loads(capsys.readouterr().out)["values"] == found.values
    assert [row["noise"] for row in found.values["rows"]] == [
        "none", "word-drop", "embeddings", "embeddings", "adversary", "random", "order",
    ]  # fmt: skip
    assert all(0 <= row["agreement"] <= 100 for row in found.values["rows"])
    (table,) = found.tables
    assert [row[table.columns.index("sd over draws")] for row in table.rows] == [None] * 7
    assert [row[table.columns.index("level")] for row in table.rows] == [None, 0.3, 0.5, 2.0, 0.2, 0.2, None]


def test_an_ascent_hurts_more_than_random_noise_of_its_norm(classifier: Path, writer: Path, tmp_path: Path) -> None:
    for folder, limit in ((classifier, 120), (writer, 20)):
        options: dict[str, Any] = {"noises": ["adversary"], "radii": [0.1, 0.3, 1.0], "draws": 1, "limit": limit}
        found = robustness.robustness([folder], output=tmp_path, **options)
        clean = found.values["rows"][0]
        worst, random = means(found, "baseline", "adversary", "loss"), means(found, "baseline", "random", "loss")
        assert clean["loss"] < worst[0] < worst[1] < worst[2]
        assert all(a > 1.2 * b for a, b in zip(worst[1:], random[1:], strict=True))
        assert means(found, "baseline", "adversary", "score")[2] < means(found, "baseline", "random", "score")[2]
        assert means(found, "baseline", "adversary", "agreement")[2] < 90


def test_more_steps_and_restarts_make_a_stronger_attack(classifier: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"noises": ["adversary"], "radii": [0.3], "draws": 1, "limit": 120}
    one, many, again = (
        robustness.robustness([classifier], output=tmp_path, **options, **more).values["rows"]
        for more in ({"steps": 1}, {"steps": 1, "restarts": 3}, {"steps": 10, "restarts": 3})
    )
    assert [row["noise"] for row in many] == ["none", "adversary", "random"]
    assert one[1]["loss"] < many[1]["loss"] < again[1]["loss"]
    assert one[1]["score"] >= many[1]["score"]
    assert one[2] == many[2] == again[2]  # random noise of that norm is no ascent
    assert all(50 <= row["most_common"] <= 100 for row in many)


def test_of_every_example_the_start_with_the_highest_loss_counts() -> None:
    first, second = (np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [1.0, 0.0]]))
    starts = [
        robustness.Answers(first, 2.0, np.array([3.0, 1.0])), robustness.Answers(second, 3.0, np.array([2.0, 4.0]))
    ]  # fmt: skip
    found = robustness.worst(starts)
    assert found.outputs.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert (found.loss, found.losses.tolist()) == (3.5, [3.0, 4.0])


def test_restarts_are_for_classes(writer: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--restarts 2: for classes and numbers, not for texts"):
        robustness.robustness([writer], output=tmp_path, noises=["adversary"], restarts=2)


def test_both_have_the_norm_that_they_say(classifier: Path) -> None:
    one = TrainedModel.load(classifier)
    examples = loading.sample(one.splits.sets["validation"], 8)
    (rows, batch), *_ = one.batches(examples)
    chosen = [examples[row] for row in rows]
    embeds = one.model.get_input_embeddings()(batch["input_ids"])
    mask = batch["attention_mask"].bool()
    whole = rms(embeds, mask) * (mask.sum(-1) * embeds.shape[-1]).sqrt()
    for ascent in (True, False):
        delta = perturbations.attack(0.3, 0, ascent=ascent)(one, chosen, batch)
        assert isinstance(delta, torch.Tensor)
        assert norm(delta, "l2", "sentence").flatten() == pytest.approx(0.3 * whole.detach(), rel=1e-4)
        assert (delta[~mask] == 0).all()


def test_noise_on_embeddings_has_its_scale_and_is_the_same_in_every_batch(classifier: Path) -> None:
    one = TrainedModel.load(classifier)
    examples = loading.sample(one.splits.sets["validation"], 8)
    (rows, batch), *_ = one.batches(examples)
    chosen, embeds = [examples[row] for row in rows], torch.randn(*batch["input_ids"].shape, 4000) * 3
    delta = perturbations.embedding_noise(0.5, 1)(one, chosen, batch)(embeds)  # type: ignore[operator]
    mask = batch["attention_mask"].bool()
    assert (delta[~mask] == 0).all()
    assert delta[mask].std() == pytest.approx(1.5, rel=0.01)
    last = {key: value[-1:] for key, value in batch.items()}
    alone = perturbations.embedding_noise(0.5, 1)(one, chosen[-1:], last)(embeds[-1:])  # type: ignore[operator]
    assert torch.equal(alone, delta[-1:])
    other = perturbations.embedding_noise(0.5, 2)(one, chosen, batch)(embeds)  # type: ignore[operator]
    assert not torch.equal(other, delta)


def test_models_that_ignore_their_source_are_found(classifier: Path, writer: Path, tmp_path: Path) -> None:
    """Cross-attention without an output; a head that only has its bias."""

    def deaf(name: str, value: torch.Tensor) -> torch.Tensor:
        silent = "encoder_attn.out_proj" in name or name == "classifier.weight"
        return torch.zeros_like(value) if silent else value

    for folder in (classifier, writer):
        options: dict[str, Any] = {"noises": ["order", "source"], "draws": 2, "limit": 30, "output": tmp_path / "found"}
        found = robustness.robustness([changed(folder, tmp_path / folder.parent.name, deaf)], **options)
        assert found.summary[-1].endswith("the model does not depend on its source.")
        assert means(found, "baseline", "source", "agreement") == [100]
        assert means(found, "baseline", "source", "loss") == pytest.approx([found.values["rows"][0]["loss"]])
        sound = robustness.robustness([folder], **options)
        assert not any("not depend" in sentence for sentence in sound.summary)
        assert means(sound, "baseline", "source", "agreement")[0] < 95
        assert means(sound, "baseline", "source", "loss")[0] > 1.05 * sound.values["rows"][0]["loss"]


def test_everyone_has_the_source_of_another(classifier: Path) -> None:
    examples = loading.sample(TrainedModel.load(classifier).splits.sets["validation"], 7)
    for seed in range(9):
        found = Condition("source", 1.0, seed).texts(examples)
        assert sorted(one.source for one in found) == sorted(one.source for one in examples)
        assert all(a.source != b.source for a, b in zip(found, examples, strict=True))
        assert [one.label for one in found] == [one.label for one in examples]


def test_bad_input_is_one_line(classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--rates 0\.1;0\.2: expected numbers with commas"):
        app(["robustness", str(classifier), "--rates", "0.1;0.2"], standalone_mode=False)
    with pytest.raises(BadInput, match="no run: give the output folder"):
        app(["robustness", "data.path=x"], standalone_mode=False)
    for options, message in (
        ({"rates": [1.5]}, "--rates: 1.5: expected numbers above 0 and up to 1"),
        ({"scales": [-1.0]}, "--scales: -1: expected numbers above 0"),
        ({"radii": [float("nan")]}, "--radii: nan: expected numbers above 0"),
        ({"rates": [0.1, 0.1]}, "--rates: expected at least one number, at most 100, and none twice"),
        ({"noises": ["charcters"]}, "--noise charcters: unknown; did you mean 'characters'?"),
        ({"draws": 0}, "--draws 0: expected 1 to 1000"),
        ({"restarts": 0}, "--restarts 0: expected 1 to 1000"),
        ({"split": "tset"}, "has no such split"),
    ):
        with pytest.raises(BadInput, match=message.replace("?", r"\?")):
            robustness.robustness([classifier], **options)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="the same run twice"):
        robustness.robustness([classifier, classifier])
    with pytest.raises(BadInput, match="not a run of seqreg"):
        robustness.robustness([classifier, tmp_path], output=tmp_path / "study")
    assert not (classifier / FOLDER / "robustness.json").exists()


def test_runs_on_other_examples_are_not_compared(classifier: Path, tmp_path: Path) -> None:
    shutil.copytree(classifier, tmp_path / "one")
    shutil.copytree(classifier, tmp_path / "two")
    sample_files.write(tmp_path / "data" / "validation.jsonl", reviews(20, 9))
    path = tmp_path / "two" / "config.yaml"
    path.write_text(path.read_text().replace(str(classifier.parent / "data"), str(tmp_path / "data")))
    with mock.patch.object(robustness, "examine") as examine:
        with pytest.raises(BadInput, match="two: test has other examples than"):
            robustness.robustness([tmp_path / "one", tmp_path / "two"], noises=["source"], draws=1)
    assert not examine.called
    (tmp_path / "deeper").mkdir()
    with pytest.raises(BadInput, match="say where to write with --output"):
        robustness.robustness([tmp_path / "one", Path(shutil.move(tmp_path / "two", tmp_path / "deeper"))])


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    app(["robustness", "--help"], standalone_mode=False)
    assert "seqreg robustness runs/quickstart/baseline" in capsys.readouterr().out


def test_a_regression_and_pairs_of_texts(tmp_path: Path) -> None:
    plain = run_config.resolve("glue", variants=["stsb"])
    folder = sample_files.folder(tmp_path / "data", plain.card, train=16, held=6)
    settings = [*sample_files.tiny("bert", folder), f"output={tmp_path / 'run'}", "logging.tensorboard=false"]
    train.train(run_config.resolve("glue", variants=["stsb"], overrides=settings))
    found = robustness.robustness([tmp_path / "run"], noises=["words", "adversary", "source"], draws=1)
    clean, *others = found.values["rows"]
    assert clean["agreement"] == 100
    assert others[2]["agreement"] < 100
    attacked = [row["loss"] for row in others if row["noise"] == "adversary"]
    assert clean["loss"] < attacked[0] < attacked[1] < attacked[2]
    one = TrainedModel.load(tmp_path / "run")
    slow = [(float(_number(one, example)) - float(example.label or 0)) ** 2 for example in one.splits.sets["test"]]
    assert clean["loss"] == pytest.approx(np.mean(slow), rel=1e-5)


def _number(one: TrainedModel, example: Any) -> torch.Tensor:
    row = one.tokenizer(example.source, example.second, return_tensors="pt", truncation=True, max_length=24)
    with torch.no_grad():
        return one.model(**row).logits[0, 0]
