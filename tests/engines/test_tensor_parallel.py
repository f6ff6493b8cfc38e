"""Tensor parallelism itself (`tp_plan="auto"`), on two ranks: every term is exact, or refused in one line."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from seqreg import BadInput, Criterion
from seqreg.context import Count
from seqreg.engines.detect import engine_of
from seqreg.engines.shards import full, local
from seqreg.integrations.hf import RegularizedTrainer, context, count, r4f
from tests import support
from tests.helpers import tiny_models
from tests.helpers.engine_cases import R4F, TERMS, Case, Result, alone, difference, make, on_ranks, settled, terms_of


def _two_steps(net: Any, term: str, seed: int, whole: Any) -> Result:
    """Two steps of gradient descent on the same batches; the gradients are those of the second."""
    criterion, optimizer = Criterion(*TERMS[term](), label_smoothing=0.1), torch.optim.SGD(net.parameters(), lr=0.5)
    settled(criterion, "llama")
    result = Result([], {}, {}, {})
    for step in range(2):
        optimizer.zero_grad()
        batch = tiny_models.batch("llama", seed=step)
        torch.manual_seed(seed + step)
        report = criterion(context(net, batch, step=step, count=whole([batch])))
        report.total.backward()  # type: ignore[no-untyped-call]
        result.losses.append(float(report.total.detach()))
        result.gradients = {name: full(p.grad).clone() for name, p in net.named_parameters() if p.grad is not None}
        result.parts = {name: float(part) for name, part in report.parts.items()}
        optimizer.step()
    return result


def _every_term(rank: int, world: int, *, folder: str) -> dict[str, Any]:
    """Losses and gradients of every term, or its refusal; ranks begin with other generators."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**torchrun, "MASTER_PORT": 29500}.items():
            patch.setenv(name, str(value))
        for term in TERMS:
            net = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").train()
            assert engine_of(net) == "tensor parallelism"
            assert sum(local(p).numel() for p in net.parameters()) < sum(p.numel() for p in net.parameters())
            plain = AutoModelForCausalLM.from_pretrained(folder).train()
            try:
                result = _two_steps(net, term, 100 * (rank + 1), partial(count, net))
            except BadInput as refused:
                found[term] = str(refused)
            else:
                found[term] = result, _two_steps(plain, term, 100, partial(alone, Case("llama", term)))
        classifier = AutoModelForSequenceClassification.from_pretrained(folder, tp_plan="auto", num_labels=3)
        batch = {**tiny_models.batch("llama"), "labels": torch.arange(3)}
        with pytest.raises(BadInput) as normalised:
            Criterion(*terms_of(Case("llama", R4F)))(
                context(r4f(classifier).train(), batch, step=0, count=Count(3, 3, world))
            )
        with pytest.raises(BadInput) as in_trainer:
            RegularizedTrainer.set_criterion(SimpleNamespace(model=net), Criterion())  # type: ignore[arg-type]
        return {**found, R4F: str(normalised.value), "trainer": str(in_trainer.value)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tp")
    model = folder / "model"
    tiny_models.dropout_off(make(Case("llama", "base"))).save_pretrained(model)
    work = partial(_every_term, folder=str(model))
    first, *_ = (rank.popitem()[1] for rank in on_ranks(2, folder, [work], seconds=500))
    assert not isinstance(first, Result), first.error
    return first  # type: ignore[no-any-return]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("term", [*TERMS, R4F])
def test_exact_or_refused(found: dict[str, Any], term: str) -> None:
    expected = support.expected(term, "TP")
    if isinstance(found[term], str):
        assert expected == "refused", found[term]
        assert found[term].startswith(f"{term}: tensor parallelism")
        assert "\n" not in found[term]
    else:
        assert expected == "exact"
        losses, gradients = difference(*found[term])
        assert losses <= 6e-6
        assert gradients <= 1e-4
        assert term in ("base", "neftune") or found[term][0].parts[term] != 0


def test_trainer_is_refused(found: dict[str, Any]) -> None:
    assert found["trainer"].startswith("tensor parallelism has not been tried in a Trainer")
