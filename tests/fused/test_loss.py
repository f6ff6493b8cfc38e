"""The fused path against the plain formulas: values and all gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seqreg.divergences import DIVERGENCES
from seqreg.forward import Pass
from seqreg.fused import block_sizes, head, squared_norm
from seqreg.fused import loss as fused
from seqreg.fused.block_sizes import BlockSizes
from seqreg.fused.head import Projection
from seqreg.fused.loss import Summand, fused_loss
from seqreg.losses import Base, label_smoothed_nll
from seqreg.objective import BaseLoss, Consistency
from tests.fused import reference
from tests.helpers.tolerance import assert_within_rounding

DETACHED = ("none", "first", "second", "teachers")
MODES = [(name, held) for name in DIVERGENCES for held in DETACHED if held != "teachers" or name == "symmetric_kl"]
SMOOTHED = Base(0.1)
PLAIN: dict[str, Any] = {"smoothing": "torch", "label_smoothing": 0.1}


@pytest.fixture(autouse=True)
def _ragged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks and blocks so small that every case has several, and the last is cut short."""
    monkeypatch.setattr(fused, "ROWS", 7)
    monkeypatch.setattr(block_sizes, "CPU", BlockSizes(cells=40, classes=5))
    yield
    head.release_buffers()


def lazy(states: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Pass:
    """A pass whose logits nobody has computed."""
    projection = Projection(states, weight, bias, **{"dtype": states.dtype, **options})
    return Pass(projection.logits, projection=projection)


class Case:
    """Some passes over a batch of one row, and what is to be computed of them, both ways."""

    def __init__(self, seed: int, positions: int, classes: int, width: int, dtype: torch.dtype, **options: Any) -> None:
        drawn = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=drawn, dtype=torch.float64).to(dtype)

        chosen = {"smoothing": "torch", "label_smoothing": 0.1, "padding": 0.3, "bias": True, **options}
        self.base = Base(chosen["label_smoothing"], chosen["smoothing"])
        self.weight = normal(classes, width).requires_grad_()
        self.bias = normal(classes).requires_grad_() if chosen["bias"] else None
        self.states = [normal(1, positions, width).requires_grad_() for _ in range(3)]
        self.constant = normal(1, positions, classes)
        self.labels = torch.randint(0, classes, (1, positions), generator=drawn)
        self.kept = torch.rand(1, positions, generator=drawn) >= chosen["padding"]
        self.weights = [torch.rand(1, positions, generator=drawn, dtype=torch.float64) * self.kept for _ in range(5)]
        self.labels[~self.kept] = -100

    def in_float64(self) -> Case:
        """The same numbers, to be computed with in float64."""
        exact = copy.copy(self)
        exact.weight = self.weight.detach().double().requires_grad_()
        exact.bias = None if self.bias is None else self.bias.detach().double().requires_grad_()
        exact.states = [one.detach().double().requires_grad_() for one in self.states]
        exact.constant = self.constant.double()
        return exact

    @property
    def leaves(self) -> list[Tensor]:
        return [self.weight, *([] if self.bias is None else [self.bias]), *self.states]

    def passes(self, **options: Any) -> list[Pass]:
        """One of every states, and one with constant logits."""
        return [*(lazy(states, self.weight, self.bias, **options) for states in self.states), Pass(self.constant)]

    def summands(self, divergence: Any, detach: Any, **options: Any) -> list[Summand]:
        """A base loss of two passes, a divergence between them, and one of a third from constant logits."""
        a, b, c, constant = self.passes(**options)
        w, kept = self.weights, self.kept
        summands = [
            Summand(BaseLoss(a), w[0], kept),
            Summand(BaseLoss(b), w[1], kept),
            Summand(Consistency(a, b, divergence, detach), w[2], kept),
        ]
        if divergence != "stable_kl" and detach in ("none", "second"):
            some = w[3] > 0.5
            summands.append(Summand(Consistency(c, constant, divergence, "second"), w[3] * some, some))
        return summands

    def loss(self, divergence: Any, detach: Any, **options: Any) -> Tensor:
        return fused_loss(self.summands(divergence, detach, **options), self.labels, self.base)[0]


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


