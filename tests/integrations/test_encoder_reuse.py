"""A pass that reuses the encoder's output is the pass that runs everything: values, gradients, dropout masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.t5 import modeling_t5

from benchmarks import steps, worker_process
from benchmarks.sizes import SIZES
from seqreg import Criterion, build_term
from seqreg.forward import Perturbation
from seqreg.integrations.hf import context
from tests.helpers import term_settings

SMALL = dict(
    d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
    decoder_attention_heads=2, max_position_embeddings=32, dropout=0.2, attention_dropout=0.1, activation_dropout=0.1,
)  # fmt: skip
MODELS: dict[str, Any] = {
    "bart": lambda: BartForConditionalGeneration(BartConfig(vocab_size=50, **SMALL)),
    "marian": lambda: MarianMTModel(
        MarianConfig(vocab_size=50, pad_token_id=1, decoder_start_token_id=1, **SMALL, scale_embedding=True)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.2,
                 decoder_start_token_id=0)
    ),
}  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    source, labels = (torch.randint(4, 50, size, generator=drawn) for size in ((3, 9), (3, 6)))
    mask = torch.ones_like(source)
    mask[1, 6:], labels[2, 4:] = 0, -100
    return {"input_ids": source, "attention_mask": mask, "labels": labels}


def counted_encoder_passes(model: Any) -> list[int]:
    passes: list[int] = []
    model.get_encoder().register_forward_hook(lambda *_: passes.append(1))
    return passes


def loss_and_gradients(model: Any, term: Any, *, reuse: bool, fused: bool) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    ctx = context(model, batch(), step=0)
    if not reuse:
        ctx.forward.reuse = None
    report = Criterion(term, label_smoothing=0.1, fused=fused)(ctx)
    report.total.backward()
    drawn = torch.rand(())  # the generator is where it would have been
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(report.total.detach()), {**gradients, "next draw": drawn}


def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 has its norms and softmax in float32 whatever its weights are: here in their precision."""
    to_float32 = torch.Tensor.float

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(modeling_t5.T5LayerNorm, "forward", norm)
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float32(x))


