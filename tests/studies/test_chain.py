"""Chains of trainings: what is carried over, what is left alone, and what a destructive step does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from seqreg.errors import BadInput
from seqreg.studies.collapse import study_files
from seqreg.studies.collapse.chain import resolve
from seqreg.studies.common.findings import Finding
from seqreg.studies.common.trained_model import TrainedModel
from seqreg.workbench.config import run_config
from seqreg.workbench.data import loading, models
from seqreg.workbench.run import train
from tests.helpers import sample_files, tiny_tasks
from tests.helpers.tiny_tasks import seqreg


def laid(path: Path, output: Path, *methods: str, cycles: int = 1, **further: Any) -> Any:
    plan = study_files.read(study_files.ChainPlan, path)
    return resolve(plan, path, output, methods, further.get("settings", []), cycles=cycles, most=100)


def test_degradation_is_found_where_it_was_planted(tmp_path: Path) -> None:
    """The middle step has a learning rate that ruins the encoder; the same chain without it keeps the source task."""
    path = tiny_tasks.plan(tmp_path, "colour", "size")
    gentle = json.loads(seqreg("chain", path, "--output", "gentle", "--json", cwd=tmp_path).stdout)["values"]
    ruin = ["optimisation.learning_rate=0.3", "optimisation.max_steps=20", "optimisation.lr_scheduler_type=constant"]
    plan = json.loads(path.read_text())
    plan["steps"][1]["settings"] += ruin
    (tmp_path / "ruin.yaml").write_text(json.dumps(plan))
    harsh = json.loads(seqreg("chain", "ruin.yaml", "--output", "harsh", "--json", cwd=tmp_path).stdout)["values"]
    assert gentle["steps"] == harsh["steps"] == ["pretrained", "colour", "size"]
    (kept,), (lost,) = gentle["models"], harsh["models"]
    before, own, after = (one["probes"]["colour"] for one in kept["after"])
    assert min(before["score"], own["score"], after["score"]) > 90
    assert lost["after"][:2] == kept["after"][:2], "the same seed, the same first step"
    assert lost["after"][2]["probes"]["colour"]["high"] < after["low"]
    ranks = [one["after"][2]["layers"][-1]["rank"] for one in (kept, lost)]
    assert ranks[1] < 0.5 * ranks[0]
    assert lost["after"][2]["layers"][-1]["cka"] < 0.6 < kept["after"][2]["layers"][-1]["cka"]


def test_retention_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Two cycles of tasks with two and three classes, two methods; the second run of the command finds one finished."""
    path = tiny_tasks.plan(tmp_path, "colour", "place")
    chain = laid(path, tmp_path / "out", "r3f", cycles=2)
    first = chain.links["baseline", 1][0]
    train.train(first.run)
    stamps = _stamps(first.folder)
    words = ["chain", "plan.yaml", "-t", "r3f", "--cycles", "2", "--output", tmp_path / "out", "--rows", "100"]
    shown = seqreg(*words, cwd=tmp_path)
    assert f"{first.folder}: this run is finished" in shown.stderr
    assert stamps == _stamps(first.folder)
    found = Finding.read(tmp_path / "out" / "evidence" / "chain.json")
    assert found.values["steps"] == ["pretrained", "colour", "place", "colour", "place"]
    assert [(one["method"], len(one["after"])) for one in found.values["models"]] == [("baseline", 5), ("r3f", 5)]
    assert "after every cycle" in " ".join(found.summary)
    assert (tmp_path / "out" / "evidence" / "chain.png").exists()
    last = run_config.load(tmp_path / "out" / "r3f" / "seed-1" / "4-place").config
    assert last.model.name == str(tmp_path / "out" / "r3f" / "seed-1" / "3-colour")
    assert list(last.terms) == ["r3f"]
    shutil.rmtree(tmp_path / "out" / "r3f" / "seed-1" / "4-place")
    again = seqreg(*words, cwd=tmp_path).stderr
    assert again.count("this run is finished") == 7
    assert Finding.read(tmp_path / "out" / "evidence" / "chain.json") == found, "bit-identical"


def _stamps(folder: Path) -> dict[str, int]:
    """When every file was written; whoever looks at a run holds its lock."""
    return {file.name: file.stat().st_mtime_ns for file in folder.iterdir() if file.name != ".lock"}


def test_the_encoder_is_carried_over_and_the_head_is_new(tmp_path: Path) -> None:
    """Also from a task with as many classes, where transformers would keep the head."""
    chain = laid(tiny_tasks.plan(tmp_path, "colour", "size"), tmp_path / "out")
    first, second = chain.links["baseline", 1]
    train.train(first.run)
    run = second.run
    splits = loading.load(run.card, run.config.data)
    tokenizer = models.load_tokenizer(run.config, ())
    model = models.load_model(run.config, run.card, tokenizer)
    saved = load_file(first.folder / "model.safetensors")
    for name, values in model.state_dict().items():
        assert torch.equal(values, saved[name]) == (not name.startswith("classifier.")), name
    assert list(model.config.id2label.values()) == ["big", "small"]
    assert len(splits.sets["train"]) == 240