def agree(case: Case, divergence: str, detach: str) -> None:
    """Value and gradients of a case are those of float64, but for what sums in any order are rounded by."""
    exact = case.in_float64()
    ours = fused_loss(case.summands(divergence, detach), case.labels, case.base)[0]
    plain = reference.loss(exact.summands(divergence, detach), exact.labels, exact.base)
    states, weight = torch.cat(exact.states).detach(), exact.weight.detach()
    number = states.shape[1] + weight.numel() // weight.shape[1] + weight.shape[1]  # positions, classes, width
    products = float((states.abs() @ weight.abs().t()).max())
    logits = max(products + (0.0 if case.bias is None else float(case.bias.detach().abs().max())), 1.0)
    size = sum(float(one.weight.sum()) for one in case.summands(divergence, detach) if one.weight is not None)
    size = size * (logits + math.log(len(weight))) + lost_odds(exact, divergence)
    assert_within_rounding(ours, plain, number=number, size=size)
    lengths = max(1.0, float(states.norm(dim=-1).max()), float(weight.norm(dim=-1).max()))
    for own, other in zip(gradients(ours, case.leaves), gradients(plain, exact.leaves), strict=True):
        assert_within_rounding(own, other, number=number, size=size * lengths)


def lost_odds(case: Case, divergence: str) -> float:
    """What "stable_kl" adds up besides: 1 / p - 1 cancels where p is near 1, and its logarithm keeps the loss."""
    if divergence != "stable_kl":
        return 0.0
    first, second, *_ = (view.logits.detach().softmax(-1) for view in case.passes())
    amounts = 2 * second * (1 / (1 - first + 1e-6) + 1 / (1 - second + 1e-6))
    return float((amounts.sum(-1) * case.weights[2]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("divergence", "detach"), MODES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    positions=st.integers(1, 24),
    classes=st.integers(2, 40),
    width=st.integers(1, 12),
    smoothing=st.sampled_from(["torch", "fairseq"]),
    label_smoothing=st.sampled_from([0.0, 0.1]),
    padding=st.sampled_from([0.0, 0.3, 1.0]),
    bias=st.booleans(),
)
@example(seed=2147483648, positions=5, classes=12, width=8, padding=0.3, bias=False, **PLAIN)  # 1 - p cancels
def test_values_and_gradients(divergence: str, detach: str, dtype: torch.dtype, **options: Any) -> None:
    shape = {key: options.pop(key) for key in ("seed", "positions", "classes", "width")}
    agree(Case(**shape, dtype=dtype, **options), divergence, detach)


@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "symmetric_kl", "js"])
@pytest.mark.parametrize("offset", [-1e4, 1e3])
def test_logits_far_from_zero(divergence: Any, offset: float) -> None:
    """What all classes have in common changes neither a loss nor a divergence, of logits that are the same numbers."""
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randint(-3000, 3000, (2, 6, 500), generator=drawn).float() / 1024  # exact after the offset, too
    labels, ones = torch.randint(0, 500, (1, 6), generator=drawn), torch.ones(1, 6, dtype=torch.float64)
    every = torch.arange(6)
    found = []
    for shift in (0.0, offset):
        passes = [lazy(torch.zeros(1, 6, 1), torch.zeros(500, 1)) for _ in logits]
        passes[1].projection = passes[0].projection
        for view, scores in zip(passes, logits, strict=True):
            view.early_logits = scores + shift, every, every >= 0
        parts = (BaseLoss(passes[0]), Consistency(*passes, divergence))
        _, results = fused_loss([Summand(part, ones, ones > 0) for part in parts], labels, SMOOTHED)
        found.append([results[0], results[1][0]])
    for near, far in zip(*found, strict=True):
        torch.testing.assert_close(far, near, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("divergence", "detach"),
    [mode for mode in MODES if mode[0] not in ("stable_kl", "symmetric_ce") and mode[1] != "teachers"],
)
def test_gradcheck(divergence: str, detach: str) -> None:
    """Against finite differences; sides that are held fixed have none, so only those that learn are checked."""
    case = Case(5, 9, 11, 4, torch.float64)
    frozen = {"first": 0, "second": 1}.get(detach)

    def loss(weight: Tensor, *states: Tensor) -> Tensor:
        passes = [lazy(each, weight, case.bias) for each in states]
        parts = BaseLoss(passes[1 - (frozen or 0)]), Consistency(*passes, divergence, detach)  # type: ignore[arg-type]
        summands = [Summand(part, case.weights[k], case.kept) for k, part in enumerate(parts)]
        return fused_loss(summands, case.labels, SMOOTHED)[0]

    leaves = [case.weight.detach(), *(one.detach() for one in case.states[:2])]
    for index, leaf in enumerate(leaves[1:]):
        leaf.requires_grad_(index != frozen)
    leaves[0].requires_grad_(frozen is None)  # the head learns from both sides
    assert torch.autograd.gradcheck(loss, leaves)


