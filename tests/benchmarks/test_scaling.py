"""The model of many GPUs: what is counted, what it adds up, and the page that it writes."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import BartForConditionalGeneration

from benchmarks import scaling
from benchmarks.__main__ import app
from benchmarks.scaling import GB, Cluster, best, estimate, workload
from benchmarks.sizes import SIZES
from benchmarks.worker_process import count_flops, peak_of_step
from seqreg import Criterion
from seqreg.build import build_term
from seqreg.integrations.hf import context
from tests.helpers import tiny_models
from tests.helpers.tiny_tasks import seqreg

TINY = dataclasses.replace(SIZES["tiny"], source=128, target=32)


@pytest.fixture(scope="module")
def model() -> BartForConditionalGeneration:
    return TINY.model()


@pytest.fixture(scope="module")
def shape(model: Any) -> scaling.Workload:
    return workload("tiny", model, TINY.rows, TINY.source, TINY.target)


def test_operations_are_those_of_the_step(model: Any, shape: scaling.Workload) -> None:
    config, batch = copy.deepcopy(model.config), TINY.batch()
    config._attn_implementation = "eager"  # torch counts the fused kernels' recomputation too
    real = type(model)(config)
    assert shape.flops == count_flops(lambda: real(**batch).loss.backward())
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.encoder, shape.decoder, shape.width, shape.classes) == (3, 3, 128, 2000)


@pytest.mark.parametrize("name", ["r3f", "rdrop"])
def test_stacking_holds_no_more_and_a_further_pass_holds_as_much_again(model: Any, name: str) -> None:
    batch = TINY.batch()

    def peak(term: str | None, batched: bool = True) -> int:
        terms = () if term is None else (build_term(term),)
        criterion = Criterion(*terms)

        def step() -> None:
            criterion(context(model, batch, step=0), batched=batched).total.backward()

        step()
        return peak_of_step(step, model)

    peaks = {"plain": peak(None), "stacked": peak(name), "apart": peak(name, batched=False)}
    assert peaks["stacked"] <= 1.01 * peaks["apart"]
    assert 1.5 < peaks["apart"] / peaks["plain"] < 2.1


def test_what_is_sent_and_held(shape: scaling.Workload) -> None:
    cluster, size = Cluster(gpus=4, link=1, memory=1), 4 * shape.parameters
    plain, sharded = (estimate(shape, cluster, None, engine, False) for engine in ("DDP", "FSDP2"))
    assert plain.states == pytest.approx(4 * size + 2 * shape.layer)
    assert sharded.states == pytest.approx(size + 4 * shape.layer)
    assert plain.communication * GB == pytest.approx(2 * 3 / 4 * size)
    assert sharded.communication * GB == pytest.approx(3 / 4 * 2 * size)
    r3f, smart, anchor = (
        estimate(shape, cluster, build_term(name), "FSDP2", False) for name in ("r3f", "smart", "anchor")
    )
    assert r3f.communication == sharded.communication  # stacked
    assert smart.communication * GB == pytest.approx(3 / 4 * (6 * size / 2 + size))
    assert (r3f.activations, anchor.activations) == (2 * sharded.activations, sharded.activations)
    assert (r3f.compute / plain.compute, smart.compute / plain.compute) == (pytest.approx(2), pytest.approx(3))
    assert anchor.kept_weights == pytest.approx(size / 4)
    checkpointed = estimate(shape, cluster, None, "DDP", True)
    assert checkpointed.compute == pytest.approx(4 / 3 * plain.compute)
    assert checkpointed.activations < plain.activations


def test_the_fastest_that_fits(shape: scaling.Workload) -> None:
    assert best(shape, Cluster(), None).engine == "DDP"
    tight = best(shape, Cluster(memory=0.04), None)
    assert (tight.engine, tight.memory <= 0.04 * GB) == ("FSDP2", True)
    row = scaling.table(shape, Cluster(memory=0.001), [None])[0]
    assert not row["fits"]
    assert "does not fit" in scaling.cells(row)[6]
    assert Cluster(gpus=16).bandwidth < Cluster(gpus=8).bandwidth


def test_a_recipe_is_estimated(tmp_path: Path) -> None:
    small = "model.settings={d_model: 32, encoder_layers: 1, decoder_layers: 1}"
    words = ["scaling", "quickstart", "--terms", "r3f", "--gpus", "16", "--memory", "40", small]
    said = seqreg(*words, cwd=tmp_path, app=app)
    assert "a step on 16 GPUs of 40 GB" in said.stdout
    assert "estimates: no GPU was used" in " ".join(said.stdout.split())


def test_the_page_is_what_is_computed() -> None:
    assert scaling.PAGE.read_text() == scaling.render(), "run python -m benchmarks scaling"


def test_classifiers_have_no_vocabulary() -> None:
    net = tiny_models.make("roberta")
    found = workload("classifier", net, 2, 16, 16)
    assert (found.classes, found.encoder) == (0, 0)
    assert found.flops > 0
    assert estimate(found, Cluster(), build_term("r3f"), "DDP", False).head == 0
