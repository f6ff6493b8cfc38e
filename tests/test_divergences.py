from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqreg import divergences
from seqreg.divergences import DIVERGENCES

# Those that only reproduce released code are held against its numbers in test_golden_adversarial.py.
PROPER = ["symmetric_kl", "kl", "reverse_kl", "js", "mse"]


def by_hand(name: str, first: list[float], second: list[float]) -> float:
    p = [math.exp(x) / sum(math.exp(y) for y in first) for x in first]
    q = [math.exp(x) / sum(math.exp(y) for y in second) for x in second]
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    return {
        "kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "symmetric_kl": kl(p, q) + kl(q, p),
        "js": (kl(p, m) + kl(q, m)) / 2,
        "mse": sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) / len(first),
    }[name]


@pytest.mark.parametrize("name", PROPER)
@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
def test_value(name: str, spread: float) -> None:
    first, second = torch.randn(2, 3, 6, dtype=torch.float64) * spread
    values = DIVERGENCES[name](first, second)  # type: ignore[index]
    for row in range(3):
        assert values[row] == pytest.approx(by_hand(name, first[row].tolist(), second[row].tolist()), rel=1e-9)


@pytest.mark.parametrize("name", PROPER)
@pytest.mark.parametrize("spread", [0.05, 4.0])
def test_gradient_on_both_sides(name: str, spread: float) -> None:
    first, second = (torch.randn(2, 5, dtype=torch.float64) * spread for _ in range(2))
    function: Callable[[Tensor, Tensor], Tensor] = DIVERGENCES[name]  # type: ignore[index]
    assert torch.autograd.gradcheck(function, (first.requires_grad_(), second.requires_grad_()))


@pytest.mark.parametrize("name", PROPER)
@pytest.mark.parametrize("size", [1e-2, 1e-3])
def test_small_values_survive_float32(name: str, size: float) -> None:
    """Near agreement float32 gives the float64 answer; two `kl_div` calls would be off by orders of magnitude."""
    first = torch.randn(64, 1000)
    second = first + size * torch.randn(64, 1000)
    exact = DIVERGENCES[name](first.double(), second.double()).sum()  # type: ignore[index]
    value = DIVERGENCES[name](first, second).sum()  # type: ignore[index]
    assert value.item() == pytest.approx(exact.item(), rel=2e-3)


@pytest.mark.parametrize("name", PROPER)
def test_extremes_are_finite_in_value_and_gradient(name: str) -> None:
    first = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    second = torch.tensor([[-200.0, 0.0, 200.0]], requires_grad=True)
    value = DIVERGENCES[name](first, second).sum()  # type: ignore[index]
    gradients = torch.autograd.grad(value, (first, second))
    assert torch.isfinite(value)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_js_is_bounded_by_log_two() -> None:
    far = divergences.js(torch.tensor([[60.0, 0.0]]), torch.tensor([[0.0, 60.0]]))
    assert far.item() == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    first, second = torch.randn(2, 4, 9).to(dtype)
    assert DIVERGENCES[name](first, second).dtype == torch.float32  # type: ignore[index]