def test_small_differences_are_not_lost() -> None:
    """Where the views nearly agree, float32 keeps what float64 says."""
    case = Case(1, 20, 300, 8, torch.float64)
    first = case.states[0].detach()
    second = first + 1e-3 * case.states[1].detach()
    for divergence in ("symmetric_kl", "kl", "reverse_kl", "js"):
        found = []
        for dtype in (torch.float64, torch.float32):
            weight = case.weight.detach().to(dtype)
            part = Consistency(lazy(first.to(dtype), weight), lazy(second.to(dtype), weight), divergence)  # type: ignore[arg-type]
            summand = Summand(part, case.weights[0], case.kept)
            found.append(float(fused_loss([summand], case.labels, case.base)[0]))
        assert found[1] == pytest.approx(found[0], rel=2e-3)


def test_an_empty_batch_has_a_loss_of_zero_and_zero_gradients() -> None:
    case = Case(2, 6, 9, 3, torch.float32, padding=1.0)
    loss = case.loss("symmetric_kl", "none")
    assert loss == 0
    assert all((one == 0).all() for one in gradients(loss, case.leaves))


def test_rows_of_a_pass() -> None:
    """A pass of some rows of the batch is compared with those rows."""
    drawn = torch.Generator().manual_seed(3)
    states = torch.randn(4, 3, 5, generator=drawn, dtype=torch.float64).requires_grad_()
    weight = torch.randn(9, 5, generator=drawn, dtype=torch.float64).requires_grad_()
    labels, weights = torch.randint(0, 9, (4, 3), generator=drawn), torch.rand(4, 3, generator=drawn)
    rows = torch.tensor([3, 1])
    some = torch.randn(2, 3, 5, generator=drawn, dtype=torch.float64).requires_grad_()
    clean, other = lazy(states, weight), lazy(some, weight)
    other.rows = rows
    where = torch.zeros(4, 3, dtype=torch.bool).index_fill(0, rows, True)
    summands = [
        Summand(BaseLoss(clean), weights, weights > 0),
        Summand(Consistency(clean, other), weights * where, where),
    ]
    loss = fused_loss(summands, labels, Base())[0]
    first, second = states @ weight.t(), some @ weight.t()
    values = DIVERGENCES["symmetric_kl"](first[rows], second)
    plain = (label_smoothed_nll(first, labels)[0] * weights).sum() + (values * weights[rows]).sum()
    leaves = [weight, states, some]
    torch.testing.assert_close(loss, plain)
    for own, expected in zip(gradients(loss, leaves), gradients(plain, leaves), strict=True):
        torch.testing.assert_close(own, expected)


def test_states_of_any_strides() -> None:
    """fairseq's states are transposed: their gradient must arrive all the same."""
    drawn = torch.Generator().manual_seed(4)
    storage = torch.randn(3, 4, 5, generator=drawn, dtype=torch.float64).requires_grad_()
    weight = torch.randn(9, 5, generator=drawn, dtype=torch.float64).requires_grad_()
    labels, weights = torch.randint(0, 9, (4, 3), generator=drawn), torch.rand(4, 3, generator=drawn)
    states = storage.transpose(0, 1)  # [4, 3, 5]
    loss = fused_loss([Summand(BaseLoss(lazy(states, weight)), weights, weights > 0)], labels, Base())[0]
    plain = (label_smoothed_nll(states @ weight.t(), labels)[0] * weights).sum()
    for own, expected in zip(gradients(loss, [weight, storage]), gradients(plain, [weight, storage]), strict=True):
        torch.testing.assert_close(own, expected)


