"""Probes find a collapse that was planted, and none where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from seqreg.errors import BadInput
from seqreg.studies.collapse import study_files
from seqreg.studies.collapse.encoders import Encoder
from seqreg.studies.collapse.probe import Prober
from seqreg.studies.collapse.study_files import ProbeTask
from seqreg.studies.common.findings import Finding
from seqreg.workbench.config import cards, run_config
from seqreg.workbench.config.settings import Data
from seqreg.workbench.run import train
from tests.helpers import tiny_tasks
from tests.helpers.tiny_tasks import seqreg


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    for name in tiny_tasks.CLUES:
        tiny_tasks.task(folder, name)
    tiny_tasks.bert(folder / "bert")
    return folder


def of(place: Path, name: str) -> ProbeTask:
    card, _ = cards.load(str(place / f"{name}.yaml"))
    return ProbeTask.load(name, card, Data(path=str(place / name), max_source_length=24), 5000)


def collapsed(place: Path, target: Path) -> Path:
    """The same model, but its last layer keeps one direction of 64."""
    model = transformers.AutoModel.from_pretrained(place / "bert")
    norm = model.encoder.layer[-1].output.LayerNorm
    with torch.no_grad():
        norm.weight[1:] = 0
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(place / "bert").save_pretrained(target)
    return target


def test_a_planted_collapse_is_found(place: Path, tmp_path: Path) -> None:
    prober = Prober([of(place, name) for name in tiny_tasks.CLUES])
    base = str(place / "bert")
    kept = prober.probe(base, base, "pretrained")
    lost = prober.probe(str(collapsed(place, tmp_path / "collapsed")), base, "collapsed")
    for name in tiny_tasks.CLUES:
        assert kept.probes[name].score > 95
        assert lost.probes[name].score < 75
        assert lost.probes[name].high < kept.probes[name].low
    assert kept.rank > 10
    assert lost.rank == pytest.approx(1, abs=1e-3)
    assert [layer.cka for layer in kept.layers] == pytest.approx([1, 1], abs=1e-9)
    first, last = lost.layers
    assert first.cka == pytest.approx(1, abs=1e-9)
    assert first.rank == pytest.approx(kept.layers[0].rank, rel=1e-9)
    assert last.cka is not None
    assert last.cka < 0.6


def test_features_do_not_see_padding_or_their_batch(place: Path) -> None:
    encoder, task = Encoder.load(str(place / "bert")), of(place, "colour")
    rows = [*task.test[:5], *(type(one)(one.source * 2) for one in task.test[:2])]
    for pooling in ("mean", "first"):
        together = encoder.features(rows, task.data, pooling)
        alone = np.concatenate([encoder.features([one], task.data, pooling) for one in rows])
        assert np.abs(together - alone).max() < 1e-5
    model = transformers.AutoModel.from_pretrained(place / "bert").eval()
    ids = torch.tensor([encoder.tokenizer(rows[0].source)["input_ids"]])
    with torch.no_grad():
        slow = model(input_ids=ids).last_hidden_state[0]
    assert np.abs(encoder.features(rows, task.data)[0] - slow.mean(0).numpy()).max() < 1e-5
    assert np.abs(encoder.features(rows, task.data, "first")[0] - slow[0].numpy()).max() < 1e-5


def test_weights_that_are_missing_are_not_drawn(place: Path, tmp_path: Path) -> None:
    model = transformers.AutoModel.from_pretrained(place / "bert")
    states = {name: values for name, values in model.state_dict().items() if "layer.1" not in name}
    model.save_pretrained(tmp_path / "torn", state_dict=states)
    transformers.AutoTokenizer.from_pretrained(place / "bert").save_pretrained(tmp_path / "torn")
    with pytest.raises(BadInput, match=r"16 missing \(encoder\.layer\.1"):
        Encoder.load(str(tmp_path / "torn"))


@pytest.mark.parametrize("architecture", ["BartForSequenceClassification", "T5ForConditionalGeneration"])
def test_encoders_of_models_with_a_decoder(architecture: str, place: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "bert")
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "d_model": 16, "decoder_start_token_id": 0}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_kv": 8,
              "num_layers": 1, "d_ff": 16, "num_heads": 2, "encoder_attention_heads": 2,
              "decoder_attention_heads": 2}  # fmt: skip
    kind = getattr(transformers, architecture)
    known = {key: value for key, value in sizes.items() if hasattr(kind.config_class(), key)}
    model = kind(kind.config_class(**known)).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder, task = Encoder.load(str(tmp_path)), of(place, "colour")
    ids = torch.tensor([encoder.tokenizer(task.test[0].source)["input_ids"]])
    with torch.no_grad():
        slow = model.get_encoder()(input_ids=ids).last_hidden_state[0].mean(0)
    found = encoder.features(task.test[:3], task.data)[0]
    assert np.abs(found - slow.numpy()).max() < 1e-5


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    settings = [f"task={place / 'colour.yaml'}", f"data.path={place / 'colour'}", f"model.name={place / 'bert'}"]
    run = run_config.resolve("glue", overrides=[*settings, *tiny_tasks.SHORT, f"output={place / 'run'}"])
    train.train(run)
    return place / "run"


def test_from_the_command_line(place: Path, trained: Path, tmp_path: Path) -> None:
    tasks = [{"task": str(place / f"{name}.yaml"), "data": {"path": str(place / name)}} for name in tiny_tasks.CLUES]
    (tmp_path / "tasks.yaml").write_text(json.dumps({"tasks": tasks}))
    shown = seqreg("probe", trained, "--tasks", "tasks.yaml", cwd=tmp_path).stdout
    assert "pretrained" in shown
    assert "most common class" in shown
    finding = Finding.read(trained / "evidence" / "probe.json")
    assert set(finding.values["models"]) == {"pretrained", "baseline"}
    assert all((trained / "evidence" / name).exists() for name in (*finding.figures, "probe.png"))
    probes = finding.values["models"]["pretrained"]["probes"]
    assert all(one["score"] > 95 for one in probes.values())
    truth = [one.label for one in of(place, "colour").test]
    assert probes["colour"]["majority"] in [pytest.approx(100 * truth.count(label) / len(truth)) for label in (0, 1)]
    layers = finding.values["models"]["baseline"]["layers"]
    assert all(0.5 < layer["cka"] < 1 for layer in layers)
    own = seqreg("probe", trained, "--output", tmp_path / "own", "--rows", "60", "--json", cwd=tmp_path).stdout
    ((name, rows),) = json.loads(own)["values"]["tasks"].items()
    assert name in tiny_tasks.CLUES
    assert rows["train"] == rows["test"] == 60


def test_faults_are_one_line(place: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("tasks: [{tsk: glue/rte, task: glue/rte}]")
    bad = seqreg("probe", place / "bert", "--tasks", "bad.yaml", cwd=tmp_path, code=2).stderr
    assert "bad.yaml: tasks.0.tsk='glue/rte': unknown key; did you mean 'task'?" in bad
    none = seqreg("probe", place / "bert", cwd=tmp_path, code=2).stderr
    assert "not a run of seqreg" in none
    twice = seqreg("probe", place / "bert", place / "size" / ".." / "bert", cwd=tmp_path, code=2).stderr
    assert "the same run twice" in twice
    (tmp_path / "number.yaml").write_text(f"tasks: [{{task: glue/stsb, data: {{path: '{tmp_path}'}}}}]")
    with pytest.raises(BadInput, match="a linear probe is a classifier"):
        study_files.read_tasks(tmp_path / "number.yaml", 100)
    (tmp_path / "gone.yaml").write_text("tasks: [{task: glue/rte, data: {path: gone}}]")
    with pytest.raises(BadInput, match="gone: no such file or folder"):
        study_files.read_tasks(tmp_path / "gone.yaml", 100)


def test_texts_longer_than_the_model_are_refused(place: Path) -> None:
    card, _ = cards.load(str(place / "colour.yaml"))
    task = ProbeTask.load("colour", card, Data(path=str(place / "colour"), max_source_length=41), 50)
    with pytest.raises(BadInput, match=r"colour: data\.max_source_length=41: .*bert has only 40 positions"):
        Prober([task]).probe(str(place / "bert"), None, "x")
