from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from seqreg import BadInput, Cost, Count, Criterion, Evaluation, Pass, Passes, Perturbation, Term
from seqreg.errors import Advice
from seqreg.integrations.hf import context, count
from seqreg.integrations.hf.context import HFForward
from seqreg.integrations.hf.model import decoder_inputs, task_of
from seqreg.objective import BaseLoss
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models


def test_tasks() -> None:
    assert {task_of(tiny_models.make(name)) for name in tiny_models.SEQ2SEQ} == {"seq2seq"}
    assert {task_of(tiny_models.make(name)) for name in tiny_models.CLASSIFIERS} == {"classification"}
    assert {task_of(tiny_models.make(name)) for name in tiny_models.CAUSAL} == {"causal"}

    class Mine(transformers.BartForConditionalGeneration):  # type: ignore[misc]
        pass

    assert task_of(Mine(tiny_models.make("bart").config)) == "seq2seq"
    with pytest.raises(BadInput, match="load it with AutoModelForSeq2SeqLM"):
        task_of(tiny_models.make("bart").model)
    with pytest.raises(BadInput, match="Linear is not a transformers model"):
        context(torch.nn.Linear(2, 2), {})


def test_a_loss_that_was_put_into_the_model_is_not_dropped_silently() -> None:
    class Adding(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **inputs: Any) -> Any:
            output = super().forward(*args, **inputs)
            output.loss = None if output.loss is None else output.loss + output.logits.square().mean()
            return output

    net, batch = tiny_models.make("llama"), tiny_models.batch("llama")
    with pytest.warns(Advice, match="^Adding has a forward of its own: what it adds to the loss of LlamaForCausalLM"):
        context(Adding(net.config), batch)
    net.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    with pytest.raises(
        BadInput,
        match=r"^LlamaForCausalLM: the loss_function that .* give a loss of your own as context\(model, batch, loss",
    ):
        context(net, batch)
    report = Criterion()(context(net, batch, loss=lambda logits, labels: logits.square().mean(-1)))
    assert report.total > 0


@pytest.mark.parametrize("model", tiny_models.MODELS)
def test_loss_is_the_models_own(model: str) -> None:
    """Without smoothing and terms, value and gradient are those of the loss that transformers computes."""
    net = tiny_models.dropout_off(tiny_models.make(model))
    batch = tiny_models.batch(model)
    report = Criterion()(context(net, batch))
    report.total.backward()
    ours = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Version v4.12.0", FutureWarning)  # EncoderDecoderModel, about itself
        theirs = net(**batch).loss
    theirs.backward()
    assert report.total.item() == pytest.approx(theirs.item(), rel=1e-5)
    for name, p in net.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(ours[name], p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", tiny_models.MODELS)
def test_no_label_at_all_is_zero_and_not_nan(model: str) -> None:
    labels = torch.full_like(tiny_models.batch(model)["labels"], -100)
    net = tiny_models.make(model)
    report = Criterion(R3F(), label_smoothing=0.1)(context(net, {**tiny_models.batch(model), "labels": labels}))
    assert report.total == 0
    report.total.backward()
    assert all((p.grad == 0).all() for p in net.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["bart", "mbart", "pegasus", "marian", "t5", "led", "prophetnet"])
def test_decoder_inputs_are_the_models_own(name: str) -> None:
    net, labels = tiny_models.make(name), tiny_models.batch(name)["labels"]
    expected = net.prepare_decoder_input_ids_from_labels(labels=labels)
    assert torch.equal(decoder_inputs(net, labels), expected)


@pytest.mark.parametrize("kind", ["m2m100", "blenderbot"])
def test_decoder_inputs_where_transformers_has_no_method(kind: str) -> None:
    if kind == "m2m100":
        net = tiny_models.make("m2m100")
        from transformers.models.m2m_100.modeling_m2m_100 import shift_tokens_right
    else:
        net = transformers.BlenderbotForConditionalGeneration(
            transformers.BlenderbotConfig(
                vocab_size=tiny_models.VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
                pad_token_id=tiny_models.PAD, bos_token_id=tiny_models.BOS, eos_token_id=tiny_models.EOS,
                decoder_start_token_id=tiny_models.BOS,
            )
        )  # fmt: skip
        from transformers.models.blenderbot.modeling_blenderbot import shift_tokens_right
    assert not hasattr(net, "prepare_decoder_input_ids_from_labels")
    labels = tiny_models.batch("bart")["labels"]
    expected = shift_tokens_right(labels, net.config.pad_token_id, net.config.decoder_start_token_id)
    assert torch.equal(decoder_inputs(net, labels), expected)
    assert (labels == tiny_models.batch("bart")["labels"]).all(), "the labels are left alone"
    assert Criterion(R3F(where="both"))(context(net, tiny_models.batch("bart"))).values["r3f"] > 0
    if kind == "m2m100":
        net.config.decoder_start_token_id = None
        with pytest.raises(BadInput, match=r"config\.decoder_start_token_id is not set"):
            decoder_inputs(net, labels)


def test_the_batch_is_left_alone() -> None:
    batch = tiny_models.batch("bart")
    before = {key: value.clone() for key, value in batch.items()}
    Criterion(R3F())(context(tiny_models.make("bart"), batch))
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[key], before[key]) for key in batch)