def test_logits_computed_early_replace_the_product() -> None:
    """To the rounding of float64: the products have other shapes, and so may have another order of summation."""
    case = Case(4, 11, 13, 4, torch.float64)
    results = []
    for early in (False, True):
        view = lazy(case.states[0], case.weight, case.bias)
        if early and view.projection is not None:
            covered = case.kept.flatten()
            view.early_logits = (*view.projection.logits_at(covered.nonzero().squeeze(1)), covered)
            assert not view.early_logits[0].requires_grad
        loss = fused_loss([Summand(BaseLoss(view), case.weights[0], case.kept)], case.labels, SMOOTHED)[0]
        results.append((loss, gradients(loss, case.leaves)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_scaled_and_repeated_backward() -> None:
    case = Case(6, 9, 11, 4, torch.float64)
    once = gradients(case.loss("symmetric_kl", "none"), case.leaves)
    loss = case.loss("symmetric_kl", "none")
    for factor in (1.0, 3.0, 1.0):
        found = torch.autograd.grad(factor * loss, case.leaves, retain_graph=True)
        for own, other in zip(found, once, strict=True):
            torch.testing.assert_close(own, factor * other, rtol=1e-12, atol=1e-14)


def test_a_second_derivative_is_refused() -> None:
    case = Case(7, 5, 6, 3, torch.float64)
    for loss in (
        case.loss("kl", "none"),
        squared_norm.squared_norm(case.states[0][0], case.weight, case.weights[0][0]),
    ):
        with pytest.raises(RuntimeError, match="fused=False"):
            torch.autograd.grad(loss, case.states[0], create_graph=True)


def test_frozen_head_and_frozen_body() -> None:
    case = Case(8, 9, 11, 4, torch.float64)
    whole = gradients(case.loss("symmetric_kl", "none"), case.leaves)
    case.weight.requires_grad_(False)
    states = gradients(case.loss("symmetric_kl", "none"), case.states)
    case.weight.requires_grad_(True)
    for one in case.states:
        one.requires_grad_(False)
    (weight,) = gradients(case.loss("symmetric_kl", "none"), [case.weight])
    torch.testing.assert_close(weight, whole[0])
    for own, other in zip(states, whole[2:], strict=True):
        torch.testing.assert_close(own, other)


def test_a_pass_without_grad_has_no_gradient() -> None:
    """Not by its states, and not by the head."""
    case = Case(12, 9, 11, 4, torch.float64)
    first, second = case.states[:2]
    found = []
    for requires_grad in (False, True):
        other = lazy(second.detach(), case.weight, requires_grad=requires_grad)
        part = Consistency(lazy(first, case.weight), other, detach="second" if requires_grad else "none")
        loss = fused_loss([Summand(part, case.weights[0], case.kept)], case.labels, case.base)[0]
        found.append(gradients(loss, [case.weight, first]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def test_bfloat16_products_have_float32_sums() -> None:
    """Within the rounding of bfloat16 products, and with gradients in the types of what they are of."""
    case = Case(9, 40, 64, 16, torch.float32, padding=0.0)
    exact = case.loss("symmetric_kl", "none")
    expected = gradients(exact, case.leaves)
    loss = case.loss("symmetric_kl", "none", dtype=torch.bfloat16)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.03)
    for own, other in zip(gradients(loss, case.leaves), expected, strict=True):
        assert own.dtype == torch.float32
        assert (own - other).norm() < 0.03 * other.norm()


@pytest.mark.parametrize(("positions", "width"), [(30, 4), (4, 30)])
def test_squared_norm(positions: int, width: int) -> None:
    """Through the Gram matrix and in blocks: value, gradients, and gradcheck."""
    drawn = torch.Generator().manual_seed(0)
    vectors = torch.randn(positions, width, generator=drawn, dtype=torch.float64).requires_grad_()
    weight = torch.randn(23, width, generator=drawn, dtype=torch.float64).requires_grad_()
    weights = torch.rand(positions, generator=drawn, dtype=torch.float64)
    ours = 3 * squared_norm.squared_norm(vectors, weight, weights)
    plain = 3 * ((vectors @ weight.t()).square().sum(1) * weights).sum()
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for own, other in zip(gradients(ours, [vectors, weight]), gradients(plain, [vectors, weight]), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a, b: squared_norm.squared_norm(a, b, weights), (vectors, weight))


def flops(summands: Sequence[Summand], case: Case, **options: Any) -> float:
    """Head products of one call and its backward."""
    with FlopCounterMode(display=False) as counter:
        fused_loss(summands, case.labels, SMOOTHED, **options)[0].backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops() / (2 * int(case.kept.sum()) * case.weight.numel())


def test_work_that_is_left_out() -> None:
    """Head products in units of one over the positions that count: padding, held sides, early logits, ascents."""
    case = Case(10, 40, 30, 8, torch.float32, bias=False, padding=0.25)
    w, kept = case.weights, case.kept
    assert 0.5 < kept.float().mean() < 0.9  # nothing is computed for the rest
    a, b, *_ = case.passes()
    base, second, negative = (
        Summand(BaseLoss(view), weight, kept) for view, weight in ((a, w[0]), (b, w[1]), (a, -w[0]))
    )
    both, clean, perturbed = (
        Summand(Consistency(a, b, "kl", held), w[1], kept) for held in ("none", "second", "first")
    )
    assert flops([base], case) == 3
    assert flops([base, both], case) == 6
    assert flops([base, clean], case) == 4
    assert flops([perturbed], case, head_grad=False) == 3
    assert flops([base, negative, second], case) == 6
    assert a.projection is not None
    a.early_logits = (*a.projection.logits_at(kept.flatten().nonzero().squeeze(1)), kept.flatten())
    assert flops([perturbed], case, head_grad=False) == 2