def test_a_chain_that_generates_is_scored_by_rouge(tmp_path: Path) -> None:
    plain = run_config.resolve("gigaword")
    paths = [sample_files.folder(tmp_path / name, plain.card, train=12, held=4) for name in ("one", "two")]
    settings = [*sample_files.tiny("bart", paths[0]), "logging.tensorboard=false"]
    train.train(run_config.resolve("gigaword", overrides=[*settings, f"output={tmp_path / 'base'}"]))
    short = [word for word in settings if not word.startswith("model.")]
    steps = [{"recipe": "gigaword", "name": path.name, "settings": [*short, f"data.path={path}"]} for path in paths]
    plan = {"settings": [f"model.name={tmp_path / 'base'}"], "steps": steps}
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    shown = seqreg("chain", "plan.yaml", cwd=tmp_path)
    assert "ROUGE-L" in shown.stdout
    (found,) = Finding.read(tmp_path / "runs" / "chain-plan" / "evidence" / "chain.json").values["models"]
    own = json.loads((tmp_path / found["folders"][0] / "metrics.json").read_text())["scores"]["test"]["rougeL"]
    assert found["after"][1]["probes"]["one"]["score"] == pytest.approx(own, abs=1e-4)


def test_generated_texts_are_scored_as_their_own_run_scored_them(writer: Path) -> None:
    run = run_config.load(writer)
    examples = loading.load(run.card, run.config.data).sets["test"]
    found = TrainedModel.on_task(str(writer), run).score(examples, "test")
    own = json.loads((writer / "metrics.json").read_text())["scores"]["test"]["rougeL"]
    assert own > 30
    assert found.metrics["rougeL"] == pytest.approx(own, abs=1e-4)


FAULTS = {
    "unknown key": ({"stepz": []}, "stepz=[]: unknown key; did you mean 'steps'?"),
    "one step": ({"steps": [{"recipe": "glue"}]}, "steps"),
    "a setting": (
        {"settings": ["sed=1"], "steps": [{"recipe": "glue", "name": "a"}, {"recipe": "glue", "name": "b"}]},
        "step a: sed=1: unknown key; did you mean 'seed'?",
    ),
    "a recipe": ({"steps": [{"recipe": "glu", "name": "a"}, {"recipe": "glue"}]}, "unknown recipe 'glu'"),
    "a name twice": ({"steps": [{"recipe": "glue"}, {"recipe": "glue"}]}, "give each a name of its own"),
    "a name that is a path": ({"steps": [{"recipe": "glue", "name": "../a"}, {"recipe": "glue"}]}, "another name"),
    "two kinds": ({"steps": [{"recipe": "glue"}, {"recipe": "xsum"}]}, "a chain has steps of one kind"),
    "scratch": ({"steps": [{"recipe": "glue", "variants": ["rte", "tiny"]}, {"recipe": "glue"}]}, "set model.name"),
    "a seed": (
        {"settings": ["seed=3"], "steps": [{"recipe": "glue"}, {"recipe": "glue", "name": "b"}]},
        "settings: seed=3: a chain sets it itself: see seeds and output of the plan",
    ),
    "an output": (
        {"steps": [{"recipe": "glue", "settings": ["output=x"]}, {"recipe": "glue", "name": "b"}]},
        "settings: output=x: a chain sets it itself",
    ),
    "settings as a mapping": (
        {"settings": {"seed": 3}, "steps": [{"recipe": "glue"}, {"recipe": "glue", "name": "b"}]},
        "settings={'seed': 3}: expected a valid list",
    ),
    "no data": (
        {"settings": ["data.path=gone"], "steps": [{"recipe": "glue"}, {"recipe": "glue", "name": "b"}]},
        "data.path=gone: no such file or folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_one_line_before_anything_is_trained(fault: str, tmp_path: Path) -> None:
    values, expected = FAULTS[fault]
    (tmp_path / "plan.yaml").write_text(json.dumps(values))
    with pytest.raises(BadInput) as caught:
        laid(tmp_path / "plan.yaml", tmp_path / "out")
    assert expected in str(caught.value)
    assert len(caught.value.lines) == 1
    assert not (tmp_path / "out").exists()


def test_faults_of_the_command(tmp_path: Path) -> None:
    path = tiny_tasks.plan(tmp_path, "colour", "size")
    assert "--terms r3: unknown; did you mean 'r3f'?" in seqreg("chain", path, "-t", "r3", cwd=tmp_path, code=2).stderr
    assert "gone.yaml: no such file" in seqreg("chain", "gone.yaml", cwd=tmp_path, code=2).stderr
    assert (
        "seed=3: a chain sets it itself: see --seeds and --output"
        in seqreg("chain", path, "seed=3", cwd=tmp_path, code=2).stderr
    )
    assert not (tmp_path / "runs").exists()