@pytest.mark.parametrize(
    ("value", "message"), [(tiny_models.VOCAB, "is the tokenizer larger"), (-1, "padding must be -100")]
)
@pytest.mark.parametrize("model", ["bart", "t5", "gpt2", "m2m100", "bert2bert"])
def test_impossible_labels_are_named_before_anything_runs(model: str, value: int, message: str) -> None:
    batch = tiny_models.batch(model)
    batch["labels"][1, 2] = value
    with pytest.raises(BadInput, match=rf"labels\[1, 2\] is {value}, .*{message}"):
        context(tiny_models.make(model), batch)


def test_impossible_classes() -> None:
    batch = {**tiny_models.batch("roberta"), "labels": torch.tensor([0, 3, 1])}
    with pytest.raises(BadInput, match=r"labels\[1\] is 3, but the head has classes 0\.\.2"):
        context(tiny_models.make("roberta"), batch)
    net = tiny_models.make("roberta", problem_type="multi_label_classification")
    with pytest.raises(BadInput, match="multi-label"):
        context(net, {**tiny_models.batch("roberta"), "labels": torch.rand(3, 3)})


BATCHES: list[tuple[str, Any, str]] = [
    ("bart", lambda b: {"input_ids": b["input_ids"]}, "has no tensor 'labels'"),
    ("bart", lambda b: {**b, "labels": b["labels"].tolist()}, "labels is a list: set return_tensors='pt'"),
    ("bart", lambda b: (b["input_ids"], b["labels"]), "this is a tuple"),
    ("bart", lambda b: {k: v[0] for k, v in b.items()}, "expected as many rows"),
    ("bart", lambda b: {k: v[:0] for k, v in b.items()}, "expected as many rows, at least one"),
    ("bart", lambda b: {**b, "labels": b["labels"].float()}, "expected token ids"),
    ("roberta", lambda b: {**b, "labels": b["labels"][:2]}, "expected as many rows"),
    ("gpt2", lambda b: {**b, "labels": b["labels"][:, 1:]}, "do not shift them"),
]


