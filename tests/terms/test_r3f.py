from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Cost, Criterion, Evaluation
from seqreg.integrations.hf import context, count
from seqreg.noise import sample
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models
from tests.helpers.evaluations import without_base


def value(net: Any, name: str, term: R3F, *, seed: int = 3, apart: bool = False, **batch: Any) -> float:
    torch.manual_seed(seed)
    ctx = context(net, tiny_models.batch(name, **batch))
    # one pass after the other draws the same numbers whatever the term
    return float(Criterion(term)(ctx, batched=not apart).values["r3f"])


def test_formula_recomputed_in_plain_steps() -> None:
    """Embeddings replaced by hand, KL both ways in float64: value and every gradient."""
    net = tiny_models.dropout_off(tiny_models.make("bart")).double()
    batch = tiny_models.batch("bart")
    ctx = context(net, batch)
    drawn: dict[str, Tensor] = {}
    inner = ctx.forward.run
    ctx.forward.run = lambda request: ([drawn.update(s.delta) for s in request.shifts], inner(request))[1]  # type: ignore
    report = Criterion(R3F(scale=0.02, weight=0.5))(ctx, batched=False)
    report.total.backward()
    ours = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad()

    embeds = net.get_encoder().embed_tokens(batch["input_ids"])
    ids = net.prepare_decoder_input_ids_from_labels(batch["labels"])

    def logp(source: Tensor) -> Tensor:
        out = net(inputs_embeds=source, attention_mask=batch["attention_mask"], decoder_input_ids=ids)
        return out.logits.log_softmax(-1)  # type: ignore[no-any-return]

    clean, noised = logp(embeds), logp(embeds + drawn["encoder"])
    kept = batch["labels"] != -100
    nll = -clean[kept].gather(-1, batch["labels"][kept].unsqueeze(-1)).sum()
    forth = (clean.exp() * (clean - noised)).sum(-1)[kept].sum()
    back = (noised.exp() * (noised - clean)).sum(-1)[kept].sum()
    total = (nll + 0.5 * (forth + back)) / kept.sum()
    total.backward()
    assert report.total.item() == pytest.approx(total.item(), rel=1e-9)
    assert report.values["r3f"].item() == pytest.approx(((forth + back) / kept.sum()).item(), rel=1e-6)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("model", tiny_models.MODELS)
def test_the_noise_arrives(model: str) -> None:
    """Without dropout the term grows with the square of the scale, over three decades, on every architecture."""
    net = tiny_models.dropout_off(tiny_models.make(model))
    if model != "prophetnet":  # gives NaN in float64
        net = net.double()
    scales = (1e-2, 3e-2) if model == "prophetnet" else (1e-6, 1e-5, 1e-4, 1e-3)
    values = [value(net, model, R3F(scale=scale, relative=True)) for scale in scales]
    for index in range(len(scales) - 1):
        ratio = scales[index + 1] / scales[index]
        assert values[index + 1] / values[index] == pytest.approx(ratio**2, rel=0.1)


@pytest.mark.parametrize("model", ["bart", "roberta", "llama"])
def test_dropout_policies(model: str) -> None:
    """Independent masks swamp small noise; shared masks and no dropout leave it alone."""
    net = tiny_models.make(model, spread=2.0)
    tiny = {"scale": 1e-4}
    independent = value(net, model, R3F(dropout="independent", **tiny))  # type: ignore[arg-type]
    shared = value(net, model, R3F(dropout="shared", **tiny))  # type: ignore[arg-type]
    off = value(net, model, R3F(dropout="off", **tiny))  # type: ignore[arg-type]
    if model != "llama":  # which has no dropout by default
        assert independent > 1000 * shared
    assert 0.1 < shared / off < 10
    quiet = tiny_models.dropout_off(net).double()
    policies: list[Any] = ["independent", "shared", "off"]
    values = [value(quiet, model, R3F(dropout=policy, **tiny), apart=True) for policy in policies]  # type: ignore[arg-type]
    assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-9)


