"""Texts without labels and old examples in the loss: the mean over all of them, computed by hand from each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqreg import Criterion
from seqreg.context import Count, Evaluation
from seqreg.divergences import DIVERGENCES
from seqreg.errors import BadInput
from seqreg.integrations.hf import context, count
from seqreg.terms.anchor import Anchor
from seqreg.terms.bregman import Bregman
from seqreg.terms.freelb import FreeLB
from seqreg.terms.jachess import JacHess
from seqreg.terms.neftune import NEFTune
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.smart import SMART
from seqreg.terms.uegr import UEGR
from seqreg.terms.vat import VAT
from tests.helpers import tiny_models

Batch = dict[str, Tensor]
TERMS: dict[str, Callable[..., Any]] = {
    "anchor": Anchor,
    "bregman": Bregman,
    "r3f": lambda **o: R3F(scale=0.1, relative=True, **o),
    "rdrop": lambda **o: RDrop(task="none", **o),
    "smart": SMART,
    "vat": VAT,
    "jachess": lambda **o: JacHess(name="jachess", **o),
}


def tagger() -> Any:
    from transformers import RobertaConfig, RobertaForTokenClassification

    config = RobertaConfig(
        vocab_size=tiny_models.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=3, max_position_embeddings=66, pad_token_id=tiny_models.PAD,
    )  # fmt: skip
    torch.manual_seed(0)
    return RobertaForTokenClassification(config).train()


def model_and_batches(name: str) -> tuple[Any, Batch, Batch]:
    """A model in float64, a labelled batch, and longer texts that have a label at every real position."""
    if name == "tagger":
        net, source = tagger(), "roberta"
    else:
        net, source = tiny_models.make(name), name
    labelled, texts = tiny_models.batch(source, rows=2), tiny_models.batch(source, rows=3, pad=2, seed=7)
    if name == "tagger":
        for batch in (labelled, texts):
            batch["labels"] = (batch["input_ids"] % 3).masked_fill(batch["attention_mask"] == 0, -100)
    return net.double(), labelled, texts


def without_labels(name: str, batch: Batch) -> Batch:
    """What a text without labels has: for a decoder its targets."""
    return batch if name in tiny_models.SEQ2SEQ else {key: value for key, value in batch.items() if key != "labels"}


def gradient(net: Any, total: Tensor) -> Tensor:
    net.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in net.parameters()])


def started(net: Any, term: Any, batch: Batch) -> dict[str, Tensor]:
    """What a term keeps from the start of training, after which the weights move."""
    criterion = Criterion(term)
    criterion(context(net, batch, step=0))
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=drawn, dtype=parameter.dtype)
    return criterion.state_dict()


def term_alone(net: Any, term: Any, kept: dict[str, Tensor], batch: Batch, seed: Tensor) -> tuple[float, Tensor]:
    """The value of a term on one labelled batch and its gradient: of the loss with it, less that without."""
    found = []
    for terms in ((term,), ()):
        criterion = Criterion(*terms, fused=False)
        if terms:
            criterion.load_state_dict(kept)
        torch.set_rng_state(seed)
        report = criterion(context(net, batch, step=1))
        after = torch.get_rng_state() if terms else after  # noqa: F821
        found.append((report, gradient(net, report.total)))
    torch.set_rng_state(after)
    (ours, with_term), (_, without) = found
    return float(ours.values[term.name]), with_term - without


@pytest.mark.parametrize("on", ["both", "unlabelled"])
@pytest.mark.parametrize("name", ["bart", "roberta", "tagger", "llama"])
@pytest.mark.parametrize("term", TERMS)
def test_the_mean_is_over_all_examples_that_the_term_counts_on(term: str, name: str, on: str) -> None:
    """Value and gradient: the base loss, and the mean over each batch weighted by its positions (JacHess: rows)."""
    net, labelled, texts = model_and_batches(name)
    kept = started(net, TERMS[term](), labelled)
    criterion = Criterion(TERMS[term](weight=0.7, on=on), fused=False)
    criterion.load_state_dict(kept)
    torch.manual_seed(5)
    seed = torch.get_rng_state()
    first = context(net, labelled, step=1)
    second = context(net, without_labels(name, texts), step=1, stream="unlabelled")
    report = criterion(first, second)
    ours = gradient(net, report.total)

    torch.set_rng_state(seed)
    base = Criterion(fused=False)(context(net, labelled, step=1))
    expected = gradient(net, base.total)
    rows = term == "jachess"
    sizes = [float(len(ctx.mask) if rows else ctx.mask.sum()) for ctx in (first, second)]
    total = sum(sizes) if on == "both" else sizes[1]
    values = {}
    if on == "both":
        value, slope = term_alone(net, TERMS[term](weight=1.0), kept, labelled, seed)
        values[term], expected = sizes[0] / total * value, expected + 0.7 * sizes[0] / total * slope
    value, slope = term_alone(net, TERMS[term](weight=1.0), kept, texts, torch.get_rng_state())
    values[f"{term}.unlabelled"], expected = sizes[1] / total * value, expected + 0.7 * sizes[1] / total * slope

    assert {key: float(number) for key, number in report.values.items() if key != "nll"} == pytest.approx(values)
    assert sum(values.values()) > 0
    tolerance = 1e-9 if name != "llama" else 1e-6 if term != "jachess" else 1e-4  # its norms are in float32
    assert (ours - expected).norm() < tolerance * expected.norm()
    assert float(report.total.detach()) == pytest.approx(sum(float(part) for part in report.parts.values()))


@pytest.mark.parametrize("name", ["bart", "roberta", "llama"])
def test_the_fused_loss_of_two_streams_is_the_plain_one(name: str) -> None:
    found = []
    for fused in (True, False):
        net, labelled, texts = model_and_batches(name)
        tiny_models.dropout_off(net)
        torch.manual_seed(5)
        criterion = Criterion(
            VAT(on="both"), R3F(on="both", scale=0.1, relative=True), label_smoothing=0.1, fused=fused
        )
        report = criterion(
            context(net, labelled, step=0),
            context(net, texts, step=0, stream="replay"),
            context(net, without_labels(name, texts), step=0, stream="unlabelled"),
        )
        found.append((float(report.total.detach()), gradient(net, report.total)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["bart", "roberta", "llama"])
def test_old_examples_are_labelled_examples(name: str) -> None:
    """The loss is that of one batch which has the rows of both; the log tells them apart."""
    net, new, old = model_and_batches(name)
    tiny_models.dropout_off(net)
    report = Criterion(label_smoothing=0.1)(context(net, new), context(net, old, stream="replay"))
    sizes = [float(context(net, batch).mask.sum()) for batch in (new, old)]
    alone = [Criterion(label_smoothing=0.1)(context(net, batch)) for batch in (new, old)]
    expected = sum(size * float(one.total.detach()) for size, one in zip(sizes, alone, strict=True)) / sum(sizes)
    assert float(report.total.detach()) == pytest.approx(expected)
    for key, one in (("nll", alone[0]), ("nll.replay", alone[1])):
        assert float(report.values[key]) == pytest.approx(float(one.values["nll"]))
    assert set(report.parts) == {"base", "base.replay"}


@pytest.mark.parametrize("name", ["bart", "roberta", "tagger", "llama"])
def test_micro_batches_add_up_to_the_step(name: str) -> None:
    net, labelled, texts = model_and_batches(name)
    tiny_models.dropout_off(net)
    texts = without_labels(name, texts)
    criterion = Criterion(Anchor(on="both", weight=1.0))
    criterion.load_state_dict(started(net, Anchor(), labelled))
    whole = gradient(
        net, criterion(context(net, labelled, step=1), context(net, texts, step=1, stream="unlabelled")).total
    )
    halves = [{key: value[part] for key, value in labelled.items()} for part in (slice(0, 1), slice(1, 2))]
    parts = [{key: value[part] for key, value in texts.items()} for part in (slice(0, 2), slice(2, 3))]
    step = count(net, halves, unlabelled=parts)
    total = sum(
        criterion(
            context(net, half, step=1, count=step), context(net, part, step=1, count=step, stream="unlabelled")
        ).total
        for half, part in zip(halves, parts, strict=True)
    )
    torch.testing.assert_close(gradient(net, total), whole, rtol=1e-9, atol=1e-12)


def test_padding_of_a_stream_does_not_count() -> None:
    net, labelled, _ = model_and_batches("bart")
    tiny_models.dropout_off(net)
    found = []
    for pad in (0, 4):
        torch.manual_seed(0)
        texts = tiny_models.batch("bart", rows=3, pad=pad, seed=7)
        criterion = Criterion(Anchor(on="unlabelled"), R3F(on="both", scale=0.1, relative=True, noise="uniform"))
        criterion.load_state_dict({})
        report = criterion(context(net, labelled, step=0), context(net, texts, step=0, stream="unlabelled"))
        found.append({key: float(value) for key, value in report.values.items() if not key.startswith("r3f")})
        assert context(net, texts, stream="unlabelled").count == context(net, texts, stream="unlabelled").count
        assert count(net, [labelled], unlabelled=[texts]).unlabelled == Count(15.0, 3.0, positions=15.0)
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("term", [FreeLB, UEGR, NEFTune])
def test_terms_that_need_labels_refuse_texts_without(term: Any) -> None:
    with pytest.raises(BadInput, match=r"on='both': \w+ needs labels: use on='labelled'"):
        term(on="both")


def test_no_stream_and_no_term_is_left_out_in_silence() -> None:
    net, labelled, texts = model_and_batches("roberta")
    texts = without_labels("roberta", texts)
    with pytest.raises(BadInput, match=r"vat: on='both' counts on texts without labels, and there are none"):
        Criterion(VAT(on="both"))(context(net, labelled, step=0))
    with pytest.raises(BadInput, match=r"no term counts on them: set on='both' or on='unlabelled' on vat"):
        Criterion(VAT())(context(net, labelled, step=0), context(net, texts, step=0, stream="unlabelled"))
    with pytest.raises(BadInput, match=r"at most one of each stream"):
        Criterion()(context(net, labelled), context(net, labelled))
    step = count(net, [labelled], unlabelled=[texts])
    with pytest.raises(BadInput, match=r"different counts"):
        Criterion(VAT(on="both"))(
            context(net, labelled, step=0, count=step), context(net, texts, step=0, stream="unlabelled")
        )


def test_a_decoder_needs_targets_for_texts_without_labels() -> None:
    net, _, texts = model_and_batches("bart")
    with pytest.raises(BadInput, match=r"the decoder of this model needs targets: .*written_targets"):
        context(net, {key: value for key, value in texts.items() if key != "labels"}, stream="unlabelled")


def test_r_drop_has_no_second_task_loss_on_texts_without_labels() -> None:
    net, labelled, texts = model_and_batches("bart")
    report = Criterion(RDrop(on="both"))(
        context(net, labelled, step=0), context(net, texts, step=0, stream="unlabelled")
    )
    assert set(report.tasks) == {"rdrop"}


@pytest.mark.parametrize("name", ["bart", "roberta", "llama"])
@pytest.mark.parametrize("divergence", ["kl", "symmetric_kl", "js"])
def test_only_confident_positions_count_towards_sharpened_targets(name: str, divergence: Any) -> None:
    """By hand from all logits: the mean of the divergence to the sharpened start, 0 where the start is not sure."""
    net, labelled, texts = model_and_batches(name)
    tiny_models.dropout_off(net)
    texts = without_labels(name, texts)
    start = context(net, texts, stream="unlabelled")
    held = Evaluation(start).clean.logits.detach()
    sure = held.softmax(-1).amax(-1)
    ordered = sure[start.mask].sort().values
    confidence = float(ordered[len(ordered) // 2 - 1 : len(ordered) // 2 + 1].mean())
    kept = started(net, Anchor(divergence=divergence), labelled)
    for fused in (True, False):
        settings = {"on": "unlabelled", "weight": 1.0, "confidence": confidence, "sharpen": 0.5}
        criterion = Criterion(Anchor(divergence=divergence, **settings), fused=fused)
        criterion.load_state_dict(kept)
        texts_ctx = context(net, texts, step=1, stream="unlabelled")
        report = criterion(context(net, labelled, step=1), texts_ctx)
        ours = gradient(net, report.total)
        base = gradient(net, Criterion()(context(net, labelled, step=1)).total)
        values = DIVERGENCES[divergence](held / 0.5, Evaluation(texts_ctx).clean.logits)
        counted = start.mask & (sure >= confidence)
        assert 0 < int(counted.sum()) < int(start.mask.sum())
        slow = (values * counted).sum() / start.mask.sum()
        assert float(report.values["anchor.unlabelled"]) == pytest.approx(float(slow.detach()), rel=1e-5)
        expected = gradient(net, slow)
        assert (ours - base - expected).norm() < 1e-5 * expected.norm()
    share = criterion.diagnostics(texts_ctx)["anchor/confident_share"]
    assert share == pytest.approx(int(counted.sum()) / int(start.mask.sum()))


def test_confidence_and_sharpening_are_for_texts_without_labels() -> None:
    for make, message in (
        (lambda: VAT(confidence=0.8), "confidence=0.8: only texts without labels have it"),
        (lambda: VAT(on="both", confidence=1.0), r"confidence=1.0: expected a probability in \[0, 1\)"),
        (lambda: VAT(on="both", sharpen=0.0), "sharpen=0.0: expected a temperature > 0"),
    ):
        with pytest.raises(BadInput, match=message):
            make()
    net, labelled, texts = model_and_batches("roberta")
    with pytest.raises(BadInput, match="needs a side that is held fixed: use grad='perturbed'"):
        Criterion(SMART(on="unlabelled", sharpen=0.5))(
            context(net, labelled, step=0), context(net, texts, step=0, stream="unlabelled")
        )
