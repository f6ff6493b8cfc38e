from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seqreg import BadInput, Criterion
from seqreg.ascent import Ascent
from seqreg.integrations.hf import context
from seqreg.integrations.hf.model import r4f
from seqreg.selective_update import ChildTuningD, ChildTuningF, SelectiveUpdate, StochasticUpdate, Update, layer_places
from seqreg.terms.uegr import UEGR
from tests.helpers import tiny_models
from tests.helpers.evaluations import plain_loss
from tests.integrations.test_trainer import losses, trainer

GOLDEN = np.load(Path(__file__).parent / "golden" / "adversarial.npz")


def changed(net: nn.Module, before: list[Tensor]) -> list[tuple[int, int]]:
    """How many entries of every tensor that has a gradient moved, and how many it has."""
    return [
        (int((p != kept).sum()), p.numel())
        for p, kept in zip(net.parameters(), before, strict=True)
        if p.grad is not None
    ]


@pytest.mark.parametrize("refresh", [1, 3])
@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.0])
def test_exactly_the_ratio_changes_in_every_step(ratio: float, refresh: int) -> None:
    """Under AdamW with weight decay, whose momentum and decay would move every entry of a masked gradient."""
    net = tiny_models.make("bart")
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.1)
    update = SelectiveUpdate(ratio, refresh)
    masks: dict[int, Tensor] = {}
    for number in range(7):
        optimizer.zero_grad()
        Criterion()(context(net, tiny_models.batch("bart", seed=number))).total.backward()
        before = [p.detach().clone() for p in net.parameters()]
        with update.around(net.parameters()):
            optimizer.step()
        for moved, size in changed(net, before):
            assert moved <= max(1, round(ratio * size))  # less where an entry and its gradient are exactly 0
        assert sum(moved for moved, _ in changed(net, before)) > 0.8 * ratio * sum(n for _, n in changed(net, before))
        if number % refresh:
            assert all(torch.equal(mask, update.masks[i]) for i, mask in masks.items())
        masks = dict(update.masks)


def test_exact_count_where_every_entry_has_a_gradient() -> None:
    net = nn.Linear(40, 25)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.1)
    update = SelectiveUpdate(0.3)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(8, 40)).square().sum().backward()
        before = [p.detach().clone() for p in net.parameters()]
        saliency = [p.grad.square() for p in net.parameters() if p.grad is not None]
        with update.around(net.parameters()):
            optimizer.step()
        assert changed(net, before) == [(300, 1000), (8, 25)]
        for mask, values in zip(update.masks.values(), saliency, strict=True):
            assert values[mask].min() >= values[~mask].max()


def test_a_step_that_is_not_finite_does_not_choose_the_mask() -> None:
    weight, update = nn.Parameter(torch.zeros(4)), SelectiveUpdate(0.5, refresh=2)
    for gradient in ([1.0, 2.0, 3.0, 4.0], [torch.inf, torch.nan, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]):
        weight.grad = torch.tensor(gradient)
        update.before([weight])
    assert update.masks[0].tolist() == [False, False, True, True]


def test_masking_the_gradient_alone_would_not_hold_weights_still() -> None:
    net = nn.Linear(40, 25)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.1)
    net(torch.randn(8, 40)).square().sum().backward()
    before = [p.detach().clone() for p in net.parameters()]
    with ChildTuningF(0.3).around(net.parameters()):
        optimizer.step()
    assert changed(net, before)[0][0] == 1000


@pytest.mark.parametrize("mode", ["None", "ChildTuning-F", "ChildTuning-D"])
def test_child_tuning_is_the_released_code(mode: str) -> None:
    """One step of the authors' AdamW, which decays after the step and adds epsilon before bias correction."""
    weight = nn.Parameter(torch.from_numpy(GOLDEN["childtuning.w"]).clone())
    weight.grad = torch.from_numpy(GOLDEN["childtuning.g"]).clone()
    if mode == "ChildTuning-F":
        ChildTuningF(0.3, seed=9).before([weight])
    elif mode == "ChildTuning-D":
        update = ChildTuningD()
        update.masks = {0: weight.grad.abs() > 0.5}
        update.before([weight])
    first, second = 0.1 * weight.grad, 0.001 * weight.grad.square()
    step = 0.1 * (1 - 0.999) ** 0.5 / (1 - 0.9)
    with torch.no_grad():
        weight.sub_(step * first / (second.sqrt() + 1e-6))
        weight.sub_(0.1 * 0.01 * weight)
    expected = torch.from_numpy(GOLDEN[f"childtuning.{mode}"])
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=5e-5)