@pytest.mark.parametrize(("model", "change", "message"), BATCHES, ids=[case[2] for case in BATCHES])
def test_impossible_batches(model: str, change: Any, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        context(tiny_models.make(model), change(tiny_models.batch(model)))


def test_labels_in_a_column_are_the_same_as_in_a_row() -> None:
    batch = tiny_models.batch("roberta")
    net = tiny_models.make("roberta").eval()
    column = {**batch, "labels": batch["labels"].unsqueeze(-1)}
    assert Criterion()(context(net, column)).total == Criterion()(context(net, batch)).total


def test_count_wants_a_list_of_batches_with_labels() -> None:
    with pytest.raises(BadInput, match=r"count\(model, \[batch\]\)"):
        count(tiny_models.make("bart"), tiny_models.batch("bart"))
    with pytest.raises(BadInput, match="has no tensor 'labels'"):
        count(tiny_models.make("bart"), [{"input_ids": torch.ones(1, 1)}])


def test_labels_on_padding_of_a_causal_model_are_warned_of() -> None:
    batch = tiny_models.batch("gpt2")
    with pytest.warns(UserWarning, match="labels on padding will be learnt"):
        context(tiny_models.make("gpt2"), {**batch, "labels": batch["input_ids"]})


def test_a_wrapper_like_peft_is_seen_through() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.base_model = net

        def get_base_model(self) -> Any:
            return self.base_model

        def forward(self, **inputs: Any) -> Any:
            return self.base_model(**inputs)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.base_model, name)  # as PEFT does

    assert Criterion(R3F())(context(Wrapper(tiny_models.make("bart")), tiny_models.batch("bart"))).values["r3f"] > 0


def test_autocast_inside_the_model_is_seen() -> None:
    """Accelerate switches autocast on around the model's forward alone."""
    net = tiny_models.make("bart")
    forward = net.forward
    net.forward = torch.autocast("cpu", torch.bfloat16)(forward)
    with pytest.raises(BadInput, match="below what bfloat16 resolves"):
        Criterion(R3F())(context(net, tiny_models.batch("bart")))


def test_padding_left_in_the_labels_is_warned_of() -> None:
    batch = tiny_models.batch("bart")
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, tiny_models.PAD)
    with pytest.warns(UserWarning, match="labels contain the padding token 1"):
        context(tiny_models.make("bart"), batch)


def test_masks_of_the_decoder() -> None:
    given = {
        **tiny_models.batch("bart"),
        "decoder_attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 3 + [0] * 3]),
    }
    mask = context(tiny_models.make("bart"), given).forward.sites["decoder"].mask
    assert mask is not None
    assert torch.equal(mask, given["decoder_attention_mask"].bool())
    made = context(tiny_models.make("t5"), tiny_models.batch("t5")).forward.sites["decoder"].mask
    assert made is not None
    assert made.sum(-1).tolist() == [6, 5, 4]
    assert made[:, 0].all(), "T5 starts with its padding token, which is real there"
    shifted = (
        context(tiny_models.make("bart_classifier"), tiny_models.batch("bart_classifier")).forward.sites["decoder"].mask
    )
    assert shifted is not None
    assert shifted.sum(-1).tolist() == [8, 6, 4], "a classifier's decoder reads the source"


def test_regression_counts_rows() -> None:
    """Also with integer labels, and with several outputs a row."""
    net = tiny_models.make("roberta", num_labels=1)
    batch = {**tiny_models.batch("roberta"), "labels": torch.tensor([1, 2, 5])}
    assert Criterion()(context(net.eval(), batch)).total.item() == pytest.approx(net(
        **{**batch, "labels": batch["labels"].float()}).loss.item(), rel=1e-5)  # fmt: skip
    several = tiny_models.make("roberta", num_labels=2, problem_type="regression").eval()
    batch["labels"] = torch.rand(3, 2)
    whole = count(several, [batch])
    assert whole == Count(3.0, 3.0, positions=3.0)
    ctx = context(several, batch, count=whole)
    assert ctx.mask.shape == (3,)
    assert Criterion()(ctx).total.item() == pytest.approx(several(**batch).loss.item(), rel=1e-5)
    with pytest.raises(BadInput, match=r"labels \[3, 2\] do not fit outputs \[3, 1\]"):
        Criterion()(context(net, batch))


def test_labels_must_fit_the_logits() -> None:
    net = tiny_models.make("bart")
    batch = {**tiny_models.batch("bart"), "decoder_input_ids": torch.ones(3, 9, dtype=torch.long)}
    with pytest.raises(BadInput, match=r"labels \[3, 6\] do not fit logits \[3, 9, 48\]"):
        Criterion()(context(net, batch))