def test_shared_dropout_replays_the_same_masks() -> None:
    ctx = Evaluation(context(tiny_models.make("bart"), tiny_models.batch("bart")))
    clean = ctx.clean
    torch.rand(100)
    after = torch.get_rng_state()
    assert torch.equal(ctx.forward(dropout="shared").logits, clean.logits)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(ctx.forward(dropout="independent").logits, clean.logits)
    assert torch.equal(ctx.forward(dropout="off").logits, ctx.eval_view.logits)


@pytest.mark.parametrize("model", ["bart", "roberta", "t5_classifier"])
def test_dropout_off_is_off_on_both_sides(model: str, monkeypatch: Any) -> None:
    """A model with dropout, the policy "off", gives what the same model without dropout gives."""
    monkeypatch.setattr(
        "seqreg.terms.r3f.sample", lambda noise, like, scale, mask: scale * torch.sin(9 * like.detach())
    )
    term = R3F(scale=0.1, dropout="off")
    quiet = value(tiny_models.dropout_off(tiny_models.make(model)), model, term)
    assert value(tiny_models.make(model), model, term) == pytest.approx(quiet, rel=1e-6)


def test_a_pass_without_gradient_has_none() -> None:
    ctx = Evaluation(context(tiny_models.make("bart"), tiny_models.batch("bart")))
    assert ctx.clean.logits.requires_grad
    assert not ctx.forward(dropout="shared", grad=False).logits.requires_grad
    assert ctx.clean.output.past_key_values is None


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("noise", ["normal", "uniform"])
def test_size_of_the_noise(noise: Any, padding: bool) -> None:
    """Its standard deviation or bound is the scale, on real tokens, or on all of them."""
    seen: dict[str, Tensor] = {}
    ctx = context(tiny_models.make("bart"), tiny_models.batch("bart", rows=24))
    inner = ctx.forward.run
    ctx.forward.run = lambda request: ([seen.update(s.delta) for s in request.shifts], inner(request))[1]  # type: ignore
    Criterion(R3F(scale=0.02, noise=noise, padding=padding))(ctx, batched=False)
    real = tiny_models.batch("bart", rows=24)["attention_mask"].bool()
    delta = seen["encoder"]
    assert (delta[~real] != 0).all() if padding else (delta[~real] == 0).all()
    kept = delta.flatten() if padding else delta[real].flatten()
    if noise == "normal":
        assert kept.std().item() == pytest.approx(0.02, rel=0.1)
    else:
        assert kept.abs().max().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("where", ["decoder", "both"])
@pytest.mark.parametrize("model", ["bart", "t5", "mbart", "m2m100", "bart_classifier", "t5_classifier"])
def test_padding_of_the_decoder_does_not_matter(model: str, where: Any) -> None:
    net = tiny_models.dropout_off(tiny_models.make(model)).double()
    term = R3F(scale=0.05, relative=True, where=where)
    assert value(net, model, term, pad=4) == pytest.approx(value(net, model, term), rel=1e-6)


def test_fairseq_weighs_micro_batches_as_the_base_loss_does() -> None:
    """By tokens, or by rows under --sentence-avg."""
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    batch = tiny_models.batch("bart", rows=3)
    pieces = [{k: v[:1] for k, v in batch.items()}, {k: v[1:] for k, v in batch.items()}]
    term = R3F(preset="fairseq", scale=0.1)

    def mean(piece: dict[str, Tensor]) -> float:
        torch.manual_seed(0)
        return float(Criterion(R3F(scale=0.1, per="sequence", padding=True))(context(net, piece)).values["r3f"])

    for per, sizes in (("token", (6, 9)), ("sequence", (1, 2))):
        whole = count(net, pieces)
        total = 0.0
        for piece in pieces:
            torch.manual_seed(0)
            total += float(Criterion(term, per=per)(context(net, piece, count=whole)).values["r3f"])  # type: ignore
        expected = sum(mean(piece) * size for piece, size in zip(pieces, sizes, strict=True)) / sum(sizes)
        assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("where", ["input", "encoder", "decoder", "both"])
