"""Models that are compiled: equal losses and gradients, one compilation, and no graph breaks but at the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from seqreg import Criterion
from seqreg.integrations.hf import context
from seqreg.terms.bregman import Bregman
from tests.helpers import tiny_models
from tests.helpers.engine_cases import TERMS
from tests.integrations.test_support import compare, loss_and_gradient

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own, of its hasattr
OURS = "torch.compiler.disable"
"""In the reason of a graph break that this package asks for."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def breaks() -> dict[str, int]:
    return dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("name", "term", "most"), [("llama", "base", 0), ("llama", "smart", 0), ("llama", "r3f", 9), ("bart", "base", 9)]
)
def test_compiled_once_and_broken_at_the_embedding_alone(name: str, term: str, most: int) -> None:
    net, batch = tiny_models.make(name), tiny_models.batch(name)
    plain = {key: value for key, value in batch.items() if key != "labels"} if name == "llama" else batch
    torch.compile(tiny_models.make(name), backend="eager")(**plain)
    theirs = set(breaks())
    torch._dynamo.reset()
    counters.clear()
    model, graphs = torch.compile(net, backend="eager"), []
    criterion = Criterion(*TERMS[term](), label_smoothing=0.1)
    for step in range(10):  # more than dynamo recompiles before it gives up
        report = criterion(context(model, batch, step=step))
        report.total.backward()
        graphs.append(counters["stats"]["unique_graphs"])
        assert set(report.paths.values()) == {"plain" if name == "bart" else "fused"}  # BART shifts its logits
    assert graphs == [graphs[0]] * 10
    assert graphs[0] > 0
    reasons = {reason: number for reason, number in breaks().items() if reason not in theirs}
    assert all(OURS in reason for reason in reasons)
    assert sum(reasons.values()) <= most


def test_a_model_of_two_stacks() -> None:
    terms, batch = TERMS["r3f"](), [tiny_models.batch("bart")]
    found = loss_and_gradient(in_place(tiny_models.make("bart"), "eager"), batch, terms, start=False)
    compare(found, loss_and_gradient(tiny_models.make("bart"), batch, terms, start=False), 1e-5)


def wrapped(net: Any, backend: str) -> Any:
    return torch.compile(net, backend=backend)


def in_place(net: Any, backend: str) -> Any:
    net.compile(backend=backend)
    return net


@pytest.mark.parametrize("how", [wrapped, in_place])
@pytest.mark.parametrize(
    ("backend", "term"),
    [
        ("eager", "r3f"),
        *(pytest.param("aot_eager", term, marks=pytest.mark.slow) for term in TERMS if term != "r4f"),
        *(pytest.param("inductor", term, marks=pytest.mark.slow) for term in ("base", "r3f", "smart")),
    ],
)
def test_backends(backend: str, term: str, how: Any) -> None:
    terms, batch = TERMS[term](), [tiny_models.batch("llama")]
    with torch._inductor.config.patch(fallback_random=True):  # else inductor draws dropout masks of its own
        losses, gradients, paths = loss_and_gradient(how(tiny_models.make("llama"), backend), batch, terms)
    found = losses, {name.replace("_orig_mod.", ""): value for name, value in gradients.items()}, paths
    compare(found, loss_and_gradient(tiny_models.make("llama"), batch, terms), 1e-5)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
def test_dropout_of_inductor_is_its_own_and_is_shared_by_passes() -> None:
    """Also between a pass with a graph and one without, which are compiled apart."""
    model, batch = in_place(tiny_models.make("gpt2"), "inductor"), tiny_models.batch("gpt2")
    values = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        values.append(Criterion(Bregman())(context(model, batch, step=0)).values)
    assert [float(value["bregman"]) for value in values] == [0, 0]  # the average is the model itself
    assert float(values[0]["nll"]) != float(values[1]["nll"])
