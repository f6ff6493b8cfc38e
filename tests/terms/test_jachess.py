"""JacHess: estimates against exact derivatives, and their parameter gradients against float64."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import steps as bench_steps
from benchmarks import worker_process
from benchmarks.sizes import SIZES
from seqreg import BadInput, Criterion, Evaluation, Perturbation, StartAt
from seqreg.errors import Advice
from seqreg.integrations.hf import context, count
from seqreg.noise import rms
from seqreg.terms.bregman import Bregman
from seqreg.terms.jachess import RMS, JacHess
from tests.helpers import tiny_models
from tests.helpers.evaluations import plain_loss, without_base
from tests.integrations.test_trainer import losses, rows, trainer
from tests.terms.test_adversarial import sentences, trained  # noqa: F401 - a fixture


def small(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row, three source and two target tokens: small enough for whole Jacobians and Hessians."""
    return {key: value[2:3, : 2 if key == "labels" else 3] for key, value in batch.items()}


def many_rows() -> dict[str, Tensor]:
    """As many rows as random directions of one step need to agree with their mean."""
    return {key: value.repeat(64, *[1] * (value.dim() - 1)) for key, value in tiny_models.batch("bart").items()}


def make(dropout: bool = False, attention: str = "eager", **extra: Any) -> Any:
    net = tiny_models.make(
        "bart", attn_implementation=attention, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, **extra
    )
    return net if dropout else tiny_models.dropout_off(net)


def outputs(net: Any, batch: dict[str, Tensor], term: JacHess, delta: Tensor) -> dict[str, Tensor]:
    ctx = Evaluation(context(net, batch), hidden=True)
    _ = ctx.clean
    view = ctx.forward(Perturbation({"encoder": delta}), dropout="shared", hidden=True)
    return {name: values for name, (values, _) in term.states(ctx, view).items()}


@pytest.fixture(scope="module")
def exact() -> dict[str, tuple[float, float]]:
    """|J|_F^2 and sum |H|_F^2 of every layer by brute force, in float64."""
    net, batch, term = make().double(), small(tiny_models.batch("bart")), JacHess()
    zero = torch.zeros(1, 3, 8, dtype=torch.float64)
    found = {}
    for name in outputs(net, batch, term, zero):

        def output(delta: Tensor, name: str = name) -> Tensor:
            return outputs(net, batch, term, delta)[name].flatten()

        jacobian = torch.autograd.functional.jacobian(output, zero)
        hessian = 0.0
        for index in range(len(output(zero))):
            one = torch.autograd.functional.hessian(lambda delta, i=index, f=output: f(delta)[i], zero)
            hessian += float(one.square().sum())  # type: ignore[union-attr]
        found[name] = (float(jacobian.square().sum()), hessian)  # type: ignore[union-attr]
    return found


def test_estimates_match_the_exact_norms_in_expectation(exact: dict[str, tuple[float, float]]) -> None:
    """Four standard errors (a confidence of 99.99%) over 1500 probes, for J and for the mixed H, layer by layer."""
    net, batch = make().double(), small(tiny_models.batch("bart"))
    term = JacHess(hessian=1.0, epsilon=1e-3)
    drawn: dict[str, list[tuple[float, float]]] = {name: [] for name in exact}
    torch.manual_seed(0)
    ctx = Evaluation(context(net, batch), hidden=True)
    unit = float(ctx.clean.embeds["encoder", "embedding"].square().mean().sqrt().detach())
    with torch.no_grad():
        for _ in range(1500):
            for name, (slope, bend) in term.norms(ctx).items():
                assert bend is not None
                drawn[name].append((float(slope), float(bend) / unit**2))
    for name, (jacobian, hessian) in exact.items():
        for index, truth in enumerate((jacobian, hessian)):
            values = torch.tensor([pair[index] for pair in drawn[name]], dtype=torch.float64)
            error = 4 * values.std() / len(values) ** 0.5 + 1e-3 * truth
            assert abs(values.mean() - truth) < error, (name, index)