def test_where(where: Any) -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    ctx = context(net, tiny_models.batch("bart"))
    seen: dict[str, Tensor] = {}
    inner = ctx.forward.run
    ctx.forward.run = lambda request: ([seen.update(s.delta) for s in request.shifts], inner(request))[1]  # type: ignore
    Criterion(R3F(where=where, scale=0.1))(ctx, batched=False)
    names = {"input": ["encoder"], "both": ["encoder", "decoder"]}.get(where, [where])
    assert list(seen) == names
    assert all((delta.abs() > 0).any() for delta in seen.values())


@pytest.mark.parametrize(("model", "where"), [("roberta", "decoder"), ("gpt2", "encoder"), ("bert", "both")])
def test_where_there_is_no_such_stack(model: str, where: Any) -> None:
    with pytest.raises(BadInput, match="use where='input'"):
        value(tiny_models.make(model), model, R3F(where=where))


@pytest.mark.parametrize("model", tiny_models.SCALED)
def test_relative_scale_and_the_scale_inside_the_model(model: str) -> None:
    net = tiny_models.dropout_off(tiny_models.make(model))
    ctx = context(net, tiny_models.batch(model))
    site = ctx.forward.sites["encoder"]
    assert site.scale == 4.0  # sqrt of 16 dimensions
    embeds = Evaluation(ctx).clean.embeds["encoder", "embedding"]
    size = embeds[site.mask].pow(2).mean().sqrt().item()
    assert value(net, model, R3F(scale=0.01, relative=True)) == value(net, model, R3F(scale=0.01 * size))
    assert value(net, model, R3F(scale=0.01, inject="word")) == value(net, model, R3F(scale=0.04))


@pytest.mark.parametrize("noise", ["normal", "uniform"])
@pytest.mark.parametrize("model", ["bart", "prophetnet", "roberta", "gpt2"])
def test_padding_at_a_scale_that_float32_sees(model: str, noise: Any) -> None:
    net = tiny_models.dropout_off(tiny_models.make(model))
    term = R3F(scale=0.05, relative=True, noise=noise)
    assert value(net, model, term, pad=4) == pytest.approx(value(net, model, term), rel=2e-3)


def test_led_pads_to_its_window() -> None:
    """A length that is no multiple of the attention window reaches the embedding longer than the batch."""
    net = tiny_models.dropout_off(tiny_models.make("led"))
    term = R3F(scale=0.05)
    assert value(net, "led", term, pad=1) == pytest.approx(value(net, "led", term), rel=1e-3)
    assert value(net, "led", R3F(scale=0.05, padding=True), pad=1) > 0


def test_detached_sides() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart")).double()

    def gradient(**settings: Any) -> Tensor:
        net.zero_grad()
        torch.manual_seed(3)
        criterion, ctx = Criterion(R3F(scale=0.1, **settings)), context(net, tiny_models.batch("bart"))
        criterion(ctx, batched=False).total.backward()
        with_term = torch.cat([p.grad.flatten() for p in net.parameters()])
        net.zero_grad()
        Criterion()(context(net, tiny_models.batch("bart"))).total.backward()
        return with_term - torch.cat([p.grad.flatten() for p in net.parameters()])

    both, clean, noised = (gradient(grad=side) for side in ("both", "noised", "clean"))
    assert not torch.allclose(clean, noised, rtol=1e-3)
    torch.testing.assert_close(clean + noised, both, rtol=1e-8, atol=1e-12)


def test_per_sequence_is_the_sum_over_tokens() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    labels, rows = 15, 3
    token, sequence = (value(net, "bart", R3F(scale=0.1, per=per)) for per in ("token", "sequence"))  # type: ignore[arg-type]
    assert sequence * rows == pytest.approx(token * labels, rel=1e-6)


def test_fairseq_preset_counts_padding_and_grows_with_it() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    term = R3F(preset="fairseq", scale=0.05)
    assert value(net, "bart", term, pad=12) > 1.2 * value(net, "bart", term)


