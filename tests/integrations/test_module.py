"""Contexts of any module, with a loss of any kind."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from seqreg import BadInput, Context, Criterion, attach
from seqreg.integrations.hf import context, optimizer_steps
from seqreg.integrations.module import loss_context
from seqreg.terms.freelb import FreeLB
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.smart import SMART
from tests.helpers import tiny_models
from tests.integrations.test_attach import made
from tests.integrations.test_hf_context import fixed_noise
from tests.integrations.test_trainer import losses


def encoder() -> Any:
    return tiny_models.make("bert").bert


def pairs() -> dict[str, Tensor]:
    """Three pairs: the first sentences, then the second ones."""
    batch = tiny_models.batch("bert", rows=6)
    return {key: batch[key] for key in ("input_ids", "attention_mask")}


def contrastive(outputs: Tensor) -> Tensor:
    first, second = (functional.normalize(half, dim=-1) for half in outputs.chunk(2, -1))
    return functional.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)), reduction="none")


def pooled(states: Tensor, mask: Tensor) -> Tensor:
    means = (states * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return torch.cat(means.chunk(2), -1)


def of_pairs(model: Any, batch: dict[str, Tensor], loss: Any = contrastive, **options: Any) -> Context:
    mask = batch["attention_mask"]
    return loss_context(
        model, lambda: pooled(model(**batch).last_hidden_state, mask), loss, mask=torch.ones(len(mask) // 2),
        embedding=model.get_input_embeddings(), token_mask=mask, layers=model.encoder.layer, **options,
    )  # fmt: skip


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_r3f_on_pairs_is_the_formula(monkeypatch: Any) -> None:
    """Against a slow and obvious computation: InfoNCE, and the squared distance to a pass with shifted embeddings."""
    fixed_noise(monkeypatch)
    model, batch = tiny_models.dropout_off(encoder()), pairs()
    report = Criterion(R3F(weight=0.3, scale=0.1, divergence="mse"))(of_pairs(model, batch))
    report.total.backward()
    found = gradient(model)
    model.zero_grad()
    mask = batch["attention_mask"]
    words = model.get_input_embeddings()(batch["input_ids"])
    clean, noisy = (
        pooled(model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state, mask)
        for embeds in (words, words + 0.1 * torch.sin(1000 * words.detach()))
    )
    base, term = contrastive(clean).mean(), (clean - noisy).square().mean(-1).mean()
    (base + 0.3 * term).backward()
    assert float(report.parts["base"]) == pytest.approx(float(base.detach()), rel=1e-6)
    assert float(report.values["r3f"]) == pytest.approx(float(term.detach()), rel=1e-5)
    assert (found - gradient(model)).norm() <= 1e-5 * found.norm()


@pytest.mark.parametrize("term", [SMART(inner="mse", divergence="mse"), FreeLB(), RDrop(divergence="mse")])
def test_other_terms_learn_on_pairs(term: Any) -> None:
    model = encoder()
    report = Criterion(term)(of_pairs(model, pairs(), step=0))
    assert float(report.parts[term.name]) > 0
    report.total.backward()
    assert gradient(model).isfinite().all()
    model.eval()
    with torch.no_grad():
        assert set(Criterion(term)(of_pairs(model, pairs())).parts) == {"base"}


def scored(model: Any, batch: Any, **options: Any) -> Context:
    """A loss of every row."""
    return loss_context(
        model, lambda: model(**batch).pooler_output, lambda x: x.square().sum(-1),
        mask=torch.ones(len(batch["input_ids"])), embedding=model.get_input_embeddings(),
        token_mask=batch["attention_mask"], **options,
    )  # fmt: skip


@pytest.mark.parametrize("estimator", ["finite_difference", "reverse"])
def test_a_term_of_every_layer(estimator: Any) -> None:
    """As on a transformers model: the same encoder below a classifier has the same Jacobian norms."""
    whole = tiny_models.dropout_off(tiny_models.make("bert"))
    whole.set_attn_implementation("eager")
    term, found = JacHess(estimator=estimator, layers="encoder"), []
    for ctx in (
        context(whole, tiny_models.batch("bert", rows=6)),
        scored(whole.bert, pairs(), layers=whole.bert.encoder.layer),
    ):
        torch.manual_seed(0)
        found.append(float(Criterion(term)(ctx).values["jachess"]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0] > 0
    with pytest.raises(BadInput, match="the rows of the input, 6, and the loss has 3 examples"):
        Criterion(term)(of_pairs(whole.bert, pairs()))


def test_what_is_wrong_is_one_line() -> None:
    model = encoder()
    with pytest.raises(BadInput, match=r"the loss gave \[\], and was to give \[3\]: one number a position or example"):
        Criterion()(of_pairs(model, pairs(), loss=lambda outputs: contrastive(outputs).mean()))
    with pytest.raises(BadInput, match=r"label_smoothing=0\.1 means nothing to your own loss"):
        Criterion(label_smoothing=0.1)(of_pairs(model, pairs()))
    with pytest.raises(BadInput, match="use divergence='mse'"):
        Criterion(R3F())(of_pairs(model, pairs()))
    ctx = loss_context(
        model, lambda: model(**pairs()).pooler_output, lambda x: x.sum(-1), mask=torch.ones(6),
        embedding=model.get_input_embeddings(),
    )  # fmt: skip
    with pytest.raises(BadInput, match="pass layers="):
        Criterion(JacHess())(ctx)
    twice = loss_context(
        model, lambda: model(**pairs()).pooler_output + model(**pairs()).pooler_output, lambda x: x.sum(-1),
        mask=torch.ones(6), embedding=model.get_input_embeddings(),
    )  # fmt: skip
    with pytest.raises(BadInput, match="applied 2 times instead of once"):
        Criterion(R3F(scale=0.1, divergence="mse"))(twice)


def test_accumulation_does_not_change_the_gradient(monkeypatch: Any) -> None:
    fixed_noise(monkeypatch)
    batch = pairs()
    found = {}
    for size in (6, 4):
        model = tiny_models.dropout_off(encoder())
        cut = [{key: value[start : start + size] for key, value in batch.items()} for start in range(0, 6, size)]
        for _, contexts in optimizer_steps(model, cut, len(cut), build_context=scored):
            for ctx in contexts:
                Criterion(R3F(scale=0.1, divergence="mse"))(ctx).total.backward()
        found[size] = gradient(model)
    assert (found[4] - found[6]).norm() <= 1e-6 * found[6].norm()


def test_a_likelihood_of_your_own_is_that_of_the_labels() -> None:
    """From logits of all positions, and from the fused head: the same loss and gradient, with a term beside it."""

    def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.transpose(1, -1), labels, reduction="none")

    found = []
    for loss in (None, likelihood):
        model = tiny_models.make("gpt2")
        torch.manual_seed(0)
        report = Criterion(R3F(scale=0.1))(context(model, tiny_models.batch("gpt2"), loss=loss))
        report.total.backward()
        found.append((float(report.parts["base"]), float(report.parts["r3f"]), gradient(model)))
    (base, term, expected), (own, other, gradients) = found
    assert (own, other) == pytest.approx((base, term), rel=1e-5)
    assert (gradients - expected).norm() <= 1e-5 * expected.norm()


def test_multi_label_classification_in_a_trainer(tmp_path: Path) -> None:
    def bce(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)

    def trained(*terms: Any) -> list[dict[str, float]]:
        net = tiny_models.make("roberta", problem_type="multi_label_classification")
        one = made("roberta", tmp_path, net=net)
        one.train_dataset = [{**row, "labels": torch.eye(3)[row["labels"]]} for row in one.train_dataset]
        if terms != ("plain",):
            attach(one, Criterion(*terms), build_context=functools.partial(context, loss=bce))
        torch.manual_seed(0)
        one.train()
        return losses(one)

    expected, found = trained("plain"), trained()
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-6)
    assert trained(R3F(scale=0.1, divergence="mse"))[0]["part/r3f"] > 0
    with pytest.raises(BadInput, match=r"multi-label classification needs a loss of its own, context\("):
        context(tiny_models.make("roberta"), {**tiny_models.batch("roberta"), "labels": torch.eye(3)})