def test_reverse_matches_the_exact_norms_in_expectation(exact: dict[str, tuple[float, float]]) -> None:
    """One joint probe estimates the weighted sum of all layers."""
    net, batch = make().double(), small(tiny_models.batch("bart"))
    criterion = Criterion(JacHess(estimator="reverse"))
    starts = {name: torch.tensor(2.0 + i) for i, name in enumerate(exact)}
    criterion.memory["jachess"] = {RMS: torch.tensor(1.0), **starts}
    truth = sum(exact[name][0] / (len(exact) * (2.0 + i)) for i, name in enumerate(exact))
    torch.manual_seed(0)
    ctx = context(net, batch)
    values = torch.tensor([float(criterion(ctx).values["jachess"]) for _ in range(1500)], dtype=torch.float64)
    assert abs(values.mean() - truth) < 4 * values.std() / len(values) ** 0.5 + 1e-6 * truth


def primitive_layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    x = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight + bias


def gradients(net: Any, value: Tensor) -> Tensor:
    found = torch.autograd.grad(value, list(net.parameters()), allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).flatten().double()
            for p, g in zip(net.parameters(), found, strict=True)
        ]
    )


def relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


def medium() -> tuple[Any, Any, dict[str, Tensor]]:
    """The same model in float32 and in float64."""
    net = tiny_models.dropout_off(
        tiny_models.make("bart", d_model=32, encoder_layers=2, decoder_layers=2, attn_implementation="eager")
    )
    return net, copy.deepcopy(net).double(), tiny_models.batch("bart")


def test_parameter_gradient_of_j_finite_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1% of d |J v|^2 / d theta, with J v by double backward through LayerNorm from primitive operations."""
    net, double, batch = medium()
    term = JacHess(weight=0.1)
    factors = {name: torch.tensor(1.0) for name in outputs(net, batch, term, torch.zeros(3, 8, 32))}
    v = torch.randn(3, 8, 32) * batch["attention_mask"].unsqueeze(-1)
    monkeypatch.setattr("seqreg.smoothness.sample", lambda *_: v)
    criterion = Criterion(term)
    unit = rms(net.get_input_embeddings()(batch["input_ids"]), batch["attention_mask"].bool())
    criterion.memory["jachess"] = {RMS: unit, **factors}
    ctx = context(net, batch, step=0)
    ours = gradients(net, without_base(ctx, criterion(ctx)))

    monkeypatch.setattr(functional, "layer_norm", primitive_layer_norm)
    delta = torch.zeros(3, 8, 32, dtype=torch.float64, requires_grad=True)
    ctx = Evaluation(context(double, batch), hidden=True)
    view = (ctx.clean, ctx.forward(Perturbation({"encoder": delta}), dropout="shared", hidden=True))[1]
    total = torch.zeros((), dtype=torch.float64)
    for values, mask in term.states(ctx, view).values():
        u = torch.zeros_like(values, requires_grad=True)
        kept = values if mask is None else values * mask.unsqueeze(-1)
        (pulled,) = torch.autograd.grad((kept * u).sum(), delta, create_graph=True)
        (pushed,) = torch.autograd.grad((pulled * v.double()).sum(), u, create_graph=True)
        total = total + pushed.square().sum() / 3 / len(factors)
    assert relative(ours, 0.1 * gradients(double, total)) < 0.01


def test_parameter_gradient_of_j_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native LayerNorm is right in double backward: within 1e-5 of the primitive one, on the same probe."""
    _, double, batch = medium()
    found = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(functional, "layer_norm", primitive_layer_norm)
        criterion = Criterion(JacHess(estimator="reverse", weight=1.0))
        torch.manual_seed(0)
        ctx = context(double, batch, step=0)
        found.append(gradients(double, without_base(ctx, criterion(ctx))))
    assert relative(found[0], found[1]) < 1e-5