def test_presets_yield_to_explicit_settings() -> None:
    term = R3F(preset="fairseq", per="token")
    assert (term.per, term.padding, term.inject) == ("token", True, "word")
    with pytest.raises(BadInput, match="did you mean 'fairseq'"):
        R3F(preset="fairsek")


@pytest.mark.parametrize("model", ["roberta", "bart_classifier", "t5_classifier"])
def test_regression_needs_mse(model: str) -> None:
    extra = {"num_labels": 1}
    net = tiny_models.make(model, **extra)
    batch = {**tiny_models.batch(model), "labels": torch.tensor([0.1, 2.0, 3.5])}
    with pytest.raises(BadInput, match="use divergence='mse'"):
        Criterion(R3F())(context(net, batch))
    ctx = context(net, batch)
    report = Criterion(R3F(divergence="mse", scale=0.1))(ctx)
    assert report.values["r3f"] > 0
    expected = (report.clean.logits.squeeze(-1) - batch["labels"]).square().mean()
    assert report.parts["base"].item() == pytest.approx(expected.item())
    assert "nll" not in report.values
    with pytest.raises(BadInput, match=r"label_smoothing=0\.1 means nothing"):
        Criterion(label_smoothing=0.1)(context(net, batch))


@pytest.mark.parametrize("divergence", ["symmetric_kl", "kl", "reverse_kl", "js", "mse"])
@pytest.mark.parametrize("model", ["bart", "roberta", "gpt2"])
def test_every_divergence_runs(model: str, divergence: Any) -> None:
    assert value(tiny_models.make(model), model, R3F(divergence=divergence)) > 0


def test_cost_of_the_options() -> None:
    assert R3F().cost == Cost(1, 1)
    assert R3F(grad="clean").cost == Cost(1, 0)
    assert R3F(dropout="off").cost == Cost(2, 2)


def test_noise_that_the_arithmetic_cannot_see() -> None:
    net = tiny_models.make("bart")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BadInput, match=r"1e-05 is below what bfloat16 resolves"):
        value(net, "bart", R3F())
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="below what bfloat16 resolves"):
        value(net, "bart", R3F(preset="fairseq"))
    with pytest.raises(BadInput, match="below what bfloat16 resolves"):
        value(tiny_models.make("bart").bfloat16(), "bart", R3F())
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        assert value(net, "bart", R3F(scale=0.1, relative=True)) > 0


