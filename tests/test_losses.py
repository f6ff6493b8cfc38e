from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from seqreg.losses import IGNORE, label_smoothed_nll, squared_error


def by_hand(logits: list[float], label: int, e: float, smoothing: str) -> float:
    """Cross-entropy with the smoothed target distribution, in plain Python."""
    log_total = math.log(sum(math.exp(x) for x in logits))
    size = len(logits)
    other = e / size if smoothing == "torch" else e / (size - 1)
    own = 1 - other * (size - 1)
    return -sum((own if i == label else other) * (x - log_total) for i, x in enumerate(logits))


@pytest.mark.parametrize("smoothing", ["torch", "fairseq"])
@pytest.mark.parametrize("e", [0.0, 0.1, 0.7])
def test_value_is_the_cross_entropy_with_the_smoothed_target(smoothing: str, e: float) -> None:
    logits = torch.randn(2, 3, 7, dtype=torch.float64)
    labels = torch.randint(0, 7, (2, 3))
    loss, nll = label_smoothed_nll(logits, labels, e, smoothing)  # type: ignore[arg-type]
    for row in range(2):
        for position in range(3):
            scores, label = logits[row, position].tolist(), int(labels[row, position])
            assert loss[row, position] == pytest.approx(by_hand(scores, label, e, smoothing), rel=1e-12)
            assert nll[row, position] == pytest.approx(by_hand(scores, label, 0.0, smoothing), rel=1e-12)


def test_torch_smoothing_is_torchs_own_value_and_gradient() -> None:
    logits = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 2, IGNORE, 4, 0])
    ours = label_smoothed_nll(logits, labels, 0.1, "torch")[0].sum()
    theirs = functional.cross_entropy(logits, labels, label_smoothing=0.1, reduction="sum")
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    (mine,), (other,) = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_ignored_positions_give_zero_and_no_gradient_even_beside_infinities() -> None:
    logits = torch.randn(2, 5)
    logits[1] = float("inf")
    logits.requires_grad_()
    loss = label_smoothed_nll(logits, torch.tensor([3, IGNORE]), 0.1)[0]
    assert loss[1] == 0
    loss.sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad[0]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_reduced_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 50265).to(dtype)
    loss = label_smoothed_nll(logits, torch.tensor([3, 5]), 0.1)[0]
    reference = label_smoothed_nll(logits.double(), torch.tensor([3, 5]), 0.1)[0]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=0)


def test_regression_does_not_broadcast() -> None:
    outputs, labels = torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 5.0])
    assert squared_error(outputs, labels).tolist() == [1.0, 9.0]
