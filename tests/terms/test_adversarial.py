"""SMART, VAT, ALUM, SiFT and FreeLB: the ascent does what it says, where the released code does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Criterion, Evaluation, build_term
from seqreg.ascent import AdversarialConsistency, Ascent, AscentResult
from seqreg.integrations.hf import context
from seqreg.noise import norm
from seqreg.terms.alum import ALUM
from seqreg.terms.freelb import FreeLB
from seqreg.terms.r3f import R3F
from seqreg.terms.sift import SiFT
from seqreg.terms.smart import SMART
from seqreg.terms.vat import VAT
from tests.helpers import tiny_models
from tests.helpers.evaluations import without_base

AGREEMENTS: list[type[AdversarialConsistency]] = [SMART, VAT, ALUM, SiFT]


@pytest.fixture(scope="module")
def trained() -> Any:
    """A tiny classifier that has learnt to find a token, in float64 and without dropout."""
    torch.manual_seed(0)
    net = tiny_models.dropout_off(tiny_models.make("roberta", num_labels=2)).double()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(150):
        batch = sentences(16)
        optimizer.zero_grad()
        Criterion()(context(net, batch)).total.backward()
        optimizer.step()
    with torch.no_grad():
        batch = sentences(64)
        accuracy = (
            net(**{k: v for k, v in batch.items() if k != "labels"}).logits.argmax(-1) == batch["labels"]
        ).float()
    assert accuracy.mean() > 0.9
    return net


def sentences(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(6, tiny_models.VOCAB, (rows, 8))
    labels = torch.randint(0, 2, (rows,))
    ids[torch.arange(rows), torch.randint(0, 8, (rows,))] = torch.where(labels == 1, 5, 4)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def attack(
    net: Any, term: AdversarialConsistency, seed: int, batch: dict[str, Tensor]
) -> tuple[Evaluation, AscentResult]:
    torch.manual_seed(seed)
    ctx = Evaluation(context(net, batch))
    return ctx, term.worst(ctx, ctx.clean)


def divergence(ctx: Evaluation, term: AdversarialConsistency, delta: Tensor) -> float:
    view = ctx.forward(term.attack.shift({"encoder": delta}), dropout="shared")
    return float(term.consistency(ctx.clean, view).value(ctx).detach())


def test_smart_climbs_where_random_noise_does_not(trained: Any) -> None:
    """Cosine with the analytic direction, the radius kept, and a higher divergence than noise: 20 of 20 seeds."""
    term = SMART()
    for seed in range(20):
        batch = sentences(8)
        ctx, ascent = attack(trained, term, seed, batch)
        start, final = ascent.start["encoder"], ascent.final["encoder"]
        direction = analytic_direction(trained, batch, start)
        cosine = torch.cosine_similarity(final.flatten(), direction.flatten(), dim=0)
        assert cosine > 0.9, f"seed {seed}: {cosine}"
        radius = float(ascent.radius["encoder"])
        assert norm(final, "linf", "token").max() <= radius * (1 + 1e-6)
        noise = torch.randn_like(final)
        noise = noise * norm(final, "l2", "token") / norm(noise, "l2", "token")
        assert divergence(ctx, term, final) > divergence(ctx, term, noise), f"seed {seed}"


def analytic_direction(net: Any, batch: dict[str, Tensor], start: Tensor) -> Tensor:
    """Steepest ascent of the symmetric KL in the linf ball of every token: g / |g|_inf, with g written out by hand."""
    table = net.get_input_embeddings()
    delta = start.detach().double().requires_grad_()

    def logits(shift: Tensor | None) -> Tensor:
        hook = table.register_forward_hook(lambda _, __, out: out if shift is None else out + shift)
        try:
            return net(**{k: v for k, v in batch.items() if k != "labels"}).logits.log_softmax(-1)  # type: ignore
        finally:
            hook.remove()

    p, q = logits(None).detach(), logits(delta)
    value = (p.exp() * (p - q)).sum() + (q.exp() * (q - p)).sum()
    (gradient,) = torch.autograd.grad(value, delta)
    return gradient / gradient.abs().amax(-1, keepdim=True)


def test_released_smart_stays_where_it_started(trained: Any) -> None:
    """mt-dnn's raw gradient is too small to move the perturbation, which is then rescaled to norm 1."""
    term = SMART(preset="mtdnn", attack=Ascent(inject="scaled"))
    _, ascent = attack(trained, term, 0, sentences(8))
    assert torch.cosine_similarity(ascent.final["encoder"].flatten(), ascent.start["encoder"].flatten(), dim=0) > 0.95
    size = norm(ascent.final["encoder"], "linf", "token")
    torch.testing.assert_close(size, torch.ones_like(size), rtol=0.2, atol=0)
    _, ours = attack(trained, SMART(), 0, sentences(8))
    assert torch.cosine_similarity(ours.final["encoder"].flatten(), ours.start["encoder"].flatten(), dim=0) < 0.5