def test_special_tokens_may_be_missing_or_many() -> None:
    net = tiny_models.make("bert2bert")
    del net.config.eos_token_id
    assert torch.isfinite(Criterion()(context(net, tiny_models.batch("bert2bert"))).total)
    many = tiny_models.make("mbart")
    many.config.eos_token_id = [tiny_models.EOS, 5]
    batch = tiny_models.batch("mbart")
    batch["labels"][1] = -100
    assert torch.isfinite(Criterion()(context(many, batch)).total)


@pytest.mark.parametrize("name", ["Bart", "Pegasus", "Marian"])
def test_decoders_of_seq2seq_models_do_not_shift_and_scale_where_they_did(name: str) -> None:
    base = tiny_models.make(name.lower()).config
    base.is_encoder_decoder, base.is_decoder = False, True
    net = getattr(transformers, f"{name}ForCausalLM")(base).eval()
    batch = tiny_models.batch("gpt2")
    ctx = context(net, batch)
    assert Criterion()(ctx).total.item() == pytest.approx(net(**batch).loss.item(), rel=1e-5)
    assert ctx.forward.sites["encoder"].scale == (1.0 if name == "Bart" else 4.0)


def test_a_multiplier_of_the_embeddings_is_seen() -> None:
    config = transformers.GraniteConfig(
        vocab_size=tiny_models.VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, embedding_multiplier=12.0, pad_token_id=tiny_models.PAD,
    )  # fmt: skip
    ctx = context(transformers.GraniteForCausalLM(config), tiny_models.batch("gpt2"))
    assert ctx.forward.sites["decoder"].scale == 12.0