def _mean_gradient(net: Any, draws: int, **settings: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard error of the term's own gradient of the encoder's first layer over draws of everything."""
    found = []
    parameter = net.get_encoder().layers[0].fc1.weight
    for seed in range(draws):
        torch.manual_seed(seed)
        ctx = context(net, tiny_models.batch("bart", rows=6))
        report = Criterion(R3F(scale=1e-3, **settings))(ctx)
        (gradient,) = torch.autograd.grad(without_base(ctx, report), parameter)
        found.append(gradient.flatten())
    every = torch.stack(found)
    return every.mean(0), every.std(0) / draws**0.5


def test_one_sided_gradient_is_half_in_expectation() -> None:
    """With noise too small to matter the two passes are exchangeable, so that each side has half of the gradient."""
    net = tiny_models.make("bart")
    both, error = _mean_gradient(net, 200)
    for side in ("clean", "noised"):
        half, own = _mean_gradient(net, 200, grad=side)
        deviation = (2 * half - both) / (4 * own**2 + error**2).sqrt()
        assert deviation.square().mean() < 1.5  # standard errors: 1 if there is no bias
        biased = (half - both) / (own**2 + error**2).sqrt()
        assert biased.square().mean() > 1.5  # and this many draws would show one


@pytest.mark.parametrize(
    "settings",
    [{"example_fraction": 0.5}, {"token_fraction": 0.5}, {"example_fraction": 0.34, "token_fraction": 0.7}],
)
def test_a_share_of_the_batch_is_unbiased(settings: Any) -> None:
    """Without dropout and with the noise held fixed, the mean over draws of the share is the whole."""
    net = tiny_models.dropout_off(tiny_models.make("bart")).double()

    class Fixed(R3F):
        def _noise(self, ctx: Any, name: str, rows: Any, embeds: Tensor, dtype: Any = None) -> Tensor:
            return 0.3 * torch.sin(9 * embeds.detach())

    def value(seed: int, **settings: Any) -> float:
        torch.manual_seed(seed)
        return float(
            Criterion(Fixed(name="r3f", **settings))(context(net, tiny_models.batch("bart", rows=6))).values["r3f"]
        )

    whole = value(0)
    draws = torch.tensor([value(seed, **settings) for seed in range(300)])
    error = draws.std() / 300**0.5
    assert error > 0
    assert abs(draws.mean() - whole) < 4 * error
    assert error < 0.1 * whole


@pytest.mark.parametrize("dropout", ["independent", "off"])
def test_relative_noise_does_not_depend_on_the_rows_that_are_drawn(dropout: Any, monkeypatch: Any) -> None:
    """Or a share would be biased: rows of large embeddings would be noised by their own size, and others by theirs."""
    net, batch = tiny_models.make("bart"), tiny_models.batch("bart", rows=4)
    net.get_input_embeddings().weight.data[batch["input_ids"][0]] *= 9
    scales = []

    def record(noise: Any, like: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        scales.append(scale)
        return sample(noise, like, scale, mask)

    monkeypatch.setattr("seqreg.terms.r3f.sample", record)
    for seed, rows in enumerate([1.0, *[0.25] * 8]):
        torch.manual_seed(seed)
        Criterion(R3F(scale=0.1, relative=True, example_fraction=rows, dropout=dropout))(context(net, batch))
    assert len(scales) == 9
    assert max(scales) == pytest.approx(min(scales), rel=1e-6)


def test_rows_need_masks_of_their_own() -> None:
    with pytest.raises(BadInput, match=r"example_fraction=0\.5: dropout masks are shared"):
        R3F(example_fraction=0.5, dropout="shared")
    with pytest.raises(BadInput, match="token_fraction=0: expected a share"):
        R3F(token_fraction=0)
    ctx = context(tiny_models.make("bart"), tiny_models.batch("bart"))
    ctx.forward.batch_size = None
    with pytest.raises(BadInput, match="cannot be given some examples"):
        Criterion(R3F(example_fraction=0.5))(ctx)


def test_passes_in_one_batch_are_those_apart() -> None:
    """Without dropout, one pass of twice the batch gives what two passes give: value and gradients."""
    net = tiny_models.dropout_off(tiny_models.make("bart")).double()

    class Fixed(R3F):
        def _noise(self, ctx: Any, name: str, rows: Any, embeds: Tensor, dtype: Any = None) -> Tensor:
            return 0.3 * torch.sin(9 * embeds.detach())

    found = []
    for together in (True, False):
        net.zero_grad()
        ctx = context(net, tiny_models.batch("bart"))
        report = Criterion(Fixed(name="r3f"), label_smoothing=0.1)(ctx, batched=together)
        assert (report.clean.output is None) == together  # a pass of a larger batch has no output of its own
        report.total.backward()
        found.append((report.total, torch.cat([p.grad.flatten() for p in net.parameters()])))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-9, atol=1e-12)


def test_passes_are_apart_where_masks_are_shared() -> None:
    """A term that replays the clean pass's masks needs it alone; so do diagnostics and a second look at the batch."""
    from seqreg.terms.smart import SMART

    net = tiny_models.make("bart")
    ctx = context(net, tiny_models.batch("bart"))
    assert Criterion(R3F(), SMART())(ctx).clean.output is not None
    ctx = context(net, tiny_models.batch("bart"))
    criterion = Criterion(R3F(scale=1e-3))
    assert criterion(ctx).clean.output is None
    shares = criterion.diagnostics(ctx)
    assert shares["r3f/noise_over_value"] < 0.1 < shares["r3f/dropout_over_value"]