def test_released_epsilon_is_no_radius(trained: Any) -> None:
    """In mt-dnn and smart-pytorch a larger epsilon makes the perturbation smaller; our radius is the radius."""
    sizes = []
    for stabiliser in (1e-6, 1e-2, 10.0):
        term = SMART(preset="smart_pytorch", attack=Ascent(inject="scaled", stabiliser=stabiliser))
        _, ascent = attack(trained, term, 0, sentences(8))
        sizes.append(float(norm(ascent.final["encoder"], "linf", "token").max()))
    assert sizes[0] > sizes[1] > sizes[2]
    for radius in (0.01, 0.1, 1.0):
        _, ascent = attack(
            trained, SMART(attack=Ascent(radius=radius, step_size=2 * radius, relative=False)), 0, sentences(8)
        )
        assert float(norm(ascent.final["encoder"], "linf", "token").max()) == pytest.approx(radius, rel=1e-6)


@pytest.mark.parametrize("over", ["token", "sentence"])
@pytest.mark.parametrize("kind", ["l2", "linf"])
@pytest.mark.parametrize("projection", ["clip", "rescale"])
def test_every_ball(trained: Any, kind: Any, over: Any, projection: Any) -> None:
    """All four balls work; in mt-dnn three of them raise. Three steps stay inside, or on the surface."""
    term = SMART(
        attack=Ascent(norm=kind, over=over, projection=projection, relative=False, radius=0.3, step_size=0.25, steps=3)
    )
    _, ascent = attack(trained, term, 0, sentences(8))
    size = norm(ascent.final["encoder"], kind, over)
    assert (size <= 0.3 * (1 + 1e-6)).all()
    if projection == "rescale":
        torch.testing.assert_close(size, torch.full_like(size, 0.3), rtol=1e-5, atol=0)


def test_more_steps_climb_higher(trained: Any) -> None:
    batch = sentences(32)
    found = []
    for steps in (1, 4):
        term = SMART(attack=Ascent(steps=steps, step_size=0.2 / steps, radius=0.1))
        ctx, ascent = attack(trained, term, 0, batch)
        found.append(divergence(ctx, term, ascent.final["encoder"]))
    assert found[1] > found[0]


def test_vat_is_power_iteration(trained: Any) -> None:
    """The perturbation is the radius times the gradient's direction, sentence by sentence, from a unit start."""
    term = VAT(attack=Ascent(radius=0.1))
    batch = sentences(8)
    _, ascent = attack(trained, term, 0, batch)
    start, final, gradient = (part["encoder"] for part in (ascent.start, ascent.final, ascent.gradient))
    radius = torch.as_tensor(ascent.radius["encoder"])
    torch.testing.assert_close(norm(start, "l2", "sentence"), radius.expand(8, 1, 1) * 0.01, rtol=1e-4, atol=0)
    torch.testing.assert_close(norm(final, "l2", "sentence"), radius.expand(8, 1, 1), rtol=1e-4, atol=0)
    expected = gradient / norm(gradient, "l2", "sentence") * radius
    torch.testing.assert_close(final, expected, rtol=1e-4, atol=1e-8)


def test_vat_holds_the_clean_side(trained: Any) -> None:
    """KL of the perturbed output from a constant: the gradient is that of the perturbed pass alone."""
    net, batch = copy.deepcopy(trained), sentences(8)
    torch.manual_seed(0)
    ctx = context(net, batch)
    report = Criterion(VAT(weight=1.0))(ctx)
    net.zero_grad()
    without_base(ctx, report).backward()
    ours = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    torch.manual_seed(0)
    other = Evaluation(context(net, batch))
    view = other.forward(VAT().attack.shift(VAT().worst(other, other.clean).final), dropout="shared")
    p, q = other.clean.logits.detach().log_softmax(-1), view.logits.log_softmax(-1)
    net.zero_grad()
    ((p.exp() * (p - q)).sum(-1).mean()).backward()
    theirs = [p.grad for p in net.parameters() if p.grad is not None]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("term", AGREEMENTS)