def test_parameter_gradient_of_the_mixed_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 within 15% of float64 with a difference a hundred times smaller, on the same probes."""
    net, double, batch = medium()
    mask = batch["attention_mask"].unsqueeze(-1)
    probes = [torch.randn(3, 8, 32) * mask for _ in range(2)]
    found = []
    for model, epsilon in ((net, None), (double, 3e-4)):
        order = iter(probes)
        monkeypatch.setattr("seqreg.smoothness.sample", lambda *_, order=order: next(order))
        term = JacHess(hessian=1.0, epsilon=epsilon, layers="decoder")
        ctx = Evaluation(context(model, batch, step=0), hidden=True)
        bends = [bend for _, bend in term.norms(ctx).values()]
        found.append(gradients(model, torch.stack(bends).sum()))  # type: ignore[arg-type]
    assert relative(found[0], found[1]) < 0.15


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_masks_are_replayed(attention: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the masks of the clean pass the difference is within 0.1% of exact; with others it is off by orders."""
    net = tiny_models.make("bart", attn_implementation=attention, d_model=256, spread=1.0).double()
    if checkpointing:
        net.gradient_checkpointing_enable()
    batch = tiny_models.batch("bart")
    v = torch.randn(3, 8, 256, dtype=torch.float64) * batch["attention_mask"].unsqueeze(-1)
    monkeypatch.setattr("seqreg.smoothness.sample", lambda *_: v)
    ctx = Evaluation(context(net, batch), hidden=True)
    norms = {eps: JacHess(epsilon=eps).norms(ctx) for eps in (1e-2, 1e-5)}
    for name in norms[1e-2]:
        near, exact = (float(norms[eps][name][0].detach()) for eps in (1e-2, 1e-5))
        assert near == pytest.approx(exact, rel=1e-3), name
    apart = ctx.forward(dropout="independent", hidden=True).logits - ctx.clean.logits
    size = 1e-2 * float(ctx.clean.embeds["encoder", "embedding"].square().mean().sqrt().detach())
    independent = float((apart / size).square()[ctx.mask].sum().detach()) / 3
    assert independent > 100 * float(norms[1e-2]["logits"][0].detach())


def test_flops() -> None:
    size = SIZES["tiny"]
    model, batch = size.model(), size.batch()

    def flops(*terms: JacHess) -> int:
        return worker_process.count_flops(bench_steps.criterion_step(Criterion(*terms), model, batch))

    assert flops(JacHess()) / flops() <= 2.05
    assert flops(JacHess(hessian=0.1)) / flops() <= 4.1


def test_training_lowers_the_jacobian_at_unchanged_accuracy(trained: Any) -> None:  # noqa: F811
    net = copy.deepcopy(trained).float()
    test = sentences(256)

    def measure() -> tuple[float, float]:
        net.eval()
        ctx = Evaluation(context(net, test), hidden=True)
        with torch.no_grad():
            norm = float(JacHess(layers="logits").norms(ctx)["logits"][0])
        hits = (ctx.clean.logits.argmax(-1) == test["labels"]).float().mean()
        net.train()
        return norm, float(hits)

    before = measure()
    criterion = Criterion(JacHess(weight=0.3))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for number in range(150):
        optimizer.zero_grad()
        criterion(context(net, sentences(16), step=number)).total.backward()
        optimizer.step()
    after = measure()
    assert after[0] < 0.6 * before[0]
    assert after[1] >= before[1] - 0.02


def test_value_starts_at_one_and_is_kept_in_the_checkpoint() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    criterion = Criterion(JacHess())
    first = criterion(context(net, many_rows(), step=0))
    assert first.values["jachess"].item() == pytest.approx(1, abs=0.1)
    other = Criterion(JacHess())
    other.load_state_dict(criterion.state_dict())
    torch.manual_seed(1)
    expected = criterion(context(net, tiny_models.batch("bart"), step=1)).total
    torch.manual_seed(1)
    assert other(context(net, tiny_models.batch("bart"), step=1)).total == expected


