from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from seqreg import BadInput, Context, Count, Evaluation
from seqreg.losses import IGNORE
from tests.helpers.stubs import Played


def make(labels: torch.Tensor, count: Count | None = None) -> Evaluation:
    return Evaluation(Context(Played(), labels, kind="tokens", count=count))


def test_reduce_is_a_mean_over_labels_or_rows() -> None:
    labels = torch.tensor([[1, 2, IGNORE], [3, IGNORE, IGNORE]])
    values = torch.tensor([[1.0, 2.0, 100.0], [4.0, 100.0, 100.0]])
    ctx = make(labels)
    assert ctx.reduce(values) == pytest.approx(7 / 3)
    assert ctx.reduce(values, per="sequence") == pytest.approx(7 / 2)
    assert ctx.reduce(values, per="fairseq", padding=True) == pytest.approx(307 / 2)


def test_pieces_of_a_batch_add_up() -> None:
    labels = torch.tensor([[1, 2, 5], [3, IGNORE, IGNORE], [4, 4, IGNORE]])
    values = torch.rand(3, 3)
    for per in ("token", "sequence"):
        whole = make(labels).reduce(values, per=per)  # type: ignore[arg-type]
        count = Count(6.0, 3.0)
        pieces = [make(labels[i : i + 1], count).reduce(values[i : i + 1], per=per) for i in range(3)]  # type: ignore[arg-type]
        assert sum(pieces) == pytest.approx(whole.item())
        averaged = [
            make(labels[i : i + 1], Count(6.0, 3.0, grad_divisor=3)).reduce(values[i : i + 1], per=per)  # type: ignore[arg-type]
            for i in range(3)
        ]
        assert sum(averaged) / 3 == pytest.approx(whole.item())


def test_fairseq_mixes_micro_batches_by_their_share_of_labels() -> None:
    """sum over micro-batches of (KL / rows * labels), over all labels, as fairseq's trainer does."""
    labels = torch.tensor([[1, 2, 5, 5], [3, IGNORE, IGNORE, IGNORE]])
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0], [10.0, 10.0, 10.0, 10.0]])
    count = Count(5.0, 2.0)
    pieces = [make(labels[i : i + 1], count).reduce(values[i : i + 1], per="fairseq", padding=True) for i in range(2)]
    assert sum(pieces) == pytest.approx((4 * 4 + 40 * 1) / 5)


def test_no_label_at_all_gives_zero_with_a_gradient() -> None:
    values = torch.rand(2, 3, requires_grad=True)
    for per in ("token", "sequence", "fairseq"):
        total = make(torch.full((2, 3), IGNORE)).reduce(values, per=per)  # type: ignore[arg-type]
        assert total == 0
        (gradient,) = torch.autograd.grad(total, values)
        assert (gradient == 0).all()


def test_half_precision_is_summed_in_float32() -> None:
    values = torch.full((1, 70_000), 1.0, dtype=torch.float16)
    total = make(torch.zeros(1, 70_000, dtype=torch.long), Count(1.0, 1.0)).reduce(values)
    assert total.dtype == torch.float32
    assert total == 70_000


def test_shared_dropout_needs_a_clean_pass_first() -> None:
    with pytest.raises(RuntimeError, match="none has been made alone"):
        make(torch.zeros(1, 1, dtype=torch.long)).forward(dropout="shared")


def test_a_context_is_not_changed() -> None:
    ctx = Context(Played(), torch.zeros(1, 1, dtype=torch.long), kind="tokens")
    for name in ("step", "count", "labels"):
        with pytest.raises(FrozenInstanceError):
            setattr(ctx, name, None)
        with pytest.raises(FrozenInstanceError):
            setattr(Evaluation(ctx), name, None)
    assert replace(ctx, step=3).step == 3
    unlabelled = Context(Played(), None, kind="tokens", mask=torch.ones(1, 2, dtype=torch.bool))
    assert not replace(unlabelled, step=3).labelled
    assert replace(unlabelled, step=3).mask.all()


def test_sites() -> None:
    ctx = make(torch.zeros(1, 1, dtype=torch.long))
    assert ctx.sites("input") == ("encoder",)
    with pytest.raises(BadInput, match="this model has only encoder"):
        ctx.sites("decoder")