TERMS: list[tuple[str, dict[str, Any]]] = [
    ("r3f", {"dropout": "shared"}),
    ("r3f", {"dropout": "off"}),
    ("r3f", {"dropout": "shared", "grad": "clean"}),
    ("smart", {"steps": 2}),
    ("smart", {"dropout": "off", "grad": "perturbed"}),
    ("vat", {}),
    ("freelb", {}),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_values_and_gradients_are_those_of_the_whole_pass(
    name: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "t5":
        in_float64(monkeypatch)
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    passes = counted_encoder_passes(model)
    for term, settings in TERMS:
        scale = {"scale": 0.1} if term == "r3f" else {}
        built = term_settings.built(term, {"where": "decoder", "weight": 1.0, **scale, **settings})
        if term_settings.dropout_of(built) == "independent":
            continue
        passes.clear()
        whole, expected = loss_and_gradients(model, built, reuse=False, fused=fused)
        all_passes = len(passes)
        passes.clear()
        value, gradients = loss_and_gradients(model, built, reuse=True, fused=fused)
        assert len(passes) == (2 if term_settings.dropout_of(built) == "off" else 1) < all_passes, (term, settings)
        assert value == pytest.approx(whole, rel=1e-12)
        assert gradients.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(gradients[key], gradient, rtol=1e-9, atol=1e-12, msg=f"{term} {settings} {key}")


def test_it_is_not_reused_where_it_may_differ() -> None:
    """Noise on the encoder, independent masks, autocast, gradient checkpointing."""
    torch.manual_seed(0)
    model = MODELS["bart"]().train()
    passes = counted_encoder_passes(model)

    def passes_of(term: Any) -> int:
        passes.clear()
        Criterion(term)(context(model, batch(), step=0)).total.backward()
        return len(passes)

    decoder = {"where": "decoder", "scale": 0.1, "dropout": "shared"}
    assert passes_of(build_term("r3f", decoder)) == 1
    assert passes_of(build_term("r3f", {**decoder, "where": "both"})) == 2
    assert passes_of(build_term("r3f", {**decoder, "where": "encoder"})) == 2
    assert passes_of(build_term("r3f", {**decoder, "dropout": "independent", "grad": "clean"})) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert passes_of(build_term("r3f", decoder)) == 2
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert passes_of(build_term("r3f", decoder)) >= 2


def test_it_is_reused_beside_a_term_that_looks_at_every_layer() -> None:
    """JacHess has a clean pass that gives the outputs of all layers."""
    torch.manual_seed(0)
    model = MODELS["bart"]().double().train()
    passes = counted_encoder_passes(model)
    terms = build_term("r3f", {"where": "decoder", "scale": 0.1, "dropout": "shared"}), build_term("jachess", {})
    started = Criterion(*terms)
    started(context(model, batch(), step=0))  # measures the start of JacHess, once

    def found(*, reuse: bool) -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        passes.clear()
        ctx = context(model, batch(), step=0)
        if not reuse:
            ctx.forward.reuse = None
        started(ctx).total.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    reused = found(reuse=True)
    assert len(passes) == 2
    whole = found(reuse=False)
    assert len(passes) == 3
    torch.testing.assert_close(reused, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("term", "settings"),
    [("jachess", {}), ("neftune", {"where": "decoder"}), ("smart", {"attack": {"where": "decoder"}})],
)
def test_a_second_loss_of_one_context_has_masks_of_its_own(term: str, settings: dict[str, Any]) -> None:
    """What the first left behind has other dropout masks."""
    torch.manual_seed(0)
    model = MODELS["bart"]().double().train()
    noised = build_term("r3f", {"where": "decoder", "scale": 0.1, "dropout": "shared"})
    found = []
    for first in (False, True):
        ctx = context(model, batch(), step=0)
        if first:
            Criterion(noised)(ctx)
        torch.manual_seed(5)
        report = Criterion(build_term(term, settings), noised)(ctx)
        report.total.backward()
        found.append(report.scalars())
    assert found[0] == found[1]


@pytest.mark.parametrize("term", ["r3f", "smart"])
def test_a_context_can_be_used_again_after_an_update(term: str) -> None:
    """The second loss looks up the new embeddings, and has a graph of its own."""
    torch.manual_seed(0)
    model = MODELS["bart"]().double().train()
    criterion, ctx = Criterion(term_settings.built(term, {"dropout": "shared", "scale": 0.1})), context(model, batch())
    criterion(ctx).total.backward()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2.0)
    found = []
    for used in (ctx, context(model, batch())):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        report = criterion(used)
        report.total.backward()
        found.append((report.scalars(), model.get_input_embeddings().weight.grad.clone()))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_new_weights_are_seen() -> None:
    """What the encoder gave before an update is not used after it."""
    torch.manual_seed(0)
    model = MODELS["bart"]().eval()
    forward, passes = context(model, batch(), step=0).forward, counted_encoder_passes(model)
    shift = Perturbation({"decoder": torch.full((3, 6, 16), 0.1)})
    with torch.no_grad():
        forward.clean()
        forward(shift, dropout="shared")
        assert len(passes) == 1
        model.get_encoder().layers[0].fc1.weight.mul_(2.0)
        after = forward(shift, dropout="shared").logits
        assert len(passes) == 2
        expected = context(model, batch(), step=0).forward(shift, dropout="off").logits
    assert torch.equal(after, expected)


class Doubled(BartForConditionalGeneration):
    """Does more to what its encoder gives than to what it is given in its place."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, encoder_outputs: Any = None, **rest: Any
    ) -> Any:
        if encoder_outputs is None:
            encoded = self.get_encoder()(input_ids, attention_mask=attention_mask)
            encoder_outputs = BaseModelOutput(last_hidden_state=2 * encoded.last_hidden_state)
        return super().forward(attention_mask=attention_mask, encoder_outputs=encoder_outputs, **rest)


@pytest.mark.filterwarnings("ignore:Doubled has a forward of its own")
def test_a_forward_of_ones_own_runs_whole() -> None:
    torch.manual_seed(0)
    model = Doubled(BartConfig(vocab_size=50, **SMALL)).double().train()
    term = build_term("r3f", {"where": "decoder", "scale": 0.1, "dropout": "shared"})
    whole, expected = loss_and_gradients(model, term, reuse=False, fused=True)
    value, gradients = loss_and_gradients(model, term, reuse=True, fused=True)
    assert value == pytest.approx(whole, rel=1e-12)
    for key, gradient in expected.items():
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-9, atol=1e-12, msg=key)


def _other_storage(model: Any) -> None:
    weight = model.get_encoder().layers[0].fc1.weight
    weight.data = 2 * weight.data


@pytest.mark.parametrize(
    "change", [_other_storage, lambda model: model.get_encoder().eval()], ids=["other storage", "evaluation mode"]
)
def test_a_change_between_passes_is_seen(change: Any) -> None:
    """Other weights in place of those of the clean pass; an encoder without dropout."""
    shift, found = Perturbation({"decoder": torch.full((3, 6, 16), 0.1, dtype=torch.float64)}), []
    for reuse in (True, False):
        torch.manual_seed(0)
        model = MODELS["bart"]().double().train()
        forward = context(model, batch(), step=0).forward
        if not reuse:
            forward.reuse = None
        with torch.no_grad():
            forward.clean()
            change(model)
            found.append(forward(shift, dropout="shared").logits)
    assert torch.equal(*found)


def test_operations_on_long_sources() -> None:
    """Of articles with 1,024 tokens the encoder is nearly all of the work."""
    size = SIZES["long"]
    model, inputs = size.model(), {key: value[:1] for key, value in size.batch().items()}
    plain = worker_process.count_flops(steps.transformers_step(model, inputs))
    for term, settings, most in (
        ("r3f", {"where": "decoder", "dropout": "shared", "scale": 1e-3}, 1.25),
        ("smart", {"attack": {"where": "decoder"}}, 1.5),
    ):
        criterion = Criterion(build_term(term, settings), label_smoothing=0.1)
        found = worker_process.count_flops(steps.criterion_step(criterion, model, inputs))
        assert 1.0 < found / plain <= most, (term, found / plain)
