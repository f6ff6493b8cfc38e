"""The fused path against the plain formulas: values and all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seqreg.divergences import DIVERGENCES, kl
from seqreg.fused import head as head
from seqreg.fused import loss as vocab
from seqreg.fused.head import Projection, squared_norm
from seqreg.fused.loss import FusedObjective, LogitDivergence, LogitSource, SmoothedNLL, fused
from seqreg.losses import label_smoothed_nll

DETACHED = ("none", "first", "second", "teachers")
MODES = [(name, held) for name in DIVERGENCES for held in DETACHED if held != "teachers" or name == "symmetric_kl"]


@pytest.fixture(autouse=True)
def _ragged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks and blocks so small that every case has several, and the last is cut short."""
    monkeypatch.setattr(vocab, "ROWS", 7)
    monkeypatch.setattr(head, "CLASSES", 5)
    monkeypatch.setattr(vocab, "CELLS", 40)
    yield
    head.release()


class Case:
    """Some views of a batch, and what is to be computed of them, both ways."""

    def __init__(self, seed: int, positions: int, classes: int, width: int, dtype: torch.dtype, **options: Any) -> None:
        drawn = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=drawn, dtype=torch.float64).to(dtype)

        self.options = {"smoothing": "torch", "label_smoothing": 0.1, "padding": 0.3, "bias": True, **options}
        self.weight = normal(classes, width).requires_grad_()
        self.bias = normal(classes).requires_grad_() if self.options["bias"] else None
        self.states = [normal(1, positions, width).requires_grad_() for _ in range(3)]
        self.constant = normal(positions, classes)
        self.labels = torch.randint(0, classes, (positions,), generator=drawn)
        self.kept = torch.rand(positions, generator=drawn) >= self.options["padding"]
        self.weights = [torch.rand(positions, generator=drawn, dtype=torch.float64) * self.kept for _ in range(5)]
        self.labels[~self.kept] = -100

    @property
    def leaves(self) -> list[Tensor]:
        return [self.weight, *([] if self.bias is None else [self.bias]), *self.states]

    def work(self, divergence: Any, detach: Any) -> FusedObjective:
        """A base loss of two views, an agreement between them, and one of a third with constant logits."""
        sides = [LogitSource(Projection(one, self.weight, self.bias, one.dtype)) for one in self.states]
        sides.append(LogitSource(None, None, self.constant))
        w, kept = self.weights, self.kept
        parts = [
            SmoothedNLL(0, w[0], kept),
            SmoothedNLL(1, w[1], kept),
            LogitDivergence(0, 1, divergence, detach, w[2], kept),
        ]
        if divergence != "stable_kl" and detach in ("none", "second"):
            parts.append(LogitDivergence(2, 3, divergence, "second", w[3], w[3] > 0.5))
            parts[-1].weight = w[3] * (w[3] > 0.5)
        return FusedObjective(sides, self.labels, parts, self.options["label_smoothing"], self.options["smoothing"])

    def plain(self, work: FusedObjective) -> Tensor:
        logits = [(one[0] @ self.weight.t() + (0 if self.bias is None else self.bias)) for one in self.states]
        logits.append(self.constant)
        total = torch.zeros((), dtype=self.weight.dtype)
        for part in work.parts:
            if isinstance(part, SmoothedNLL):
                options = self.options["label_smoothing"], self.options["smoothing"]
                values = label_smoothed_nll(logits[part.sides[0]], self.labels, *options)[0]
            else:
                assert isinstance(part, LogitDivergence)
                first, second = (logits[side] for side in part.sides)
                if part.detach == "teachers":
                    values = kl(first.detach(), second) + kl(second.detach(), first)
                else:
                    first = first.detach() if part.detach == "first" else first
                    second = second.detach() if part.detach == "second" else second
                    values = DIVERGENCES[part.divergence](first, second)
            total = total + (values.masked_fill(part.weight == 0, 0.0) * part.weight.to(values.dtype)).sum()
        return total


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, found, strict=True)]


def agree(case: Case, divergence: str, detach: str, tolerance: float) -> None:
    """Errors are relative to the norm of a gradient, or to the size of its summands where these cancel each other."""
    work = case.work(divergence, detach)
    ours, plain = fused(work), case.plain(work)
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
    weight, states = case.weight.detach(), torch.cat(case.states).detach()
    summands = sum(float(part.weight.sum()) for part in work.parts)
    summands *= max(1.0, float(states.norm(dim=-1).max()), float(weight.norm(dim=-1).max()))
    summands *= max(1.0, float((states @ weight.t()).abs().max()))
    for own, other in zip(gradients(ours, case.leaves), gradients(plain, case.leaves), strict=True):
        assert (own - other).norm() <= tolerance * max(float(other.norm()), summands)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
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
def test_values_and_gradients(
    divergence: str, detach: str, dtype: torch.dtype, tolerance: float, **options: Any
) -> None:
    shape = {key: options.pop(key) for key in ("seed", "positions", "classes", "width")}
    agree(Case(**shape, dtype=dtype, **options), divergence, detach, tolerance)