@pytest.mark.parametrize("model", ["bart", "roberta", "gpt2", "t5"])
def test_ascent_touches_no_gradient_and_no_parameter(term: type[AdversarialConsistency], model: str) -> None:
    net = tiny_models.make(model)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    ctx = Evaluation(context(net, tiny_models.batch(model)))
    term(attack=Ascent(steps=3)).worst(ctx, ctx.clean)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("term", AGREEMENTS)
def test_shared_dropout_makes_the_term_about_the_perturbation(term: type[AdversarialConsistency]) -> None:
    """With new masks in every pass, as in all released code, the value is dominated by dropout."""
    net = tiny_models.make("bart", spread=2.0)

    def value(**settings: Any) -> float:
        torch.manual_seed(0)
        report = Criterion(term(name="term", weight=1.0, attack=Ascent(radius=0.01, step_size=0.01, **settings)))(
            context(net, tiny_models.batch("bart"))
        )
        return float(report.values["term"])

    assert value(dropout="independent") > 10 * value(dropout="shared")


@pytest.mark.parametrize("term", [*AGREEMENTS, FreeLB])
@pytest.mark.parametrize("where", ["encoder", "decoder", "both"])
@pytest.mark.parametrize("model", ["bart", "t5", "pegasus"])
def test_encoder_decoder_or_both(term: Any, where: Any, model: str) -> None:
    """DeBERTa's SiFT cannot perturb two stacks; here every adversarial term can."""
    net = tiny_models.dropout_off(tiny_models.make(model))
    ctx = context(net, tiny_models.batch(model))
    seen: dict[str, Tensor] = {}
    inner = ctx.forward.run
    ctx.forward.run = lambda request: ([seen.update(s.delta) for s in request.shifts], inner(request))[1]  # type: ignore
    Criterion(term(attack=Ascent(where=where), weight=1.0))(ctx).total.backward()
    assert set(seen) == ({"encoder", "decoder"} if where == "both" else {where})
    assert all((delta != 0).any() for delta in seen.values())


@pytest.mark.parametrize("inject", ["scaled", "word", "layernorm", "normalised"])
@pytest.mark.parametrize("model", ["bart", "roberta", "mbart", "deberta_v2"])
def test_every_injection_point(inject: Any, model: str) -> None:
    net = tiny_models.dropout_off(tiny_models.make(model))
    report = Criterion(SMART(attack=Ascent(inject=inject)))(context(net, tiny_models.batch(model)))
    assert report.values["smart"] > 0


@pytest.mark.parametrize("model", ["pegasus", "t5", "gpt2"])
def test_no_layernorm_to_perturb_after(model: str) -> None:
    with pytest.raises(BadInput, match="has no LayerNorm on its embeddings"):
        Criterion(SMART(attack=Ascent(inject="layernorm")))(context(tiny_models.make(model), tiny_models.batch(model)))


@pytest.mark.parametrize("model", ["pegasus", "t5", "bart", "roberta"])
def test_sift_does_not_depend_on_the_size_of_the_embeddings(model: str) -> None:
    """With a LayerNorm or without: embeddings twice as large, the same relative perturbation."""
    net = tiny_models.dropout_off(tiny_models.make(model)).double()
    ctx = Evaluation(context(net, tiny_models.batch(model)))
    _ = ctx.clean
    (name, *_) = ctx.sites("input")
    normalised = ctx.clean.embeds[name, "normalised"]
    mask = ctx.forward.sites[name].mask
    assert mask is not None
    assert normalised[mask].square().mean(-1).sqrt().mean().item() == pytest.approx(1, rel=1e-3)
    if model in ("pegasus", "t5"):
        delta = torch.randn_like(normalised)
        shifted = ctx.forward(SiFT().attack.shift({name: delta}), dropout="off")
        token = ctx.clean.embeds[name, "embedding"]
        expected = token + delta * token.square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(shifted.embeds[name, "embedding"], expected, rtol=1e-5, atol=1e-6)


def test_released_sift_is_not_zero_where_outputs_agree() -> None:
    net = tiny_models.dropout_off(tiny_models.make("roberta"))
    ctx = context(net, tiny_models.batch("roberta"))
    tiny = {"scale": 1e-6, "step_size": 1e-6}
    released = Criterion(SiFT(preset="deberta", weight=1.0, attack=tiny))(ctx).values["sift"]  # type: ignore[arg-type]
    ours = Criterion(SiFT(attack={**tiny, "radius": 1e-6}, weight=1.0))(ctx).values["sift"]  # type: ignore[arg-type]
    assert released > 0.5
    assert ours < 1e-6


