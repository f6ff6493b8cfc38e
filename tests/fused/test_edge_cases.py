"""Corners of the fused path that once gave a wrong number without a word."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqreg import Criterion, Evaluation
from seqreg.ascent import Ascent
from seqreg.context import Count
from seqreg.fused.head import Projection
from seqreg.integrations.hf import context
from seqreg.integrations.hf.lazy_logits import Pending
from seqreg.objective import BaseLoss
from seqreg.smoothness import observe
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.smart import SMART
from seqreg.terms.uegr import UEGR
from tests.helpers import tiny_models


def gradients(net: Any, loss: Tensor) -> Tensor:
    net.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten().double() for p in net.parameters() if p.grad is not None])


def test_known_logits_are_not_taken_for_those_of_padding() -> None:
    """An ascent computes the clean logits of labelled positions; another term counts the others too."""
    net = tiny_models.dropout_off(tiny_models.make("bart")).double()
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        far = R3F(scale=0.1, relative=True, dropout="shared", padding=True)
        report = Criterion(SMART(), far, fused=fused)(context(net, tiny_models.batch("bart"), step=0))
        found.append((report.values["r3f"], gradients(net, report.total)))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-9)


def test_the_head_works_in_the_arithmetic_of_its_model() -> None:
    net = tiny_models.make("bart")
    with torch.autocast("cpu", torch.bfloat16):
        view = Evaluation(context(net, tiny_models.batch("bart"))).clean
    assert view.projection is not None
    assert view.projection.dtype == torch.bfloat16
    assert view.logits.dtype == torch.float32  # BART adds a bias in float32


@pytest.mark.parametrize("model", ["bart", "llama"])
def test_float16_keeps_small_gradients(model: str) -> None:
    """A loss scale multiplies what is there; with many tokens in a step float16 would have lost it before."""
    net = tiny_models.make(model).eval()
    found = []
    for half in (True, False):
        with torch.autocast("cpu", torch.float16, enabled=half):
            ctx = context(net, tiny_models.batch(model), count=Count(2e6, 2e5))
            total = Criterion(label_smoothing=0.1)(ctx).total
        found.append(gradients(net, 65536 * total))
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()


def test_a_model_that_changes_its_embeddings_in_place() -> None:
    from transformers import CTRLConfig, CTRLLMHeadModel

    torch.manual_seed(0)
    net = tiny_models.dropout_off(
        CTRLLMHeadModel(CTRLConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=2, dff=16))
    ).train()
    ctx = Evaluation(context(net, tiny_models.batch("gpt2")))
    assert torch.equal(ctx.clean.logits, ctx.forward(dropout="shared").logits)


def test_a_hook_of_somebody_else_still_draws_for_every_pass() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    noisy = net.get_encoder().embed_tokens.register_forward_hook(lambda *_: _[2] + 0.1 * torch.randn_like(_[2]))
    ctx = Evaluation(context(net, tiny_models.batch("bart")))
    assert not ctx.clean.equals(ctx.forward(dropout="independent"))
    noisy.remove()


def test_a_second_criterion_does_not_take_the_noise_of_the_first() -> None:
    ctx = context(tiny_models.make("bart"), tiny_models.batch("bart"))
    values = [Criterion(R3F(scale=scale))(ctx).values["r3f"] for scale in (1e-3, 10.0)]
    assert values[0] != values[1]


@pytest.mark.parametrize(
    "other", [UEGR(attack=Ascent(dropout="independent")), SMART(attack=Ascent(dropout="independent"))]
)
def test_terms_that_replay_the_clean_pass_have_it_alone(other: Any) -> None:
    net = tiny_models.make("bart")
    with torch.autocast("cpu", torch.bfloat16):
        ctx = context(net, tiny_models.batch("bart"), step=0)
        assert torch.isfinite(Criterion(other, R3F(scale=0.1, relative=True))(ctx).total)


def test_a_context_can_be_evaluated_again_by_a_term_that_replays_its_clean_pass() -> None:
    ctx = context(tiny_models.make("bart"), tiny_models.batch("bart"), step=0)
    Criterion(R3F(scale=0.1))(ctx)
    assert torch.isfinite(Criterion(SMART())(ctx).total)
    assert observe(ctx)[0]["jacobian/logits"] > 0


def _elements() -> int:
    return sum(one.numel() for one in gc.get_objects() if isinstance(one, Tensor))


@pytest.mark.parametrize("terms", [[], [R3F()], [SMART()], [RDrop()], [JacHess()]], ids=lambda terms: str(terms)[:8])
def test_a_step_leaves_nothing_behind(terms: Any) -> None:
    """Not even for the garbage collector: what waits for it is held in the meantime."""
    net, criterion = tiny_models.make("bart"), Criterion(*terms)

    def step() -> None:
        criterion(context(net, tiny_models.batch("bart"), step=0)).total.backward()  # type: ignore[no-untyped-call]
        net.zero_grad()

    step()
    gc.collect()
    gc.disable()
    try:
        before = _elements()
        for _ in range(5):
            step()
        assert _elements() <= before
    finally:
        gc.enable()


def test_a_trainer_that_asks_for_outputs_in_training_gets_them(tmp_path: Any) -> None:
    from transformers import TrainingArguments

    from seqreg.integrations.hf import RegularizedTrainer

    net = tiny_models.make("llama")
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = RegularizedTrainer(net, arguments, criterion=Criterion(R3F()), diagnostics_steps=0)
    batch = tiny_models.batch("llama")
    _, outputs = trainer.compute_loss(net, batch, return_outputs=True)
    assert outputs.logits.shape[:2] == batch["labels"].shape


def test_plain_can_be_differentiated_twice() -> None:
    net = tiny_models.make("t5")
    net.set_attn_implementation("eager")
    criterion = Criterion(JacHess(), fused=False)
    total = criterion(context(net, tiny_models.batch("t5"), step=0)).total
    parameter = net.lm_head.weight
    (gradient,) = torch.autograd.grad(total, parameter, create_graph=True)
    gradient.square().sum().backward()
    assert parameter.grad.isfinite().all()


def test_autocast_around_a_full_precision_pass_does_not_reach_the_products() -> None:
    net = tiny_models.make("bart").eval()
    exact = gradients(net, Criterion()(context(net, tiny_models.batch("bart"))).total)
    ctx = Evaluation(context(net, tiny_models.batch("bart")))
    with ctx.forward.full_precision():
        _ = ctx.clean
    with torch.autocast("cpu", torch.bfloat16):
        total = BaseLoss(ctx.clean).value(ctx)
    torch.testing.assert_close(gradients(net, total), exact)


def test_what_a_model_may_do_to_its_logits() -> None:
    """Shifts and scales are remembered; anything else is done to the tensor itself."""
    head = nn.Linear(4, 6, dtype=torch.float64)
    states, shift = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64)
    logits = head(states)

    def pending() -> Pending:
        return Pending.of(Projection(states, head.weight, head.bias, torch.float64))

    kept = (pending() + shift) * 3 / 2
    assert kept.made is None
    torch.testing.assert_close(kept.tensor(), (logits + shift) * 1.5)
    assert (pending().shape, pending().dtype, len(pending())) == (logits.shape, logits.dtype, 2)
    for done in (
        lambda x: x - 1, lambda x: 1 - x, lambda x: -x, lambda x: x**2, lambda x: 2 / (x + 9), lambda x: x < 0,
        lambda x: torch.tanh(x), lambda x: x[:, 1:], lambda x: x.softmax(-1), lambda x: torch.cat([x, x]), abs,
        lambda x: x * shift, lambda x: x + states[..., :1], lambda x: x / shift,
    ):  # fmt: skip
        torch.testing.assert_close(done(pending()), done(logits))
    assigned = pending()
    assigned[..., 2] = -9.0
    assert (assigned.tensor()[..., 2] == -9.0).all()


def test_a_model_that_assigns_into_its_logits() -> None:
    net = tiny_models.make("llama")
    whole = type(net).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = whole(self, *args, **kwargs)
        output.logits[..., 3] = -50.0
        return output

    net.forward = forward.__get__(net)
    ctx = context(net, tiny_models.batch("llama"))
    report = Criterion()(ctx)
    assert report.paths["base"] == "plain"
    assert (report.clean.logits[..., 3] == -50.0).all()


def test_training_after_an_evaluation_in_inference_mode() -> None:
    """The room that is kept from call to call is not one that only inference may write to."""
    net = tiny_models.make("bart")
    with torch.inference_mode():
        loss = Criterion()(context(net.eval(), tiny_models.batch("bart"))).total
    again = Criterion()(context(net, tiny_models.batch("bart"))).total
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    assert gradients(net, again).isfinite().all()
