"""The gradient does not depend on how a batch is cut into accumulation steps and ranks."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def run(world: int, out: Path) -> Any:
    """What every rank saw."""
    command = [sys.executable, "-m", "tests.helpers.distributed_worker", str(out)]
    if world > 1:
        command[1:2] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr[-4000:]
    return [torch.load(out / f"{world}-{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    out = tmp_path_factory.mktemp("ranks")
    return {world: run(world, out) for world in (1, 2)}


WAYS = [("trainer", "bart"), ("trainer", "roberta"), ("ddp", "bart"), ("ddp_steps", "bart"), ("accelerate", "bart")]
TERMS = ["none", "r3f", "r3f_rows", "smart", "jachess"]
TOLERANCES = {"smart": 1e-4, "jachess": 1e-5}
"""An ascent starts where the divergence is flat, and so turns rounding into a direction; differences lose digits."""


@pytest.mark.parametrize(
    ("way", "model", "term"),
    [
        *((*way, term) for term in TERMS for way in WAYS),
        *(("trainer", model, "streams") for model in ("bart", "roberta")),
        ("ddp", "bart", "anchor"),
        ("accelerate", "bart", "anchor"),
    ],
)
def test_gradient(seen: dict[int, Any], model: str, term: str, way: str) -> None:
    expected = seen[1][0][0][f"{way}/{model}/{term}/1"]
    assert expected.norm() > 0
    for world, ranks in seen.items():
        for accumulate in (1, 2, 4):
            for gradients, _ in ranks:
                found = gradients[f"{way}/{model}/{term}/{accumulate}"]
                error = (found - expected).norm() / expected.norm()
                assert error <= TOLERANCES.get(term, 1e-6), f"world {world}, accumulation {accumulate}: {error:.1e}"


@pytest.mark.parametrize("term", [*TERMS, "streams"])
@pytest.mark.parametrize(("model", "cuts"), [("bart", (1, 2)), ("roberta", (1,)), ("llama", (1,))])
def test_gradient_under_fsdp2(seen: dict[int, Any], model: str, cuts: tuple[int, ...], term: str) -> None:
    """The trainer of a sharded model has the gradient of one process."""
    expected = seen[1][0][0][f"trainer/{model}/{term}/1"]
    for (gradients, _), accumulate in itertools.product(seen[2], cuts):
        error = (gradients[f"fsdp2/{model}/{term}/{accumulate}"] - expected).norm() / expected.norm()
        assert error <= TOLERANCES.get(term, 1e-6), f"accumulation {accumulate}: {error:.1e}"


@pytest.mark.parametrize("term", ["none", "r3f_rows"])
@pytest.mark.parametrize("model", ["bart", "llama"])
def test_gradient_under_fsdp2_in_bf16(seen: dict[int, Any], model: str, term: str) -> None:
    exact = seen[1][0][0][f"trainer/{model}/{term}/1"]
    for gradients, _ in seen[2]:
        found, loop = gradients[f"bf16/{model}/{term}"]
        assert (found - loop).norm() <= 2e-2 * loop.norm()
        assert 1e-4 * exact.norm() < (found - exact).norm() <= 5e-2 * exact.norm(), "of bf16"


def test_a_sharded_trainer_resumes_exactly_and_saves_a_plain_model(seen: dict[int, Any]) -> None:
    for gradients, _ in seen[2]:
        whole, resumed, saved = gradients["resumed"]
        assert whole.keys() == resumed.keys() == saved.keys()
        for name in whole:
            assert torch.equal(whole[name], resumed[name]), name
            assert torch.equal(whole[name], saved[name]), name


def test_masks_of_an_update_are_the_same_on_every_rank(seen: dict[int, Any]) -> None:
    expected = seen[1][0][0]["masks"]
    assert 0.3 < (expected != 0).float().mean() < 0.6
    for gradients, _ in seen[2]:
        assert torch.equal(gradients["masks"], expected)


def test_all_ways_agree(seen: dict[int, Any]) -> None:
    gradients = seen[2][0][0]
    for term in TERMS:
        expected = gradients[f"ddp/bart/{term}/2"]
        for way in ("trainer", "ddp_steps", "accelerate"):
            tolerance = TOLERANCES.get(term, 1e-6)
            assert (gradients[f"{way}/bart/{term}/2"] - expected).norm() <= tolerance * expected.norm()


def test_logged_loss_and_parts_do_not_depend_on_the_cut(seen: dict[int, Any]) -> None:
    for ranks in seen.values():
        for _, logs in ranks:
            for key, row in logs.items():
                expected = seen[1][0][1][key.replace("fsdp2/", "trainer/").rpartition("/")[0] + "/1"]
                parts = {name: value for name, value in row.items() if name.startswith("part/")}
                assert sum(parts.values()) == pytest.approx(row["loss"], rel=1e-6)
                for name in ("loss", "value/nll", *parts):
                    tolerance = 1e-4 if name == "part/smart" else 1e-5
                    assert row[name] == pytest.approx(expected[name], rel=tolerance), (key, name)