@pytest.mark.parametrize("term", [SMART, VAT, ALUM, SiFT])
@pytest.mark.parametrize("model", ["roberta", "bart_classifier", "t5_classifier", "deberta_v2"])
def test_regression(term: type[AdversarialConsistency], model: str) -> None:
    """MSE when asked, in the ascent and in the term; a clear error when not; never a silent 0 as DeBERTa's SiFT."""
    net = tiny_models.make(model, num_labels=1)
    batch = {**tiny_models.batch(model), "labels": torch.tensor([0.1, 2.0, 3.5])}
    with pytest.raises(BadInput, match="use inner='mse' and divergence='mse'"):
        Criterion(term())(context(net, batch))
    asked = term(name="term", weight=1.0, inner="mse", divergence="mse", grad="both")
    report = Criterion(asked)(context(net, batch))
    assert report.values["term"] > 0
    report.total.backward()


def test_regression_value_does_not_broadcast() -> None:
    """mt-dnn squeezes one side only, and so compares every row with every other."""
    net = tiny_models.dropout_off(tiny_models.make("roberta", num_labels=1))
    batch = {**tiny_models.batch("roberta"), "labels": torch.tensor([0.1, 2.0, 3.5])}
    ctx = Evaluation(context(net, batch))
    term = SMART(attack=Ascent(radius=1e-3, step_size=1e-3), inner="mse", divergence="mse")
    torch.manual_seed(0)
    value = Criterion(term)(ctx).values["smart"]
    torch.manual_seed(0)
    view = ctx.forward(term.attack.shift(term.worst(ctx, ctx.clean).final), dropout="shared")
    assert value.item() == pytest.approx(float((view.logits - ctx.clean.logits).square().mean().detach()), rel=1e-4)


def test_freelb_is_the_mean_loss_along_the_ascent(trained: Any) -> None:
    """At weight 1 the whole loss is the adversarial mean; at weight w it is (1 - w) clean + w adversarial."""
    batch = sentences(8)

    def run(weight: float) -> Any:
        torch.manual_seed(0)
        return Criterion(FreeLB(attack=Ascent(steps=3), weight=weight))(context(trained, batch))

    whole, half = run(1.0), run(0.5)
    clean = whole.parts["base"]
    adversarial = clean + whole.values["freelb"]
    assert whole.total.item() == pytest.approx(adversarial.item(), rel=1e-9)
    assert half.total.item() == pytest.approx((clean + adversarial).item() / 2, rel=1e-9)
    assert adversarial > clean


def test_freelb_has_the_attack_of_roast(trained: Any) -> None:
    """Perturbation, loss and gradient from the formula: half of it at the start, half after one step per token."""
    batch, deltas = sentences(8), []
    ctx = context(trained, batch)
    inner = ctx.forward.run
    ctx.forward.run = lambda request: (deltas.append(request.shifts), inner(request))[1]  # type: ignore
    trained.zero_grad()
    report = Criterion(FreeLB(preset="roast"))(ctx)
    report.total.backward()
    found = {name: p.grad.clone() for name, p in trained.named_parameters() if p.grad is not None}
    start, end = (shifts[-1].delta["encoder"] for shifts in deltas[1:])

    def loss(delta: Tensor) -> Tensor:
        layernorm = trained.roberta.embeddings.LayerNorm
        hook = layernorm.register_forward_hook(lambda module, inputs, output: output.detach() + delta)
        logits = trained(**{key: value for key, value in batch.items() if key != "labels"}).logits
        hook.remove()
        return torch.nn.functional.cross_entropy(logits, batch["labels"])

    assert 0 < start.abs().max() <= 1e-5
    live = start.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(live), live)
    torch.testing.assert_close(end, start + 0.1 * gradient / gradient.abs().amax(-1, keepdim=True))
    expected = (loss(start.detach()) + loss(end.detach())) / 2
    assert report.total.item() == pytest.approx(expected.item(), rel=1e-9)
    trained.zero_grad()
    expected.backward()
    for name, parameter in trained.named_parameters():
        if parameter.grad is None:
            assert name not in found or not found[name].any(), name  # the embeddings
        else:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-12)
    trained.zero_grad()