def test_a_first_batch_that_is_not_finite_is_not_the_start() -> None:
    net, batch = make(), many_rows()
    criterion = Criterion(JacHess())
    weights = net.model.encoder.layers[-1].fc2.weight
    kept = weights.detach().clone()
    with torch.no_grad():
        weights[0, 0] = torch.nan
    assert not criterion(context(net, batch, step=0)).parts["jachess"].isfinite()
    assert not criterion.memory
    with torch.no_grad():
        weights.copy_(kept)
    report = criterion(context(net, batch, step=1))
    assert float(report.values["jachess"]) == pytest.approx(1, abs=0.1)


def drawn_by_token(monkeypatch: pytest.MonkeyPatch, net: Any) -> None:
    """The same directions for the same row, however a batch is cut: functions of its embeddings."""
    rows = torch.randn(tiny_models.VOCAB, net.config.d_model, generator=torch.Generator().manual_seed(3))
    table = net.get_input_embeddings().weight.detach().float()

    def sample(kind: str, embeds: Tensor, size: float, mask: Tensor | None) -> Tensor:
        tokens = torch.cdist(embeds.detach().flatten(0, 1).float(), table).argmin(-1).view(embeds.shape[:2])
        return rows[tokens] * (1.0 if mask is None else mask.unsqueeze(-1))

    monkeypatch.setattr("seqreg.smoothness.sample", sample)