def test_child_tuning_d_keeps_the_largest_fisher_of_the_whole_model() -> None:
    net = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 3))
    update = ChildTuningD(0.25)
    with pytest.raises(BadInput, match="has measured nothing"):
        update.before(list(net.parameters()))
    for _ in range(4):
        net.zero_grad()
        net(torch.randn(8, 10)).square().sum().backward()
        update.measure(net.parameters())
    net.zero_grad()
    net(torch.randn(8, 10)).square().sum().backward()
    update.before([p for p in net.parameters() if p.grad is not None])
    kept = sum(int((p.grad != 0).sum()) for p in net.parameters() if p.grad is not None)
    total = sum(p.numel() for p in net.parameters())
    assert kept == round(0.25 * total)


def gradients(sizes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    """Parameters with gradients of very different sizes, some of them equal."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(size, 3)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) ** 3
        parameter.grad[0] = 0.5
    return parameters


def begun(parameters: list[nn.Parameter], **settings: Any) -> StochasticUpdate:
    update = StochasticUpdate(scope="all", **{"refresh": 1, **settings})
    update.begin(nn.ParameterList(parameters))
    return update


@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 1.0), (0.9, 10.0), (0.9, 1000.0)])
def test_stochastic_update_formula(alpha: float, beta: float) -> None:
    """Global ranks, probabilities and the masked gradient, from the formula, one entry after the other."""
    parameters = gradients((7, 40, 1))
    update = begun(parameters, alpha=alpha, beta=beta)
    update.measure(parameters)
    update.measure(parameters)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    squares = np.concatenate([(2 * g.double() ** 2).float().flatten().numpy() for g in before])
    rank = np.argsort(np.argsort(squares, kind="stable"), kind="stable") / (len(squares) - 1)
    p = np.maximum(1 / (1 + np.exp(np.minimum(-2 * beta * (rank - alpha), 700))), 1e-8)
    torch.testing.assert_close(update.probabilities(torch.from_numpy(squares)).double(), torch.from_numpy(p))
    update.before(parameters)
    after = np.concatenate([p.grad.flatten().numpy() for p in parameters if p.grad is not None])
    kept = after != 0
    expected = np.concatenate([g.flatten().numpy() for g in before]) / p
    np.testing.assert_allclose(after[kept], expected[kept], rtol=1e-6)
    assert 0 < kept.sum() < len(kept)
    assert np.isfinite(after).all()
    assert p.min() >= (1e-8 if beta == 1000 else 1.5e-8)  # the floor is below RoAST's least


@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 1.0), (0.9, 10.0)])
def test_stochastic_update_is_unbiased(alpha: float, beta: float) -> None:
    """E[g m / p] = g: of 4000 draws, in units of the standard error sqrt((1 - p) / p / draws) that the formula has."""
    draws, parameters = 4000, gradients((200, 133))
    update = begun(parameters, alpha=alpha, beta=beta)
    start = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    p = update.probabilities(start.square()).double()
    total, inputs = (
        torch.zeros(len(start), dtype=torch.float64),
        [q.grad.clone() for q in parameters if q.grad is not None],
    )
    for _ in range(draws):
        for parameter, gradient in zip(parameters, inputs, strict=True):
            parameter.grad = gradient.clone()
        update.squares = {i: gradient.square() for i, gradient in enumerate(inputs)}
        update.before(parameters)
        total += torch.cat([q.grad.flatten() for q in parameters if q.grad is not None])
    often = p * draws > 25  # where a normal distribution is near
    errors = ((total / draws / start - 1) / ((1 - p) / p / draws).sqrt())[often]
    assert often.sum() > (900 if beta == 1 else 300)
    assert errors.abs().max() < 5
    assert abs(errors.square().mean() - 1) < 5 * (2 / len(errors)) ** 0.5  # and as far off as it should be, no less
    assert abs(errors.mean()) < 5 / len(errors) ** 0.5


def test_stochastic_masks_depend_on_seeds_and_step_alone() -> None:
    def factors(*, run: int = 1, seed: int = 0, steps: int = 0, global_seed: int = 0) -> Tensor:
        torch.manual_seed(global_seed)
        parameters = gradients((100,))
        update = begun(parameters, seed=seed)
        update.begin(nn.ParameterList(parameters), seed=run)
        update.steps = steps
        update.measure(parameters)
        draws = torch.get_rng_state()
        update.before(parameters)
        assert torch.equal(torch.get_rng_state(), draws)
        return update.factors[0]

    assert torch.equal(factors(), factors(global_seed=9))
    for other in (factors(run=2), factors(seed=1), factors(steps=1)):
        assert not torch.equal(factors(), other)


def test_stochastic_update_draws_when_it_is_due() -> None:
    """From the unmasked gradients since the last draw; a step that is not finite is not counted."""
    parameters = gradients((50,))
    (parameter,) = parameters
    (gradient,) = (p.grad for p in parameters)
    assert gradient is not None
    update = begun(parameters, refresh=3, start="plain")
    factors = []
    for number in range(7):
        parameter.grad = gradient * (torch.inf if number == 4 else 1 + number)
        update.before(parameters)
        factors.append(update.factors.get(0))
        if number < 3:
            assert torch.equal(parameter.grad, gradient * (1 + number))
        elif number != 4:
            assert torch.equal(parameter.grad, gradient * (1 + number) * factors[-1])
    assert factors[:3] == [None] * 3
    assert factors[3] is factors[4] is factors[5] is not factors[6]
    torch.testing.assert_close(update.squares[0], gradient.square() * 7**2)
    own = begun(parameters, refresh=2)  # and what was measured counts for the first draw alone
    assert own.wants_measuring
    own.measure(parameters)
    assert not own.wants_measuring
    own.before(parameters)
    assert own.factors
    assert not own.wants_measuring


@pytest.mark.parametrize(
    ("name", "layers"),
    [("bart", ".layers."), ("roberta", "encoder.layer."), ("t5", ".block."), ("gpt2", "transformer.h.")],
)
def test_layers_are_those_of_encoders_and_decoders(name: str, layers: str) -> None:
    net = tiny_models.make(name)
    net = r4f(net) if name == "roberta" else net
    expected = {
        i for i, (key, _) in enumerate(net.named_parameters()) if layers in key and "relative_attention_bias" not in key
    }
    assert layer_places(net) == expected
    assert 0 < len(expected) < len(list(net.parameters()))


@pytest.mark.parametrize(
    "update",
    [
        lambda: SelectiveUpdate(0.3, 2), lambda: ChildTuningF(0.3), ChildTuningD,
        StochasticUpdate, lambda: StochasticUpdate(0.9, 10, refresh=2),
        lambda: StochasticUpdate(refresh=5, start="plain"),
    ],
)  # fmt: skip
def test_trainers_take_an_update_and_resume_exactly(update: Any, tmp_path: Path) -> None:
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "weight_decay": 0.1}
    whole = trainer("bart", tmp_path / "whole", update=update(), **settings)
    start = [p.detach().clone() for p in whole.model.parameters()]
    whole.train()
    assert any(not torch.equal(a, b) for a, b in zip(start, whole.model.parameters(), strict=True))
    again = trainer("bart", tmp_path / "again", update=update(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_epoch_is_counted_in_optimizer_steps(tmp_path: Path) -> None:
    """Eight examples: steps by accumulation, and what is measured."""
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 7}
    one = trainer("bart", tmp_path, update=StochasticUpdate(), **settings)
    one.train()
    assert (one.update.interval, one.update.steps) == (3, 7)
    for examples, settings in ((8, {"refresh": "epoch"}), (3, {"refresh": 1}), (6, {"refresh": 2})):
        update = StochasticUpdate(**settings)  # type: ignore[arg-type]
        update.begin(one.model, steps_per_epoch=3)
        indices = one._measured_indices(update)
        assert len(set(indices)) == len(indices) == examples


def test_trainers_really_hold_weights_still(tmp_path: Path) -> None:
    one = trainer("bart", tmp_path, update=SelectiveUpdate(0.1), max_steps=1, weight_decay=0.1)
    before = [p.detach().clone() for p in one.model.parameters()]
    one.train()
    for parameter, kept in zip(one.model.parameters(), before, strict=True):
        assert int((parameter != kept).sum()) <= max(1, round(0.1 * parameter.numel()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelectiveUpdate(0.0), "ratio=0.0"),
        (lambda: SelectiveUpdate(1.5), "ratio=1.5"),
        (lambda: SelectiveUpdate(0.3, 0), "refresh=0"),
        (lambda: ChildTuningF(-1), "reserve=-1"),
        (lambda: ChildTuningF(True), "reserve=True"),
        (lambda: StochasticUpdate(1.1), "alpha=1.1"),
        (lambda: StochasticUpdate(beta=float("nan")), "beta=nan"),
        (lambda: StochasticUpdate(beta="1"), "beta='1'"),  # type: ignore[arg-type]
        (lambda: StochasticUpdate(refresh=0), "refresh=0: expected a whole number >= 1, or 'epoch'"),
        (lambda: StochasticUpdate(refresh=[]), "refresh=[]"),  # type: ignore[arg-type]
        (lambda: StochasticUpdate(start={}), "start={}: expected 'measure' or 'plain'"),  # type: ignore[arg-type]
        (lambda: StochasticUpdate(scope="head"), "scope='head'"),  # type: ignore[arg-type]
        (lambda: StochasticUpdate(floor=0), "floor=0: expected a number from 1e-08 to 1"),
        (lambda: StochasticUpdate(seed=-1), "seed=-1"),
        (lambda: StochasticUpdate().before([]), "call begin(model"),
        (lambda: StochasticUpdate().begin(nn.Linear(2, 2)), "scope='layers': Linear trains no parameter there"),
        (lambda: StochasticUpdate(scope="all").begin(nn.Linear(2, 2)), "refresh='epoch': the steps of an epoch"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert message in str(caught.value)


def test_an_update_without_state_refuses_one() -> None:
    class Nothing(Update):
        def before(self, parameters: list[nn.Parameter]) -> None:
            pass

    with pytest.raises(BadInput, match="has no state"):
        Nothing().load_state_dict({"x": torch.zeros(1)})


def test_masks_belong_to_parameters_not_to_places() -> None:
    """Gradients on one layer in a step and on another, of the same shape, in the next."""
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.1)
    update = SelectiveUpdate(0.25, refresh=4)
    for number in range(4):
        optimizer.zero_grad()
        layer = net[number % 2]
        layer(torch.randn(3, 6)).square().sum().backward()
        before = [p.detach().clone() for p in net.parameters()]
        with update.around(net.parameters()):
            optimizer.step()
        moved = [int((p != kept).sum()) for p, kept in zip(net.parameters(), before, strict=True)]
        assert moved == ([9, 0] if number % 2 == 0 else [0, 9])
    assert not torch.equal(update.masks[0], update.masks[1])


def test_child_tuning_masks_are_the_same_on_every_rank() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        weight = nn.Parameter(torch.ones(50))
        weight.grad = torch.ones(50)
        ChildTuningF(0.3).before([weight])
        found.append(weight.grad.clone())
    assert torch.equal(found[0], found[1])


def test_uegr_formula() -> None:
    """Losses and divergence recomputed from the passes that were made; the perturbation is the normalised gradient."""
    net = tiny_models.make("bart").double()
    ctx = context(net, tiny_models.batch("bart"))
    views = []
    inner = ctx.forward.run
    ctx.forward.run = lambda request: (views.append((request.shifts, inner(request))), views[-1][1])[1]  # type: ignore
    term = UEGR(attack=Ascent(radius=0.1), passes=3, alpha=2.0)
    report = Criterion(term, label_smoothing=0.1)(ctx)
    assert len(views) == 5
    logs = [view.logits.log_softmax(-1) for _, view in views[2:]]
    kept = ctx.mask
    middle = (sum(log.exp() for log in logs) / 3).log()  # type: ignore[union-attr]
    js = sum((log.exp() * (log - middle)).sum(-1)[kept].mean() for log in logs) / 3
    losses = sum(plain_loss(ctx, view, label_smoothing=0.1) for _, view in views[2:]) / 3
    assert report.total.item() == pytest.approx((losses + 2.0 * js).item(), rel=1e-6)
    delta = views[2][0][-1].delta["encoder"]
    assert isinstance(delta, Tensor)
    embeds = report.clean.embeds["encoder", "embedding"].detach()
    mask = ctx.forward.sites["encoder"].mask
    assert mask is not None
    size = embeds[mask].square().mean().sqrt() * (mask.sum(-1) * 16).sqrt()
    torch.testing.assert_close(delta.flatten(1).norm(dim=-1), 0.1 * size, rtol=1e-4, atol=0)
    report.total.backward()


def test_uegr_uses_the_range_of_rates_and_puts_the_models_own_back() -> None:
    assert UEGR(passes=3, low=0.1, high=0.3).rates() == pytest.approx([0.1, 0.2, 0.3])
    net = tiny_models.make("roberta")
    before = [module.p for module in net.modules() if isinstance(module, nn.Dropout)]
    seen = []
    ctx = context(net, tiny_models.batch("roberta"))
    inner = ctx.forward.run

    def run(request: Any) -> Any:
        seen.append({module.p for module in net.modules() if isinstance(module, nn.Dropout)})
        return inner(request)

    ctx.forward.run = run  # type: ignore[method-assign]
    Criterion(UEGR(low=0.3, high=0.4))(ctx)
    assert seen[2:] == [{0.3}, {0.4}]
    assert [module.p for module in net.modules() if isinstance(module, nn.Dropout)] == before


def test_uegr_refuses_what_it_is_not() -> None:
    net = tiny_models.make("roberta", num_labels=1)
    batch = {**tiny_models.batch("roberta"), "labels": torch.tensor([0.1, 2.0, 3.5])}
    with pytest.raises(BadInput, match="a regression head has no distributions"):
        Criterion(UEGR())(context(net, batch))
    for settings, message in (
        ({"passes": 1}, "passes=1"),
        ({"low": 0.5}, "low=0.5"),
        ({"attack": {"steps": 2}}, "steps=2"),
    ):
        with pytest.raises(BadInput) as caught:
            UEGR(**settings)  # type: ignore[arg-type]
        assert message in str(caught.value)


@pytest.mark.parametrize("update", [SelectiveUpdate(0.3), StochasticUpdate()], ids=lambda update: type(update).__name__)
def test_both_stages_train(update: Update, tmp_path: Path) -> None:
    one = trainer("bart", tmp_path, UEGR(), update=update, max_steps=30, learning_rate=1e-2)
    one.train()
    assert losses(one)[-1]["loss"] < losses(one)[0]["loss"]


@pytest.mark.parametrize(
    "make", [lambda: StochasticUpdate(refresh=100), SelectiveUpdate, ChildTuningF, ChildTuningD], ids=lambda make: ""
)
def test_a_second_run_with_one_update_is_as_the_first(make: Any, tmp_path: Path) -> None:
    update = make()
    ends = []
    for number in range(2):
        run = trainer("bart", tmp_path / str(number), update=update, seed=3)
        run.train()
        ends.append([parameter.detach().clone() for parameter in run.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
