"""What tests take of an evaluation by hand."""

from __future__ import annotations

from torch import Tensor

from seqreg import Context, Evaluation, LossReport, Pass
from seqreg.losses import Base
from seqreg.objective import BaseLoss, base_loss


def plain_loss(ctx: Context, view: Pass | None, label_smoothing: float = 0.0) -> Tensor:
    """The base loss of a pass, from its logits."""
    assert view is not None
    evaluation = Evaluation(ctx, Base(label_smoothing))
    return evaluation.reduce(base_loss(view, evaluation)[0])


def without_base(ctx: Context, report: LossReport) -> Tensor:
    """What the terms alone add to a loss without label smoothing."""
    assert report.clean is not None
    return report.total - BaseLoss(report.clean).value(Evaluation(ctx))