@pytest.mark.parametrize("hessian", [0.0, 0.1])
def test_the_first_step_does_not_depend_on_its_cut(hessian: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start, the value and the gradient of 8 x 1, 4 x 2 and 1 x 8 rows, with directions that are drawn alike."""
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    net.double()
    drawn_by_token(monkeypatch, net)
    whole = {key: torch.cat([value] * 3)[:8] for key, value in tiny_models.batch("bart").items()}
    found = []
    for size in (8, 2, 1):
        cut = [{key: value[first : first + size] for key, value in whole.items()} for first in range(0, 8, size)]
        criterion, total = Criterion(JacHess(hessian=hessian, weight=1.0)), count(net, cut)
        net.zero_grad()
        value = torch.zeros(())
        for batch in cut:
            report = criterion(context(net, batch, step=0, count=total))
            report.total.backward()  # type: ignore[no-untyped-call]
            value = value + report.values["jachess"]
        gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        found.append((value.double(), gradient, torch.stack(list(criterion.memory["jachess"].values())).double()))
    for cut_found in found[1:]:
        for ours, other in zip(cut_found, found[0], strict=True):
            assert (ours - other).norm() <= 1e-5 * other.norm()


def test_a_start_of_a_part_of_the_step_is_said() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    batch = tiny_models.batch("bart")
    unknown = replace(count(net, [batch, batch]), contexts=None)
    with pytest.warns(Advice, match=r"its start is that of 3 of the 6 rows of this optimizer step: pass count=count"):
        Criterion(JacHess())(context(net, batch, step=0, count=unknown))


def test_measuring_the_start_draws_nothing() -> None:
    """Training's random numbers are those of a run whose start was saved."""
    net, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    criterion = Criterion(JacHess())
    values = []
    for _ in range(2):  # the second finds the start in the memory
        torch.manual_seed(0)
        values.append(criterion(context(net, batch, step=0, count=count(net, [batch]))).total.item())
    assert values[0] == values[1]


def test_floor_stops_the_push() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    criterion = Criterion(JacHess(floor=0.5, weight=1.0))
    criterion(context(net, tiny_models.batch("bart"), step=0))
    for key in criterion.memory["jachess"].keys() - {RMS}:
        criterion.memory["jachess"][key] *= 10.0  # as if every J had fallen to a tenth
    ctx = context(net, tiny_models.batch("bart"), step=1)
    report = criterion(ctx)
    assert report.values["jachess"].item() == pytest.approx(0.5, rel=1e-5)
    pushed = gradients(net, without_base(ctx, report))
    assert (pushed == 0).all()


def test_two_phases() -> None:
    net = tiny_models.make("bart")
    criterion = Criterion(JacHess(mode="two_phase", switch=2))
    first = criterion(context(net, tiny_models.batch("bart"), step=1))
    assert first.parts["base"] == 0
    assert first.total.item() == pytest.approx(first.parts["jachess"].item())
    assert criterion(context(net, tiny_models.batch("bart"), step=2)).parts["base"] > 0


@pytest.mark.parametrize("model", ["bart", "roberta", "gpt2", "t5", "bart_classifier"])
def test_alternate_counts_on_texts_without_labels_alone(model: str) -> None:
    net, batch = tiny_models.make(model), tiny_models.batch(model)
    report = Criterion(JacHess(mode="alternate"))(
        context(net, batch, step=0), context(net, batch, step=0, stream="unlabelled")
    )
    assert set(report.parts) == {"base", "jachess.unlabelled"}
    assert report.parts["jachess.unlabelled"] > 0


def test_a_term_that_has_nothing_to_remember_yet_can_resume(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    term = Bregman(weight=StartAt(1.0, start=3))
    whole = trainer("bart", tmp_path / "whole", term, **settings)
    whole.train()
    again = trainer("bart", tmp_path / "again", term, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_lower_precision() -> None:
    """Under autocast the differences are taken in float32; weights in lower precision are refused."""
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    found = []
    for precision in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        ctx = Evaluation(context(net, tiny_models.batch("bart")), hidden=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            found.append({name: float(slope.detach()) for name, (slope, _) in JacHess().norms(ctx).items()})
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    with pytest.raises(BadInput, match="keep the weights in float32"):
        Criterion(JacHess())(context(tiny_models.make("bart").bfloat16(), tiny_models.batch("bart")))


@pytest.mark.parametrize("model", ["bart", "roberta", "gpt2"])
def test_published_estimator(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Hessian is in the value and not in the gradient: other dimensions, another value, the same gradient."""
    net, batch = tiny_models.dropout_off(tiny_models.make(model)), tiny_models.batch(model)
    values, found = [], []
    for dimension in (0, 1):
        monkeypatch.setattr(torch, "randint", lambda low, high, size, d=dimension: torch.full(size, d))
        torch.manual_seed(0)
        ctx = context(net, batch, step=0)
        report = Criterion(JacHess(preset="published", layers="logits", weight=1.0))(ctx)
        values.append(report.values["jachess"].item())
        found.append(gradients(net, without_base(ctx, report)))
    assert values[0] != values[1]
    assert found[0].norm() > 0
    assert torch.equal(found[0], found[1])


def test_settings() -> None:
    for settings, message in (
        ({"hessian": -1.0}, "hessian=-1.0"),
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"floor": 1.0}, "floor=1.0"),
        ({"switch": -1}, "switch=-1"),
        ({"hessian": 0.1, "estimator": "reverse"}, "wrong third derivatives"),
        ({"estimator": "forward"}, "estimator='forward'"),
    ):
        with pytest.raises(BadInput) as caught:
            JacHess(**settings)  # type: ignore[arg-type]
        assert message in str(caught.value)
    with pytest.raises(BadInput, match="layers='decoder': this model has encoder"):
        Criterion(JacHess(layers="decoder"))(context(tiny_models.make("roberta"), tiny_models.batch("roberta")))


def test_micro_batches_add_up_and_share_one_start() -> None:
    """The value of an optimizer step does not depend on its cut; a batch without labels neither counts nor decides."""
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    batch = tiny_models.batch("bart")
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    criterion = Criterion(JacHess())
    whole = count(net, [empty, batch, batch])
    values = [float(criterion(context(net, b, step=0, count=whole)).values["jachess"]) for b in (empty, batch, batch)]
    assert values[0] == 0
    assert sum(values) == pytest.approx(1, rel=0.5)
    assert all(0.1 < float(value) < 1e6 for name, value in criterion.memory["jachess"].items() if name != RMS)


def test_floor_and_diagnostics_are_of_the_batch_not_of_its_share() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    batch = tiny_models.batch("bart")
    criterion = Criterion(JacHess(floor=0.5, weight=1.0))
    whole = count(net, [batch] * 4)
    criterion(context(net, batch, step=0, count=whole))
    start = dict(criterion.memory["jachess"])
    criterion.memory["jachess"] = {name: value if name == RMS else 10 * value for name, value in start.items()}
    value = criterion(context(net, batch, step=1, count=whole)).values["jachess"]  # every J is below the floor
    assert value.item() == pytest.approx(0.5 / 4, rel=1e-5)
    criterion.memory["jachess"] = start
    found = []
    for counted in (whole, None):
        torch.manual_seed(0)
        found.append(criterion.diagnostics(context(net, batch, step=0, count=counted)))
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_two_phases_leave_the_task_out_of_the_gradient() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    found = []
    for mode in ("two_phase", "joint"):
        torch.manual_seed(0)
        ctx = context(net, tiny_models.batch("bart"), step=0)
        report = Criterion(JacHess(mode=mode, weight=1.0))(ctx)  # type: ignore[arg-type]
        base = 0.0 if mode == "two_phase" else plain_loss(ctx, report.clean)
        found.append(gradients(net, report.total - base))
    assert relative(found[0], found[1]) < 1e-4
    with pytest.raises(BadInput, match="counts steps"):
        Criterion(JacHess(mode="two_phase"))(context(net, tiny_models.batch("bart")))


def test_reverse_leaves_padding_out() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart")).double()
    found = []
    for pad in (0, 4):
        criterion = Criterion(JacHess(estimator="reverse", layers="logits"))
        criterion.memory["jachess"] = {RMS: torch.tensor(1.0), "logits": torch.tensor(1.0)}
        torch.manual_seed(0)
        ctx = context(net, tiny_models.batch("bart", pad=pad), step=0)
        found.append(sum(float(criterion(ctx).values["jachess"]) for _ in range(300)) / 300)
    assert found[1] == pytest.approx(found[0], rel=0.15)


def test_what_would_fail_in_the_middle_of_training_is_refused() -> None:
    net = tiny_models.make("bart")
    net.gradient_checkpointing_enable()
    with pytest.raises(BadInput, match="attn_implementation='eager'"):
        Criterion(JacHess(estimator="reverse"))(context(net, tiny_models.batch("bart")))
    eager = tiny_models.make("bart", attn_implementation="eager")
    eager.gradient_checkpointing_enable()
    Criterion(JacHess(estimator="reverse"))(context(eager, tiny_models.batch("bart"))).total.backward()
    with pytest.raises(BadInput, match="set the model's layerdrop to 0"):
        Criterion(JacHess())(context(tiny_models.make("bart", encoder_layerdrop=0.5), tiny_models.batch("bart")))
    with pytest.raises(BadInput, match=r"floor=0\.5"):
        JacHess(estimator="reverse", floor=0.5)


def test_guards_are_logged_on_texts_without_labels(tmp_path: Path) -> None:
    one = trainer("bart", tmp_path, JacHess(on="both"), streams={"unlabelled_dataset": rows("bart", 5)}, max_steps=2)
    one.diagnostics_steps = 1
    one.train()
    assert {"diagnostics/jachess/least_J", "diagnostics/source_gap"} <= losses(one)[-1].keys()
    joint = trainer("bart", tmp_path, JacHess(), max_steps=2)
    joint.diagnostics_steps = 1
    joint.train()
    assert {"diagnostics/jachess/least_J", "diagnostics/jachess/source_gap"} <= losses(joint)[-1].keys()


def test_padding_of_unlabelled_decoder_inputs_does_not_count() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart")).double()
    found = []
    for width in (5, 9):
        batch = {key: value for key, value in tiny_models.batch("bart").items() if key != "labels"}
        batch["decoder_input_ids"] = torch.full((3, width), tiny_models.PAD)
        batch["decoder_input_ids"][:, :5] = torch.arange(4, 9)
        torch.manual_seed(0)
        ctx = Evaluation(context(net, batch, stream="unlabelled"), hidden=True)
        found.append({name: float(slope.detach()) for name, (slope, _) in JacHess().norms(ctx).items()})
    assert found[0] == pytest.approx(found[1], rel=1e-6)