def test_freelb_start_is_scaled_by_the_true_length() -> None:
    net = tiny_models.dropout_off(tiny_models.make("roberta"))
    ctx = Evaluation(context(net, tiny_models.batch("roberta")))
    term = FreeLB(preset="paper")
    start, _ = term.attack.init_delta(ctx, ctx.clean)
    lengths = tiny_models.batch("roberta")["attention_mask"].sum(-1)
    for row, length in enumerate(lengths):
        bound = term.attack.scale / float(length * 16) ** 0.5
        assert start["encoder"][row].abs().max() <= bound
        assert start["encoder"][row].abs().max() > 0.9 * bound
        assert (start["encoder"][row, length:] == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0: expected a whole number >= 1"),
        ({"steps": -1}, "steps=-1"),
        ({"radius": 0.0}, "radius=0.0: expected a number > 0"),
        ({"step_size": -1.0}, "step_size=-1.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"norm": "l1"}, "norm='l1'"),
        ({"stabiliser": -1.0}, "stabiliser=-1.0"),
        ({"epsilon": 1e-5}, "unknown setting 'epsilon'"),
    ],
)
@pytest.mark.parametrize("term", [*AGREEMENTS, FreeLB])
def test_bad_settings(term: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as caught:
        term(attack=settings)
    assert message in str(caught.value)


def test_a_radius_that_the_arithmetic_cannot_see() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(BadInput, match=r"smart: attack.radius=1e-05: a perturbation of 1e-05 is below"),
    ):
        Criterion(SMART(attack=Ascent(relative=False, radius=1e-5)))(
            context(tiny_models.make("bart"), tiny_models.batch("bart"))
        )


def test_terms_compose_around_one_clean_pass() -> None:
    names = ["r3f", "smart", "sift", "vat", "alum", "freelb", "rdrop", "neftune", "bregman"]
    net = tiny_models.make("bart")
    ctx = context(net, tiny_models.batch("bart"), step=0)
    passes = []
    inner = ctx.forward.run
    ctx.forward.run = lambda request: (passes.append(1), inner(request))[1]  # type: ignore
    terms = [build_term(name) for name in names]
    report = Criterion(*terms, label_smoothing=0.1)(ctx)
    assert len(passes) == 1 + sum(term.cost.forwards for term in terms)
    assert list(report.parts) == ["base", *names]
    report.total.backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)


def test_r3f_at_the_published_scale_is_rdrop() -> None:
    net = tiny_models.make("bart")

    def value(term: Any) -> float:
        torch.manual_seed(0)
        ctx = context(net, tiny_models.batch("bart"))
        Criterion()(ctx)
        torch.manual_seed(1)
        return float(Criterion(term)(ctx).values[term.name])

    from seqreg.terms.rdrop import RDrop

    class Silent(R3F):
        """R3F whose noise draws nothing from the generator, so that both terms see the same masks."""

        def _noise(self, *args: Any) -> Any:
            state = torch.get_rng_state()
            noise = super()._noise(*args)
            torch.set_rng_state(state)
            return noise

    ours = value(Silent(name="r3f"))
    assert ours == pytest.approx(2 * value(RDrop(task="none", alpha=1.0)), rel=1e-3)


def test_ascent_under_autocast_is_made_in_float32(trained: Any) -> None:
    """bfloat16 rounds the start away, and the gradient would be 0."""
    net, batch = copy.deepcopy(trained).float(), sentences(8)
    for term in (SMART(), VAT(), SiFT()):
        exact = attack(net, term, 0, batch)[1].final["encoder"]
        with torch.autocast("cpu", torch.bfloat16):
            coarse = attack(net, term, 0, batch)[1].final["encoder"]
        assert torch.cosine_similarity(exact.flatten(), coarse.flatten(), dim=0) > 0.9, term.name


@pytest.mark.parametrize("term", [SMART(), VAT()], ids=lambda term: term.name)
def test_weights_in_bfloat16_are_refused_by_setting_and_fix(trained: Any, term: Any) -> None:
    """Near the clean input bfloat16 weights give a gradient of rounding; autocast over float32 weights does not."""
    words = (
        rf"^{term.name}: attack\.scale=0.001: the start is lost: .*load the weights in float32 and train under autocast"
    )
    with pytest.raises(BadInput, match=words):
        Criterion(term)(context(copy.deepcopy(trained).bfloat16(), sentences(8)))
    with torch.autocast("cpu", torch.bfloat16):
        assert float(Criterion(term)(context(copy.deepcopy(trained).float(), sentences(8))).values[term.name]) > 0


