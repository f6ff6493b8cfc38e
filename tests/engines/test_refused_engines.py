"""Tensor parallelism itself, on two ranks: every term is refused under it, in one line."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from seqreg import BadInput, Criterion
from seqreg.engines.detect import engine_of
from seqreg.engines.shards import local
from seqreg.integrations.hf import context, count, r4f
from tests import support
from tests.helpers import tiny_models
from tests.helpers.engine_cases import R4F, TERMS, Case, Result, make, on_ranks, terms_of


def _environment(patch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    """What torchrun tells a rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in names.items():
        patch.setenv(name, str(value))


def _refusals(model: Any, name: str, terms: list[str]) -> dict[str, str]:
    """What every term says under the engine of a model."""
    messages, batch = {}, tiny_models.batch(name)
    whole = count(model, [batch])
    for term in terms:
        with pytest.raises(BadInput) as refused:
            Criterion(*terms_of(Case(name, term)))(context(model, batch, step=0, count=whole))
        messages[term] = str(refused.value)
    return messages


def _tensor_parallel(rank: int, world: int, *, folder: str) -> tuple[str, dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        _environment(patch, rank, world)
        net = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
        parameters = sum(local(parameter).numel() for parameter in net.parameters())
        assert parameters < sum(parameter.numel() for parameter in make(Case("llama", "base")).parameters())
        messages = _refusals(net.train(), "llama", list(TERMS))
        classifier = AutoModelForSequenceClassification.from_pretrained(folder, tp_plan="auto", num_labels=3)
        assert engine_of(classifier) == engine_of(net)
        batch = {**tiny_models.batch("llama"), "labels": torch.arange(3)}
        with pytest.raises(BadInput) as refused:
            Criterion(*TERMS["r3f"]())(
                context(r4f(classifier).train(), batch, step=0, count=count(classifier, [batch]))
            )
        return engine_of(net), {**messages, R4F: str(refused.value)}


def _both(work: Any, folder: Path) -> tuple[str, dict[str, str]]:
    first, second = (rank.popitem()[1] for rank in on_ranks(2, folder, [work], seconds=400))
    assert not isinstance(first, Result), first.error
    assert first == second
    return first


def _check(engine: str, column: str, messages: dict[str, str]) -> None:
    for term, message in messages.items():
        named = {"base": "the loss", R4F: "r3f"}.get(term, term)
        assert message.startswith(
            f"{named}: {engine} has not been shown to give the gradient of one process: use FSDP2"
        )
        assert "\n" not in message
        assert support.expected(term, column) == "refused"


@pytest.mark.timeout(900)
def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make(Case("llama", "base")).save_pretrained(model)
    engine, messages = _both(partial(_tensor_parallel, folder=str(model)), tmp_path)
    assert engine == "tensor parallelism"
    assert messages.keys() == {*TERMS, R4F}
    _check("tensor parallelism", "TP", messages)
