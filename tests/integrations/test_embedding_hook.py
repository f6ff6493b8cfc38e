from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Evaluation, Perturbation
from seqreg.integrations.embedding_hook import EmbeddingTap, Stack
from seqreg.integrations.hf import context
from seqreg.integrations.hf.model import stacks
from tests.helpers import tiny_models

SITES = [
    (model, site)
    for model in tiny_models.MODELS
    for site in (("encoder", "decoder") if model in tiny_models.SEQ2SEQ or model.endswith("_classifier") else ("only",))
]


def consumed_ids(net: Any, batch: dict[str, Tensor], stack: Stack) -> Tensor:
    """What the stack looked up, recorded by hooks of the test's own."""
    seen: list[Tensor] = []
    inside: list[bool] = []
    handles = [
        stack.module.register_forward_pre_hook(lambda *_: inside.append(True)),
        stack.module.register_forward_hook(lambda *_: inside.clear()),
        stack.embedding.register_forward_hook(lambda _, args, __: seen.append(args[0]) if inside else None),
    ]
    Evaluation(context(net, batch)).clean  # noqa: B018
    for handle in handles:
        handle.remove()
    (ids,) = seen
    return ids


@pytest.mark.parametrize(
    ("model", "site", "resized"),
    [
        (model, site, resized)
        for model, site in SITES
        for resized in (False, True)
        if not (resized and model == "bert2bert")  # transformers cannot resize an EncoderDecoderModel
    ],
)
def test_shifting_embeddings_equals_changing_the_table(model: str, site: str, resized: bool) -> None:
    """A shift that depends on the token alone is the same as another embedding table: an independent reference."""
    net = tiny_models.dropout_off(tiny_models.make(model)).eval()
    if resized:
        net.resize_token_embeddings(tiny_models.VOCAB + 8)
        net.train().eval()
    batch = tiny_models.batch(model)
    name = next(iter(stacks(net))) if site == "only" else site
    stack = stacks(net)[name]
    ids = consumed_ids(net, batch, stack)
    table = 0.3 * torch.randn(stack.embedding.weight.shape)  # type: ignore[arg-type]
    ctx = Evaluation(context(net, batch))
    clean = ctx.clean
    shifted = ctx.forward(Perturbation({name: table[ids]}), dropout="off")
    torch.testing.assert_close(shifted.embeds[name, "embedding"], clean.embeds[name, "embedding"] + table[ids])

    changed = copy.deepcopy(net)
    other = stacks(changed)[name]
    embedding = copy.deepcopy(other.embedding)
    with torch.no_grad():
        embedding.weight = torch.nn.Parameter(embedding.weight + table / (stack.inner * stack.outer))  # type: ignore
    for attribute, module in owners(other):
        setattr(module, attribute, embedding)
    expected = Evaluation(context(changed, batch)).clean
    assert (shifted.logits - clean.logits).abs().max() > 1e-4
    torch.testing.assert_close(shifted.logits, expected.logits, rtol=1e-4, atol=1e-5)


def owners(stack: Stack) -> list[tuple[str, torch.nn.Module]]:
    """Where the stack keeps its embedding."""
    return [
        (name, module)
        for module in stack.module.modules()
        for name, child in module._modules.items()
        if child is stack.embedding
    ]


@pytest.mark.parametrize("model", tiny_models.MODELS)
def test_reading_does_not_change_the_pass(model: str) -> None:
    net = tiny_models.make(model).eval()
    batch = tiny_models.batch(model)
    ctx = Evaluation(context(net, batch))
    inputs = ctx.forward.inputs  # type: ignore[attr-defined]
    plain = net(**inputs).logits
    assert torch.equal(ctx.clean.output.logits, plain)


def test_fires_once_or_complains() -> None:
    class Deaf(torch.nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.embedding, self.times = torch.nn.Embedding(3, 2), times

        def forward(self, ids: Tensor) -> list[Tensor]:
            return [self.embedding(ids) for _ in range(self.times)]

    ids = torch.zeros(1, 1, dtype=torch.long)
    for times in (0, 2):
        net = Deaf(times)
        with pytest.raises(BadInput, match=f"applied {times} times instead of once"):
            with EmbeddingTap(Stack(net, net.embedding), torch.ones(1, 1, 2)):
                net(ids)
        assert not net._forward_hooks
        assert not net.embedding._forward_hooks
    net = Deaf(1)
    with EmbeddingTap(Stack(net, net.embedding), torch.ones(1, 1, 2)) as tap:
        (shifted,) = net(ids)
    assert torch.equal(shifted, net.embedding(ids) + 1)
    assert tap.fired == 1


def test_removed_after_an_exception() -> None:
    net = tiny_models.make("bart")
    stack = stacks(net)["encoder"]
    with pytest.raises(RuntimeError), EmbeddingTap(stack, torch.ones(99, 99, 99)):
        net(**{**tiny_models.batch("bart"), "labels": None})
    assert not stack.module._forward_hooks
    assert not stack.module._forward_pre_hooks
    assert not stack.embedding._forward_hooks


def test_inputs_embeds_are_answered_with_the_fix() -> None:
    net = tiny_models.make("bart")
    batch = tiny_models.batch("bart")
    batch["inputs_embeds"] = net.get_encoder().embed_tokens(batch.pop("input_ids"))
    ctx = Evaluation(context(net, batch))
    assert torch.isfinite(ctx.clean.logits).all()
    with pytest.raises(BadInput, match="feed input_ids, not inputs_embeds"):
        _ = ctx.clean.embeds["encoder", "embedding"]