def test_a_perturbation_that_bfloat16_loses_is_refused_by_the_name_of_its_setting(trained: Any) -> None:
    with pytest.raises(
        BadInput, match=r"^smart: attack.radius=0.0001: .* is below what bfloat16 resolves .*make it larger"
    ):
        Criterion(SMART(attack=Ascent(radius=1e-4)))(context(copy.deepcopy(trained).bfloat16(), sentences(8)))


@pytest.mark.parametrize("model", ["pegasus", "mbart"])
def test_relative_sizes_do_not_depend_on_the_scale_inside_the_model(model: str) -> None:
    net = tiny_models.dropout_off(tiny_models.make(model))

    def ratio(term: Any) -> float:
        criterion = Criterion(term)
        return criterion.diagnostics(context(net, tiny_models.batch(model), step=0))[
            f"{term.name}/delta_over_embedding"
        ]

    for inject in ("scaled", "word"):
        assert ratio(VAT(attack=Ascent(inject=inject, radius=0.1))) == pytest.approx(0.1, rel=1e-3)
        assert ratio(R3F(inject=inject, relative=True, scale=0.1)) == pytest.approx(0.1, rel=0.1)
    absolute = [
        ratio(SMART(attack=Ascent(inject=inject, relative=False, radius=0.01, step_size=0.1)))
        for inject in ("scaled", "word")
    ]
    assert absolute[1] == pytest.approx(4 * absolute[0], rel=0.05)


def test_raw_steps_on_word_embeddings() -> None:
    """d <- d + step_size * g for the word embedding itself, whose gradient is larger by sqrt(D)."""
    net = tiny_models.dropout_off(tiny_models.make("pegasus")).double()
    settings: dict[str, Any] = {
        "relative": False,
        "rule": "raw",
        "projection": "none",
        "step_size": 50.0,
        "scale": 0.01,
    }
    found = {}
    for inject in ("scaled", "word"):
        term = SMART(attack=Ascent(inject=inject, **settings))
        torch.manual_seed(0)
        ctx = Evaluation(context(net, tiny_models.batch("pegasus")))
        ascent = term.worst(ctx, ctx.clean)
        found[inject] = (ascent.final["encoder"] - ascent.start["encoder"]) / ascent.gradient["encoder"]
    kept = tiny_models.batch("pegasus")["attention_mask"].bool()
    assert found["scaled"][kept].median().item() == pytest.approx(50.0, rel=1e-4)
    assert found["word"][kept].median().item() == pytest.approx(50.0 * 16, rel=1e-4)


@pytest.mark.parametrize("reaches", [True, False])
def test_embeddings_can_be_left_out_of_the_adversarial_gradient(reaches: bool) -> None:
    net = tiny_models.dropout_off(tiny_models.make("roberta"))
    ctx = context(net, tiny_models.batch("roberta"))
    report = Criterion(VAT(attack=Ascent(embedding_grad=reaches)))(ctx)
    without_base(ctx, report).backward()
    gradient = net.get_input_embeddings().weight.grad
    assert (gradient.abs().sum() > 1e-12) == reaches


def test_losses_are_averaged_as_the_criterion_averages() -> None:
    """Per sequence too, the second pass of R-Drop weighs what the first does, and FreeLB's whole loss is its mean."""
    from seqreg.terms.rdrop import RDrop

    net = tiny_models.dropout_off(tiny_models.make("bart"))
    for per in ("token", "sequence"):
        ctx = context(net, tiny_models.batch("bart"), step=1)
        report = Criterion(RDrop(), per=per)(ctx)  # type: ignore[arg-type]
        assert report.values["rdrop"].item() == pytest.approx(report.parts["base"].item(), rel=1e-6)
        free = Criterion(FreeLB(attack=Ascent(scale=1e-6, step_size=1e-6, radius=1e-5, steps=2)), per=per)  # type: ignore[arg-type]
        report = free(context(net, tiny_models.batch("bart")))
        assert abs(report.values["freelb"].item()) < 1e-4 * report.parts["base"].item()


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_agreements_are_averaged_as_asked(per: Any) -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    torch.manual_seed(0)
    value = Criterion(SMART(per=per))(context(net, tiny_models.batch("bart"))).values["smart"]
    torch.manual_seed(0)
    token = Criterion(SMART())(context(net, tiny_models.batch("bart"))).values["smart"]
    assert value.item() == pytest.approx(token.item() * (15 / 3 if per == "sequence" else 1), rel=1e-5)
