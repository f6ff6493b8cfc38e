"""Records of runs: what a run depends on, which files a model is, and with which settings scores were made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from typer.testing import CliRunner

from seqreg.cli import main as cli
from seqreg.cli.predict import predict
from seqreg.errors import BadInput
from seqreg.studies.common.trained_model import TrainedModel, load_all
from seqreg.workbench.config import run_config
from seqreg.workbench.run import export, train
from seqreg.workbench.run.blend import Blend
from seqreg.workbench.run.record import RunRecord, check_collected, check_model
from seqreg.workbench.run.soup import make_soup
from seqreg.workbench.scores import results
from tests.helpers import outside_term, sample_files

SMALL = [
    "data.limit={train: 24, validation: 10, test: 6}", "optimisation.max_steps=4", "optimisation.warmup_steps=0",
    "evaluation.eval_before_training=false", "evaluation.eval_steps=0", "evaluation.resamples=20",
    "generation.num_beams=1", "generation.max_length=8", "logging.diagnostics_steps=0", "model.vocab_size=400",
    "evaluation.drift_examples=0", "evaluation.retention=false", "logging.tensorboard=false",
    "optimisation.lr_scheduler_type=constant",
]  # fmt: skip
FEWER, MORE = "optimisation.max_steps=2", "optimisation.max_steps"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a BART from scratch, with all files of a model."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train.train(run_config.resolve("quickstart", overrides=[*SMALL, f"output={folder}"]))
    return folder


@pytest.fixture
def finished(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "run"))


def edit(path: Path, **values: Any) -> None:
    """Change a JSON file, whose length may stay what it was."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def permute(folder: Path) -> None:
    """Exchange two entries of the vocabulary of a tokenizer."""
    about = json.loads((folder / "tokenizer.json").read_text())
    first, second = [key for key, value in about["model"]["vocab"].items() if value in (50, 60)]
    vocab = about["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(about))


def move_weights(folder: Path) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights = {key: value + 1e-3 * ("bias" not in key) for key, value in weights.items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


CHANGES: dict[str, Callable[[Path], Any]] = {
    "model.safetensors": move_weights,
    "config.json": lambda folder: edit(folder / "config.json", activation_function="relu"),
    "tokenizer.json": permute,
    "tokenizer_config.json": lambda folder: edit(folder / "tokenizer_config.json", model_max_length=7),
    "generation_config.json": lambda folder: (folder / "generation_config.json").unlink(),
    "adapter_config.json": lambda folder: (folder / "adapter_config.json").write_text("{}"),
}


# Files of a model


def test_the_record_has_every_file_that_a_model_is(base: Path) -> None:
    record = RunRecord.read(base)
    assert record is not None
    assert set(CHANGES) - {"adapter_config.json"} <= set(record.files)
    assert check_model(base, record) == []


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_changed_file_is_named_by_all_who_read_the_model(name: str, finished: Path, tmp_path: Path) -> None:
    CHANGES[name](finished)
    out, text = tmp_path / "out", sample_files.write(tmp_path / "in.jsonl", [{"document": "a b", "summary": "a"}])
    record = RunRecord.read(finished)
    assert record is not None
    readers: list[Callable[[], Any]] = [
        lambda: train.evaluate_run(finished),
        lambda: predict(finished, str(text), str(out)),
        lambda: export.export(finished, out),
        lambda: export.exported(finished),
        lambda: make_soup([finished], out, Blend(interpolate=0.5)),
        lambda: TrainedModel.load(finished),
        lambda: load_all([finished]),
        lambda: check_collected(finished, record),
    ]
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    for read in readers:
        with pytest.raises(
            BadInput, match=rf"its model is not the one that was trained: {name}.*--trust-changes"
        ) as one:
            read()
        assert len(one.value.lines) == 1
    assert not out.exists()
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert len(check_model(finished, record, trusted=True)) == 1


@pytest.mark.parametrize("command", "evaluate predict export soup calibrate robustness probe serve".split())
def test_every_command_names_the_changed_file_and_the_way_on(command: str, finished: Path, tmp_path: Path) -> None:
    CHANGES["generation_config.json"](finished)
    text = sample_files.write(tmp_path / "in.jsonl", [{"document": "a b", "summary": "a"}])
    further = {"predict": [str(text)], "export": ["-o", str(tmp_path / "o")], "soup": ["--interpolate", "1"]}
    further["soup"] += ["-o", str(tmp_path / "o")]
    with pytest.raises(
        BadInput, match=r"generation_config\.json is missing: bring the file back, or .*--trust-changes"
    ):
        CliRunner().invoke(
            cli.app, [command, str(finished), *further.get(command, [])], catch_exceptions=False, standalone_mode=False
        )
    assert not (tmp_path / "o").exists()


def test_a_changed_model_is_used_where_that_is_trusted(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CHANGES["generation_config.json"](finished)
    assert "generation_config.json" not in export.export(finished, tmp_path / "model", trust_changes=True)
    text = sample_files.write(tmp_path / "in.jsonl", [{"document": "a b", "summary": "a"}])
    assert predict(finished, str(text), str(tmp_path / "out.jsonl"), trust_changes=True) == 1
    assert "generation_config.json is missing" in " ".join(capsys.readouterr().err.split())


def test_a_changed_model_is_scored_elsewhere_and_the_scores_say_so(finished: Path, tmp_path: Path) -> None:
    CHANGES["config.json"](finished)
    before = (finished / "metrics.json").read_bytes()
    scored = train.evaluate_run(finished, output=tmp_path / "again")
    assert list(scored["made_with"]["differs"]) == ["config.json"]
    train.evaluate_run(finished, trust_changes=True)
    ((name, other),) = results.other_scores_of(finished).items()
    assert name.startswith("config.json=other-")
    assert list(other["made_with"]["differs"]) == ["config.json"]
    assert (finished / "metrics.json").read_bytes() == before


# Scores


def test_scores_of_other_settings_have_a_file_of_their_own(finished: Path) -> None:
    files = ["metrics.json", "predictions.jsonl", "generated_predictions.txt", "run.json", "config.yaml"]
    before = {name: (finished / name).read_bytes() for name in files}
    metrics = train.evaluate_run(finished, overrides=("generation.num_beams=3",))
    assert {name: (finished / name).read_bytes() for name in files} == before
    stored = json.loads((finished / "scores" / "num_beams=3.json").read_text())
    assert stored["made_with"]["differs"] == {"generation.num_beams": [1, 3]}
    assert stored["made_with"]["settings"]["generation.num_beams"] == 3
    assert stored["made_with"]["run"] == json.loads(before["run.json"])["run"]
    assert stored["scores"] == json.loads(json.dumps(metrics["scores"]))
    assert (finished / "scores" / "num_beams=3" / "predictions.jsonl").is_file()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (("data.limit={validation: 5, test: 6}",), "validation=5,data.rows=other-"),
        (("data.max_source_length=9",), "max_source_length=9"),
        (("generation.max_length=5", "seed=3"), "max_length=5,seed=3"),
        (("optimisation.precision=bf16",), "precision=bf16"),
    ],
)
def test_what_makes_other_scores_is_their_name(settings: tuple[str, ...], name: str, finished: Path) -> None:
    before = (finished / "metrics.json").read_bytes()
    train.evaluate_run(finished, overrides=settings)
    (found,) = results.other_scores_of(finished)
    assert found.startswith(name) or set(name.split(",")) == set(found.split(","))
    assert (finished / "metrics.json").read_bytes() == before


def test_another_file_is_scored_into_a_file_of_its_own(finished: Path, tmp_path: Path) -> None:
    before = (finished / "predictions.jsonl").read_bytes()
    rows = [{"document": "a b c", "summary": "a"}, {"document": "d e", "summary": "e"}]
    train.evaluate_run(finished, file=sample_files.write(tmp_path / "more.jsonl", rows))
    assert list(results.other_scores_of(finished)) == ["data=more"]
    assert (finished / "predictions.jsonl").read_bytes() == before


@pytest.mark.parametrize("settings", [(), ("evaluation.per_device_eval_batch_size=3",), ("logging.logging_steps=3",)])
def test_the_settings_of_the_run_bring_its_scores_up_to_date(settings: tuple[str, ...], finished: Path) -> None:
    before = json.loads((finished / "metrics.json").read_text())
    (finished / "predictions.jsonl").write_text("")
    train.evaluate_run(finished, overrides=settings)
    after = json.loads((finished / "metrics.json").read_text())
    assert after["scores"]["test"]["rougeL"] == before["scores"]["test"]["rougeL"]
    assert after["train"] == before["train"]
    assert "made_with" not in after
    assert (finished / "predictions.jsonl").read_text()
    assert not (finished / "scores").exists()


def test_a_config_that_was_edited_in_a_finished_run_makes_other_scores(finished: Path) -> None:
    path = finished / "config.yaml"
    path.write_text(path.read_text().replace("num_beams: 1", "num_beams: 4"))
    train.evaluate_run(finished)
    assert list(results.other_scores_of(finished)) == ["num_beams=4"]


def test_scores_are_not_mixed_in_another_folder(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    train.evaluate_run(finished, output=out, overrides=("generation.num_beams=3",))
    train.evaluate_run(finished, output=out, overrides=("generation.num_beams=3",))
    with pytest.raises(BadInput, match="again: has scores of another model, or with other settings: choose another"):
        train.evaluate_run(finished, output=out, overrides=("generation.num_beams=2",))
    other = shutil.copytree(finished, tmp_path / "other")
    with pytest.raises(BadInput, match="other: another run, which has scores of its own"):
        train.evaluate_run(finished, output=other)


def test_show_prints_both_scores_and_what_differs(finished: Path) -> None:
    train.evaluate_run(finished, overrides=("generation.num_beams=3",))
    options: dict[str, Any] = {"catch_exceptions": False, "standalone_mode": False}
    text = " ".join(CliRunner().invoke(cli.app, ["show", str(finished)], **options).output.split())
    assert "baseline, num_beams=3: generation.num_beams: 3, in the run 1" in text
    document = CliRunner().invoke(cli.app, ["show", "--json", str(finished)], **options)
    others = json.loads(document.stdout)["others"][str(finished)]
    assert others["num_beams=3"]["made_with"]["differs"] == {"generation.num_beams": [1, 3]}


def test_scores_of_other_settings_are_not_collected(finished: Path) -> None:
    record = RunRecord.read(finished)
    assert record is not None
    train.evaluate_run(finished, overrides=("generation.num_beams=3",))
    assert check_collected(finished, record)["scores"] == results.scores_of(finished)["scores"]
    shutil.copy(finished / "scores" / "num_beams=3.json", finished / "metrics.json")
    with pytest.raises(BadInput, match=r"made with generation\.num_beams changed: seqreg evaluate .* brings those"):
        check_collected(finished, record)
    train.evaluate_run(finished)
    assert "scores" in check_collected(finished, record)


def test_scores_of_other_settings_go_with_the_run_that_they_are_of(finished: Path) -> None:
    train.evaluate_run(finished, overrides=("generation.num_beams=3",))
    run = run_config.resolve("quickstart", overrides=[*SMALL, "optimisation.max_steps=5", f"output={finished}"])
    with pytest.raises(BadInput, match="there is no checkpoint to resume from"):
        train.train(run, resume=True, allow_change=[MORE])
    train.train(run, allow_change=[MORE])
    assert results.other_scores_of(finished) == {}


# What a run depends on


def half(base: Path, out: Path, *further: str) -> run_config.Run:
    """A run from a copy of the base model, that has made two of its four steps; returns all of it."""
    start = Path(shutil.copytree(base, out / "start"))
    for extra in ("config.yaml", "run.json"):
        (start / extra).unlink()
    settings = [*SMALL, "model.vocab_size=2000", f"model.name={start}", f"output={out / 'half'}", *further]
    settings.append("checkpoints.save_steps=2")
    train.train(run_config.resolve("quickstart", overrides=[*settings, FEWER]))
    return run_config.resolve("quickstart", overrides=settings)


INPUTS: dict[str, Callable[[Path], Any]] = {
    "model.config.dropout": lambda folder: edit(folder / "config.json", dropout=0.4),
    "model.generation_config.no_repeat_ngram_size": lambda folder: edit(
        folder / "generation_config.json", no_repeat_ngram_size=2
    ),
    "model.tokenizer.files": permute,
    "model.weights": move_weights,
}


@pytest.mark.parametrize("key", list(INPUTS))
def test_a_start_that_changed_is_not_resumed(key: str, base: Path, tmp_path: Path) -> None:
    run = half(base, tmp_path)
    INPUTS[key](tmp_path / "start")
    before = (tmp_path / "half" / "run.json").read_bytes()
    with pytest.raises(BadInput, match=rf"  {key}: .* there, .* now\n") as caught:
        train.train(run, resume=True, allow_change=[MORE])
    assert f"--allow-change {key}" in caught.value.lines[-1]
    assert len(caught.value.lines) == 3
    assert (tmp_path / "half" / "run.json").read_bytes() == before
    train.train(run, resume=True, allow_change=[MORE, key])


def test_a_start_that_is_the_same_is_resumed(base: Path, tmp_path: Path) -> None:
    run = half(base, tmp_path)
    train.train(run, resume=True, allow_change=[MORE])
    record = RunRecord.read(tmp_path / "half")
    assert record is not None
    assert record.inputs["model.config.dropout"] == 0.1
    assert record.pretrained


def test_a_reference_of_a_term_that_changed_is_not_resumed(base: Path, tmp_path: Path) -> None:
    reference = Path(shutil.copytree(base, tmp_path / "reference"))
    run = half(base, tmp_path, f"terms.anchor={{reference: {reference}}}")
    (reference / "metrics.json").write_text("{}")  # which is no part of the model
    move_weights(reference)
    with pytest.raises(BadInput, match=r"  terms\.anchor\.reference\.files: .*\.\.\. there, .*\.\.\. now"):
        train.train(run, resume=True, allow_change=[MORE])
    shutil.copy(base / "model.safetensors", reference / "model.safetensors")
    train.train(run, resume=True, allow_change=[MORE])


def test_a_run_of_a_version_without_inputs_is_resumed(base: Path, tmp_path: Path) -> None:
    run = half(base, tmp_path)
    edit(tmp_path / "half" / "run.json", inputs={}, pretrained="", tokens={"train": "0"})
    INPUTS["model.config.dropout"](tmp_path / "start")
    train.train(run, resume=True, allow_change=[MORE])


def test_a_term_of_the_user_s_own_that_was_edited_is_not_resumed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(outside_term.__file__), tmp_path / "edited_term.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = half(base, tmp_path, "terms.mine={term: edited_term.ConfidencePenalty}")
    with (tmp_path / "edited_term.py").open("a") as file:
        file.write("\n# another formula\n")
    with pytest.raises(BadInput, match=r"  terms\.mine\.code: .*\.\.\. there, .*\.\.\. now"):
        train.train(run, resume=True, allow_change=[MORE])
    train.train(run, resume=True, allow_change=[MORE, "terms.mine.code"])


def test_adapters_are_not_resumed_on_other_weights(base: Path, tmp_path: Path) -> None:
    run = half(base, tmp_path, "model.lora={}")
    move_weights(tmp_path / "start")
    with pytest.raises(BadInput, match=r"  model\.weights: .* there, .* now"):
        train.train(run, resume=True, allow_change=[MORE])
    shutil.copy(base / "model.safetensors", tmp_path / "start" / "model.safetensors")
    train.train(run, resume=True, allow_change=[MORE])
