"""TensorBoard's projector: the encoder states of a run before and after training, as TensorBoard itself reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from google.protobuf import text_format
from tensorboard.plugins.projector import projector_config_pb2

from seqreg.errors import BadInput
from seqreg.workbench.config import run_config
from seqreg.workbench.data import loading
from seqreg.workbench.run import train
from tests.helpers import sample_files


def run_of(recipe: str, folder: Path, *further: str, variants: list[str]) -> run_config.Run:
    plain = run_config.resolve(recipe, variants=variants)
    data = sample_files.folder(folder / "data", plain.card, train=16, held=6)
    architecture = "bart" if plain.card.kind == "generation" else "roberta"
    settings = [*sample_files.tiny(architecture, data), f"output={folder / 'run'}", "optimisation.max_steps=3"]
    settings += ["evaluation.drift_examples=5", "optimisation.learning_rate=1e-2", "logging.projector=true", *further]
    return run_config.resolve(recipe, variants=variants, overrides=settings)


def projected(folder: Path) -> tuple[np.ndarray[Any, Any], list[list[str]]]:
    """Points and their labels, found by way of the configuration that TensorBoard reads."""
    text = (folder / "tensorboard/projector_config.pbtxt").read_text()
    config = text_format.Parse(text, projector_config_pb2.ProjectorConfig())
    (embedding,) = config.embeddings
    points = np.loadtxt(folder / "tensorboard" / embedding.tensor_path, delimiter="\t")
    lines = (folder / "tensorboard" / embedding.metadata_path).read_text().splitlines()
    return points, [line.split("\t") for line in lines]


def states(model: Any, folder: Path, sources: list[str]) -> np.ndarray[Any, Any]:
    """Means of the last encoder states over real tokens, by plain transformers, a text at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoder, means = model.eval().get_encoder(), []
    for source in sources:
        batch = tokenizer(source, truncation=True, max_length=24, return_tensors="pt")
        with torch.no_grad():
            means.append(encoder(**batch).last_hidden_state[0].mean(0).numpy())
    return np.stack(means)


def test_the_projector_shows_states_of_the_start_and_of_the_trained_model(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, variants=[])
    train.train(run)
    points, (header, *labels) = projected(tmp_path / "run")
    assert header == ["model", "target", "source"]
    examples = loading.sample(loading.load(run.card, run.config.data).sets["validation"], 5)
    assert [label[0] for label in labels] == ["start"] * 5 + ["trained"] * 5
    assert [label[1:] for label in labels] == 2 * [[str(one.target)[:100], one.source[:100]] for one in examples]
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    expected = states(model, tmp_path / "run", [one.source for one in examples])
    np.testing.assert_allclose(points[5:], expected, atol=1e-4)
    prepared = train.prepare(run_of("gigaword", tmp_path, variants=[])).model  # the same weights, by its seed
    np.testing.assert_allclose(points[:5], states(prepared, tmp_path / "run", [o.source for o in examples]), atol=1e-4)
    assert np.abs(points[:5] - points[5:]).max() > 0.01
    assert not list((tmp_path / "run").glob("tensorboard/*/**/*.png"))


@pytest.mark.parametrize(("recipe", "variants", "kind"), [("glue", ["rte"], "label"), ("ner", ["conll2003"], "label")])
def test_labels_of_points_are_those_of_the_task(recipe: str, variants: list[str], kind: str, tmp_path: Path) -> None:
    run = run_of(recipe, tmp_path, variants=variants)
    train.train(run)
    points, (header, *labels) = projected(tmp_path / "run")
    assert header == ["model", kind, "source"]
    assert len(points) == len(labels) == 2 * min(5, len(loading.load(run.card, run.config.data).sets["validation"]))
    names = {
        word for label in labels for word in label[1].split()[: None if recipe == "glue" else -1]
    }  # the last is cut
    assert names <= set(run.card.labels or ())


def test_a_run_that_is_finished_again_has_its_points_once(tmp_path: Path) -> None:
    run = run_of("gigaword", tmp_path, "checkpoints.save_steps=1", variants=[])
    train.train(run)
    first = projected(tmp_path / "run")
    (tmp_path / "run/model.safetensors").write_bytes(b"damaged")
    train.train(run)  # writes the model again from its last checkpoint
    again = projected(tmp_path / "run")
    assert again[1] == first[1]
    np.testing.assert_array_equal(again[0], first[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("logging.tensorboard=false", r"logging\.projector=true: it is TensorBoard's: set logging\.tensorboard=true"),
        ("evaluation.drift_examples=0", r"logging\.projector=true needs examples: set evaluation\.drift_examples > 0"),
    ],
)
def test_a_projector_needs_tensorboard_and_examples(given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        run_of("gigaword", tmp_path, given, variants=[])
    assert len(caught.value.lines) == 1