@pytest.mark.parametrize("divergence", ["kl", "reverse_kl", "symmetric_kl", "js"])
@pytest.mark.parametrize("offset", [-1e4, 1e3])
def test_logits_far_from_zero(divergence: Any, offset: float) -> None:
    """What all classes have in common changes neither a loss nor a divergence, of logits that are the same numbers."""
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randint(-3000, 3000, (2, 6, 500), generator=drawn).float() / 1024  # exact after the offset, too
    labels, ones = torch.randint(0, 500, (6,), generator=drawn), torch.ones(6, dtype=torch.float64)
    head = Projection(torch.zeros(1, 6, 1), torch.zeros(500, 1), None, torch.float32)
    every = torch.arange(6)
    found = []
    for shift in (0.0, offset):
        sides = [LogitSource(head, None, one + shift, every) for one in logits]
        parts = [SmoothedNLL(0, ones, ones > 0), LogitDivergence(0, 1, divergence, "none", ones, ones > 0)]
        fused(FusedObjective(sides, labels, parts, 0.1))
        found.append([part.values for part in parts] + [parts[0].nll])  # type: ignore[attr-defined]
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
        sides = [LogitSource(Projection(one, weight, case.bias, one.dtype)) for one in states]
        gap = LogitDivergence(0, 1, divergence, detach, case.weights[2], case.kept)  # type: ignore[arg-type]
        return fused(
            FusedObjective(sides, case.labels, [SmoothedNLL(1 - (frozen or 0), case.weights[0], case.kept), gap], 0.1)
        )

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
            sides = [
                LogitSource(Projection(one.to(dtype), case.weight.detach().to(dtype), None, dtype))
                for one in (first, second)
            ]
            gap = LogitDivergence(0, 1, divergence, "none", case.weights[0], case.kept)  # type: ignore[arg-type]
            found.append(float(fused(FusedObjective(sides, case.labels, [gap]))))
        assert found[1] == pytest.approx(found[0], rel=2e-3)


def test_an_empty_batch_has_a_loss_of_zero_and_zero_gradients() -> None:
    case = Case(2, 6, 9, 3, torch.float32, padding=1.0)
    loss = fused(case.work("symmetric_kl", "none"))
    assert loss == 0
    assert all((one == 0).all() for one in gradients(loss, case.leaves))


def test_rows_of_a_view() -> None:
    """A view of some rows is found by its places."""
    case = Case(3, 12, 9, 4, torch.float64, padding=0.0)
    taken = torch.tensor([1, 4, 5, 10])
    places = torch.zeros(12, dtype=torch.long)
    places[taken] = torch.arange(4)
    some = case.states[1].detach()[:, taken].requires_grad_()
    where = torch.zeros(12, dtype=torch.bool).index_fill(0, taken, True)
    weight = case.weights[0] * where
    sides = [
        LogitSource(Projection(case.states[0], case.weight, None, torch.float64)),
        LogitSource(Projection(some, case.weight, None, torch.float64), places),
    ]
    fit = SmoothedNLL(0, case.weights[1], case.kept)
    loss = fused(
        FusedObjective(sides, case.labels, [fit, LogitDivergence(0, 1, "symmetric_kl", "none", weight, where)])
    )
    first, second = case.states[0][0] @ case.weight.t(), some[0] @ case.weight.t()
    values = DIVERGENCES["symmetric_kl"](first[taken], second)
    plain = (label_smoothed_nll(first, case.labels)[0] * case.weights[1]).sum() + (values * weight[taken]).sum()
    leaves = [case.weight, case.states[0], some]
    torch.testing.assert_close(loss, plain)
    for own, other in zip(gradients(loss, leaves), gradients(plain, leaves), strict=True):
        torch.testing.assert_close(own, other)


