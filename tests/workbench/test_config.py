"""Layers of a run: what wins, what is refused, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqreg.errors import BadInput
from seqreg.workbench import catalogue, config, layers


def test_the_order_of_layers() -> None:
    plain = config.resolve("cnn_dailymail").config
    assert plain.data.max_source == 1024  # the card
    assert plain.generation.length_penalty == 2.0  # the card
    assert plain.optimisation.steps == 20000  # the recipe
    tiny = config.resolve("cnn_dailymail", variants=["tiny"], terms=["r3f", "rdrop"]).config
    assert (tiny.data.max_source, tiny.model.architecture) == (256, "bart")
    assert list(tiny.terms) == ["r3f", "rdrop"]
    assert tiny.output == "runs/cnn_dailymail-tiny/r3f-rdrop"
    last = config.resolve(
        "cnn_dailymail", variants=["tiny"], terms=["r3f"], overrides=["terms.r3f.weight=1e-3", "data.max_source=9"]
    ).config
    assert last.terms["r3f"]["weight"] == 1e-3  # type: ignore[index]
    assert last.data.max_source == 9
    assert config.resolve("gigaword", terms=["none"]).config.terms == {}
    assert config.resolve("gigaword", terms=["r3f"], overrides=["terms.r3f=null"]).config.terms == {}


def test_the_task_decides_lengths_whoever_sets_it() -> None:
    run = config.resolve("cnn_dailymail", overrides=["task=gigaword"])
    assert (run.config.data.max_source, run.config.generation.max_length) == (128, 32)


def test_regression_gets_its_divergence_and_the_command_line_still_wins() -> None:
    terms = config.resolve("glue", variants=["stsb"], terms=["r3f"]).config.terms
    assert terms["r3f"]["divergence"] == "mse"  # type: ignore[index]
    assert "divergence" not in config.resolve("glue", variants=["rte"], terms=["r3f"]).config.terms["r3f"]  # type: ignore[operator]
    changed = config.resolve("glue", variants=["stsb"], terms=["r3f"], overrides=["terms.r3f.divergence=js"])
    assert changed.config.terms["r3f"]["divergence"] == "js"  # type: ignore[index]


FAULTS = {
    "optimisation.learning_rte=1": r"^command line: optimisation.learning_rte=1: unknown key; .*'learning_rate'\?$",
    "sed=1": r"^command line: sed=1: unknown key; did you mean 'seed'\?$",
    "seed=two": r"^command line: seed='two': expected a valid integer",
    "seed='1'": r"^command line: seed='1': expected a valid integer",
    "seed=true": r"^command line: seed=True: expected a valid integer",
    "optimisation.batch_size=0": r"^command line: optimisation.batch_size=0: expected greater than or equal to 1$",
    "optimisation.learning_rate=.nan": r"^command line: optimisation.learning_rate=nan: expected",
    "optimisation.schedule=linaer": r"^command line: optimisation.schedule='linaer': expected 'linear'",
    "optimisation.epochs=1": r"^recipes/gigaword.yaml.* and command line: set one of optimisation.steps=300 and",
    "optimisation.steps=10": r"optimisation\.warmup=20 leaves nothing of optimisation\.steps=10: set both$",
    "generation.min_length=99": r"min_length=99 is larger than max_length=24$",
    "evaluation.best=true": r"evaluation.best needs evaluation.every=0",
    "task=gigawrd": r"^command line: task='gigawrd': unknown task 'gigawrd'; did you mean 'gigaword'\?",
    "task=../../etc/passwd": r"unknown task '../../etc/passwd'",
    "task=/etc/passwd": r"unknown task",
    "terms.r3f.wieght=1": r"^command line: terms.r3f.wieght=1: R3F: unknown setting 'wieght'; did you mean 'weight'\?$",
    "terms.r3f.scale=-1": r"^command line: terms.r3f.scale=-1: expected a number >= 0",
    "terms.r3f.weight=-1": r"^command line: terms.r3f.weight=-1: expected",
    "terms.r3f.preset=fairsq": r"^command line: terms.r3f.preset='fairsq': R3F: unknown preset",
    "terms.smrt={}": r"^command line: unknown term 'smrt'; did you mean 'smart'\?",
    "terms.r3f=3": r"^command line: terms.r3f=3: expected a valid dictionary",
    "model.name=x": r"set one of model.name \(pretrained\) and model.architecture",
    "loss.label_smoothing=1.5": r"^command line: loss.label_smoothing=1.5: expected less than 1$",
    "a": r"expected key=value",
}


@pytest.mark.parametrize("setting", FAULTS)
def test_faults_are_one_line_that_names_place_key_and_value(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(BadInput, match=FAULTS[setting]) as caught:
        config.resolve("gigaword", terms=["r3f"], variants=["tiny"], overrides=[setting])
    assert "\n" not in str(caught.value)


def test_a_misspelt_key_is_named_before_what_it_leads_to() -> None:
    with pytest.raises(BadInput, match=r"optimization.*unknown key; did you mean 'optimisation'"):
        config.resolve("gigaword", variants=["tiny"], overrides=["optimisation.steps=2", "optimization.warmup=1"])


def test_a_fault_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("task: gigaword\nmodel: {nme: x}\noptimisation: {steps: 3}\n")
    with pytest.raises(BadInput, match=rf"^{path}: model.nme='x': unknown key; did you mean 'name'\?"):
        config.resolve(str(path))
    (tmp_path / "term.yaml").write_text("optimisation: {steps: 3}\n")
    path.write_text("task: gigaword\nmodel: {name: x}\noptimisation: {steps: 3}\n")
    with pytest.raises(BadInput, match=r"term.yaml: optimisation: steps: unknown key"):
        config.resolve(str(path), terms=[str(tmp_path / "term.yaml")])
    with pytest.raises(BadInput, match="unknown variant 'tny'"):
        config.resolve("gigaword", variants=["tny"])


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", "", "terms/r3f", "quickstrat"])
def test_names_stay_on_their_shelf(name: str) -> None:
    for kind in ("recipes", "recipes/terms", "tasks"):
        with pytest.raises(BadInput):
            catalogue.find(kind, name)  # type: ignore[arg-type]


def test_a_saved_run_is_a_recipe_again(tmp_path: Path) -> None:
    run = config.resolve("glue", variants=["mnli", "tiny"], terms=["r4f"], overrides=["seed=7"])
    run.save(tmp_path)
    again = config.load(tmp_path)
    assert again.card == run.card
    own = {**again.config.model_dump(), "task": run.config.task}
    assert own == run.config.model_dump()
    assert layers.read(tmp_path / "config.yaml")["task"] == "task.yaml"
    with pytest.raises(BadInput, match="nothing: no such folder"):
        config.load(tmp_path / "nothing")


def test_a_term_that_needs_unlabelled_rows_is_refused_before_anything_is_written() -> None:
    with pytest.raises(BadInput, match=r"command line: terms.jachess.mode='alternate': set data.unlabelled=FILE"):
        config.resolve("quickstart", terms=["jachess"], overrides=["terms.jachess.mode=alternate"])
