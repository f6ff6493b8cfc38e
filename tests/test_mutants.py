"""Errors of one part in 10^5 that are put into the mathematics on purpose: the tests of it must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqreg import divergences
from seqreg.context import Evaluation
from seqreg.forward import Pass
from seqreg.fused.block import Block
from seqreg.objective import Consistency
from tests import test_context, test_divergences
from tests.fused import test_loss

ERROR = 1 + 1e-5


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, **settings: ERROR * function(*values, **settings)


def agree() -> None:
    test_loss.agree(test_loss.Case(1, 9, 11, 4, torch.float64), "symmetric_kl", "none")


@pytest.fixture(autouse=True)
def _sound() -> None:
    """Without an error all these tests pass."""
    agree()
    test_divergences.test_value("kl", 1.0)
    test_context.test_reduce_is_a_mean_over_labels_or_rows()


def test_an_error_in_a_divergence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(divergences.DIVERGENCES, "kl", scaled(divergences.kl))
        with pytest.raises(AssertionError):
            test_divergences.test_value("kl", 1.0)
    plain = Consistency.from_block

    def from_block(self: Consistency, block: Block, weight: Tensor | None) -> Any:
        return ERROR * plain(self, block, weight)[0], None

    monkeypatch.setattr(Consistency, "from_block", from_block)
    with pytest.raises(AssertionError, match="rounding explains"):
        agree()


def test_an_error_in_a_reduction_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluation, "_factor", scaled(Evaluation._factor))
    with pytest.raises(AssertionError):
        test_context.test_reduce_is_a_mean_over_labels_or_rows()


def test_an_error_in_a_gradient_of_the_fused_loss_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Block.add_gradient

    def add_gradient(self: Block, view: Pass, gradient: Tensor) -> None:
        plain(self, view, ERROR * gradient)

    monkeypatch.setattr(Block, "add_gradient", add_gradient)
    with pytest.raises(AssertionError, match="rounding explains"):
        agree()