def test_b3_known_logits_stand_for_the_product() -> None:
    """To the rounding of float64: the products have other shapes, and so may have another order of summation."""
    case = Case(4, 11, 13, 4, torch.float64)
    projection = Projection(case.states[0], case.weight, case.bias, torch.float64)
    logits, places = head.known(projection, case.kept.nonzero().squeeze(1))
    assert not logits.requires_grad
    results = []
    for side in (LogitSource(projection), LogitSource(projection, None, logits, places)):
        loss = fused(FusedObjective([side], case.labels, [SmoothedNLL(0, case.weights[0], case.kept)], 0.1))
        results.append((loss, gradients(loss, case.leaves)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_scaled_and_repeated_backward() -> None:
    case = Case(6, 9, 11, 4, torch.float64)
    work = case.work("symmetric_kl", "none")
    once = gradients(fused(work), case.leaves)
    loss = fused(work)
    for factor in (1.0, 3.0, 1.0):
        found = torch.autograd.grad(factor * loss, case.leaves, retain_graph=True)
        for own, other in zip(found, once, strict=True):
            torch.testing.assert_close(own, factor * other, rtol=1e-12, atol=1e-14)


def test_a_second_derivative_is_refused() -> None:
    case = Case(7, 5, 6, 3, torch.float64)
    for loss in (fused(case.work("kl", "none")), squared_norm(case.states[0][0], case.weight, case.weights[0])):
        with pytest.raises(RuntimeError, match="fused=False"):
            torch.autograd.grad(loss, case.states[0], create_graph=True)


def test_frozen_head_and_frozen_body() -> None:
    case = Case(8, 9, 11, 4, torch.float64)
    whole = gradients(fused(case.work("symmetric_kl", "none")), case.leaves)
    case.weight.requires_grad_(False)
    states = gradients(fused(case.work("symmetric_kl", "none")), case.states)
    case.weight.requires_grad_(True)
    for one in case.states:
        one.requires_grad_(False)
    (weight,) = gradients(fused(case.work("symmetric_kl", "none")), [case.weight])
    torch.testing.assert_close(weight, whole[0])
    for own, other in zip(states, whole[2:], strict=True):
        torch.testing.assert_close(own, other)


def test_a_pass_without_grad_has_no_gradient() -> None:
    """Not by its states, and not by the head."""
    case = Case(12, 9, 11, 4, torch.float64)
    first, second = case.states[:2]
    found = []
    for live in (False, True):
        other = LogitSource(Projection(second.detach(), case.weight, None, torch.float64, live))
        gap = LogitDivergence(0, 1, "symmetric_kl", "none" if not live else "second", case.weights[0], case.kept)
        loss = fused(
            FusedObjective(
                [LogitSource(Projection(first, case.weight, None, torch.float64)), other], case.labels, [gap]
            )
        )
        found.append(gradients(loss, [case.weight, first]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def test_bfloat16_products_have_float32_sums() -> None:
    """Within the rounding of bfloat16 products, and with gradients in the types of what they are of."""
    case = Case(9, 40, 64, 16, torch.float32, padding=0.0)
    exact = fused(case.work("symmetric_kl", "none"))
    expected = gradients(exact, case.leaves)
    work = case.work("symmetric_kl", "none")
    sides = [
        side
        if side.projection is None
        else LogitSource(Projection(side.projection.states, case.weight, case.bias, torch.bfloat16))
        for side in work.sides
    ]
    loss = fused(FusedObjective(sides, work.labels, work.parts, 0.1))
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
    ours = 3 * squared_norm(vectors, weight, weights)
    plain = 3 * ((vectors @ weight.t()).square().sum(1) * weights).sum()
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for own, other in zip(gradients(ours, [vectors, weight]), gradients(plain, [vectors, weight]), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda a, b: squared_norm(a, b, weights), (vectors, weight))


def flops(*parts: vocab.Part, sides: int, case: Case, head_grad: bool = True, known: bool = False) -> float:
    """Head products of one call and its backward."""
    of = [Projection(case.states[k], case.weight, None, torch.float32) for k in range(sides)]
    logits = head.known(of[0], case.kept.nonzero().squeeze(1)) if known else None
    with FlopCounterMode(display=False) as counter:
        views = [
            LogitSource(one, None, *logits) if k == 0 and logits is not None else LogitSource(one)
            for k, one in enumerate(of)
        ]
        fused(FusedObjective(views, case.labels, list(parts), 0.1), head_grad=head_grad).backward()
    return counter.get_total_flops() / (2 * int(case.kept.sum()) * case.weight.numel())


def test_work_that_is_left_out() -> None:
    """Head products in units of one over the positions that count: padding, held sides, known logits, ascents."""
    case = Case(10, 40, 30, 8, torch.float32, bias=False, padding=0.25)
    w, kept = case.weights, case.kept
    assert 0.5 < kept.float().mean() < 0.9  # nothing is computed for the rest
    assert flops(SmoothedNLL(0, w[0], kept), sides=1, case=case) == 3
    assert flops(SmoothedNLL(0, w[0], kept), LogitDivergence(0, 1, "kl", "none", w[1], kept), sides=2, case=case) == 6
    assert flops(SmoothedNLL(0, w[0], kept), LogitDivergence(0, 1, "kl", "second", w[1], kept), sides=2, case=case) == 4
    assert flops(LogitDivergence(0, 1, "kl", "first", w[1], kept), sides=2, case=case, head_grad=False) == 3
    assert flops(LogitDivergence(0, 1, "kl", "first", w[1], kept), sides=2, case=case, head_grad=False, known=True) == 2
    assert (
        flops(SmoothedNLL(0, w[0], kept), SmoothedNLL(0, -w[0], kept), SmoothedNLL(1, w[1], kept), sides=2, case=case)
        == 6
    )
