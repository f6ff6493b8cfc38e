"""Domain shift: scores as they are, further training on the same rows for every model, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seqreg.errors import BadInput
from seqreg.studies.collapse.shift import resolve
from seqreg.studies.common.findings import Finding
from seqreg.workbench.config import cards, run_config
from seqreg.workbench.config.settings import Data
from seqreg.workbench.data import loading
from seqreg.workbench.run import train
from tests.helpers import sample_files, tiny_tasks
from tests.helpers.tiny_tasks import seqreg


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and R3F on one domain; another domain with the same classes and other texts."""
    folder = tmp_path_factory.mktemp("shift")
    tiny_tasks.bert(folder / "bert")
    tiny_tasks.task(folder, "size")
    card = tiny_tasks.task(folder, "colour")
    tiny_tasks.task(folder / "other", "colour", seed=50)
    settings = [f"task={card}", f"data.path={folder / 'colour'}", f"model.name={folder / 'bert'}", *tiny_tasks.SHORT]
    for name, terms in (("baseline", []), ("r3f", ["r3f"])):
        train.train(run_config.resolve("glue", terms=terms, overrides=[*settings, f"output={folder / 'runs' / name}"]))
    return folder


def test_a_share_is_the_same_rows_for_everyone(place: Path) -> None:
    card, _ = cards.load(str(place / "colour.yaml"))
    whole = loading.load(card, Data(path=str(place / "colour"))).sets["train"]
    tenth, half = (
        loading.load(card, Data(path=str(place / "colour"), train_fraction=s)).sets["train"] for s in (0.1, 0.5)
    )
    assert (len(tenth), len(half)) == (24, 120)
    assert [one for one in half if one in tenth] == tenth
    assert [one for one in whole if one in half] == half
    assert tenth != whole[:24]


def test_from_the_command_line(place: Path) -> None:
    target = place / "other"
    words = ["shift", "runs/baseline", "runs/r3f", "--to", target / "colour.yaml", f"data.path={target / 'colour'}"]
    shown = seqreg(*words, cwd=place)
    assert "baseline" in shown.stdout
    found = Finding.read(place / "runs" / "evidence" / "shift.json")
    assert any(line.startswith("r3f: accuracy on colour is ") for line in found.summary)
    assert (place / "runs" / "evidence" / "shift.png").exists()
    for name in ("baseline", "r3f"):
        folder = place / "runs" / name / "shift" / "colour" / "share-0.1"
        run = run_config.load(folder)
        assert run.config.model.name == f"runs/{name}"
        assert list(run.config.terms) == ([] if name == "baseline" else ["r3f"])
        assert run.config.data.train_fraction == 0.1
        numbers = found.values["models"][name]
        scores = json.loads((folder / "metrics.json").read_text())["scores"]["test"]
        assert numbers["target"]["0.1"]["score"] == scores["accuracy"]
        text = f"--data {target / 'colour' / 'test.jsonl'} --output again-{name}"
        seqreg("evaluate", f"runs/{name}", *text.split(), cwd=place)
        alone = json.loads((place / f"again-{name}" / "metrics.json").read_text())["scores"]["test"]["accuracy"]
        assert numbers["target"]["0"]["score"] == pytest.approx(alone)
        own = json.loads((place / "runs" / name / "metrics.json").read_text())["scores"]["test"]["accuracy"]
        assert numbers["source"]["score"] == own
    again = seqreg(*words, "--json", cwd=place)
    assert again.stderr.count("this run is finished") == 2
    assert json.loads(again.stdout)["values"] == found.values


def test_summarization_too(tmp_path: Path) -> None:
    plain = run_config.resolve("gigaword")
    source = sample_files.folder(tmp_path / "source", plain.card, train=12, held=4)
    target = sample_files.folder(tmp_path / "target", cards.load("xsum")[0], train=20, held=4)
    settings = [*sample_files.tiny("bart", source), "model.settings.max_position_embeddings=1200"]
    train.train(run_config.resolve("gigaword", overrides=[*settings, "logging.tensorboard=false",
                                                      f"output={tmp_path / 'run'}"]))  # fmt: skip
    words = [f"data.path={target}", "data.max_source_length=24", "data.max_target_length=8", "generation.max_length=8"]
    words += ["generation.min_length=0"]
    seqreg("shift", "run", "--to", "xsum", *words, "--share", "0", "--share", "0.5", cwd=tmp_path)
    found = Finding.read(tmp_path / "run" / "evidence" / "shift.json").values
    assert found["metric"] == "rougeL"
    assert list(found["models"]["baseline"]["target"]) == ["0", "0.5"]
    run = run_config.load(tmp_path / "run" / "shift" / "xsum" / "share-0.5")
    assert run.config.generation.num_beams == cards.load("xsum")[0].generation.num_beams
    assert len(loading.load(run.card, run.config.data).sets["train"]) == 10


def test_faults_are_one_line_before_anything_is_trained(place: Path) -> None:
    runs, colour = [place / "runs" / "baseline"], str(place / "colour.yaml")

    def fault(task: str, *settings: str, share: float = 0.1) -> str:
        with pytest.raises(BadInput) as caught:
            resolve(runs, task, [share], settings, False)
        assert len(caught.value.lines) == 1
        return str(caught.value)

    assert "its classes are red, blue; those of size are big, small" in fault(str(place / "size.yaml"))
    assert "was trained for classification, and XSum is generation" in fault("xsum")
    assert "--share 2: expected a share" in fault(colour, share=2)
    assert "gone: no such file or folder" in fault(colour, "data.path=gone")
    assert "unknown key; did you mean 'seed'?" in fault(colour, "sed=1")
    assert "output=x: not here" in fault(colour, "output=x")
    assert "data.share=0.5: not here" in fault(colour, "data.share=0.5")
    assert "unknown task 'glue/rt'; did you mean 'glue/rte'?" in fault("glue/rt")
    none = seqreg("shift", "bert", "--to", colour, cwd=place, code=2).stderr
    assert "bert: not a run of seqreg" in none
    assert "give the output folder" in seqreg("shift", "seed=1", "--to", colour, cwd=place, code=2).stderr


def test_a_shift_needs_intervals(place: Path) -> None:
    with pytest.raises(BadInput, match=r"evaluation\.resamples=0: a shift is shown with intervals"):
        resolve([place / "runs" / "baseline"], str(place / "colour.yaml"), [0.0], ["evaluation.resamples=0"], False)