def test_masked_and_token_level_models() -> None:
    config = transformers.RobertaConfig(
        vocab_size=tiny_models.VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    net = transformers.RobertaForMaskedLM(config)
    batch = tiny_models.batch("roberta")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    ours = Criterion()(context(net.eval(), batch)).total
    assert ours.item() == pytest.approx(net(**batch).loss.item(), rel=1e-5)


@dataclass(frozen=True, kw_only=True)
class Ascending(Term):
    """A term that needs torch.autograd.grad."""

    @property
    def cost(self) -> Cost:
        return Cost(1, 1)

    def declare(self, ctx: Evaluation) -> Passes:
        return Passes(own="shared", ascends=True)

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Tensor:
        embeds = ctx.clean.embeds["encoder", "embedding"]
        delta = torch.zeros_like(embeds).requires_grad_()
        view = ctx.forward(Perturbation({"encoder": delta}), dropout="shared")
        (gradient,) = torch.autograd.grad(BaseLoss(view).from_logits(ctx)[0].sum(), delta)
        return ctx.reduce(gradient.square().sum((-1, -2)).unsqueeze(-1).expand_as(ctx.labels))


@pytest.mark.parametrize("reentrant", [True, False])
def test_reentrant_checkpointing_is_refused_where_it_cannot_work(reentrant: bool) -> None:
    net = tiny_models.make("bart")
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    function = net.model.encoder._gradient_checkpointing_func
    assert isinstance(function, functools.partial)
    if reentrant:  # which is also torch's own default
        net.model.encoder._gradient_checkpointing_func = functools.partial(function.func)
    if reentrant:
        with pytest.raises(BadInput, match="'use_reentrant': False"):
            Criterion(Ascending())(context(net, tiny_models.batch("bart")))
    else:
        assert Criterion(Ascending())(context(net, tiny_models.batch("bart"))).values["ascending"] > 0


@pytest.mark.parametrize("dropout", ["independent", "shared"])
def test_checkpointing_changes_nothing(dropout: Any) -> None:
    def gradient(checkpointing: bool) -> Tensor:
        net = tiny_models.make("bart")
        if checkpointing:
            net.gradient_checkpointing_enable()
        torch.manual_seed(5)
        Criterion(R3F(scale=0.1, dropout=dropout))(context(net, tiny_models.batch("bart"))).total.backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    torch.testing.assert_close(gradient(True), gradient(False), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("term", [(), (R3F(scale=0.05, relative=True),)])
def test_bfloat16_autocast(term: tuple[Term, ...]) -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    exact = Criterion(*term, label_smoothing=0.1)(context(net, tiny_models.batch("bart")))
    with torch.autocast("cpu", torch.bfloat16):
        report = Criterion(*term, label_smoothing=0.1)(context(net, tiny_models.batch("bart")))
    assert report.total.dtype == torch.float32
    assert report.total.item() == pytest.approx(exact.total.item(), rel=1e-2)


@pytest.mark.parametrize("model", ["bart", "roberta", "gpt2"])
@pytest.mark.parametrize("cut", [1, 2, 4])
@pytest.mark.parametrize("per", ["token", "sequence"])
def test_gradient_does_not_depend_on_accumulation(model: str, cut: int, per: Any, monkeypatch: Any) -> None:
    """A raw loop over micro-batches with `count` gives the gradient of the whole batch."""
    fixed_noise(monkeypatch)
    net = tiny_models.dropout_off(tiny_models.make(model))
    batch = tiny_models.batch(model, rows=4)
    criterion = Criterion(R3F(scale=0.1, per=per), label_smoothing=0.1, per=per)

    def gradient(size: int) -> Tensor:
        net.zero_grad()
        pieces = [{key: value[i : i + size] for key, value in batch.items()} for i in range(0, 4, size)]
        whole = count(net, pieces)
        for piece in pieces:
            criterion(context(net, piece, count=whole)).total.backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    whole, pieces = gradient(4), gradient(4 // cut)
    assert (whole - pieces).norm() <= 1e-6 * whole.norm()


def fixed_noise(monkeypatch: Any) -> None:
    """Noise that depends on the embedding alone, so that it does not matter in which piece a row comes."""
    for place in ("seqreg.terms.r3f", "seqreg.ascent", "seqreg.smoothness"):
        monkeypatch.setattr(f"{place}.sample", lambda noise, like, scale, mask: scale * torch.sin(1000 * like.detach()))


def test_count_of_a_causal_batch_leaves_out_the_first_label() -> None:
    batch = tiny_models.batch("gpt2")
    labels = 2 * float((batch["labels"][:, 1:] != -100).sum())
    assert count(tiny_models.make("gpt2"), [batch, batch]) == Count(labels, 6.0, positions=labels)
    assert context(tiny_models.make("gpt2"), batch).count.labels == float((batch["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("name", tiny_models.SEQ2SEQ)
def test_stacks_that_share_a_table_share_a_lookup(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient is that of separate lookups, with the passes together (rows twice) and apart."""
    model = tiny_models.make(name).train() if name == "prophetnet" else tiny_models.make(name).double().train()
    batch = tiny_models.batch(name)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        for criterion in (Criterion(R3F(scale=0.1)), Criterion(R3F(scale=0.1, dropout="shared"))):
            torch.manual_seed(0)
            criterion(context(model, batch)).total.backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    shared = gradients()
    monkeypatch.setattr(HFForward, "_lookups", lambda self, inputs: [])
    apart = gradients()
    assert shared.keys() == apart.keys()
    for key, gradient in apart.items():
        rtol, bad = 1e-4 if name == "prophetnet" else 1e-9, name == "led"  # transformers' own gradients of padding
        torch.testing.assert_close(shared[key], gradient, rtol=rtol, atol=1e-7, equal_nan=bad)


def test_tokens_that_a_model_changes_are_looked_up_by_itself() -> None:
    """The decoder's tokens were looked up ahead, and then a hook gives it others."""
    model, batch = tiny_models.make("bart").eval(), tiny_models.batch("bart")

    def other(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": torch.full_like(kwargs["input_ids"], 7)}

    handle = model.model.decoder.register_forward_pre_hook(other, with_kwargs=True)
    ctx = context(model, batch)
    own = model(**ctx.forward.inputs).logits
    torch.testing.assert_close(Evaluation(ctx).clean.logits, own)
    handle.remove()
    assert not torch.allclose(model(**ctx.forward.inputs).logits, own)
