"""Anchor: do not move far from a reference, the model that training started from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from seqreg.context import Evaluation, Positions
from seqreg.divergences import Divergence
from seqreg.errors import BadInput
from seqreg.forward import Dropout, ExtraPass, Pass
from seqreg.fused.block import Block
from seqreg.fused.loss import Values
from seqreg.losses import IGNORE, at_least_float32, label_smoothed_nll
from seqreg.objective import Consistency, Part
from seqreg.overrides import MovingAverage, distance, moved_buffers, start_weights
from seqreg.schedules import Weight
from seqreg.term import ConsistencyTerm, Cost, Hints, Passes


@dataclass(frozen=True, kw_only=True)
class Anchor(ConsistencyTerm):
    """A penalty on the distance to a reference: the output, or the weights, of the model that training started from.

    Formula:
        with p_ref the reference's output, held fixed, and p the model's, at every position:
        kl            KL(p_ref || p), "forward": the official ASFT code, LLaMA-Factory
        reverse_kl    KL(p || p_ref), "reverse": the penalty of RLHF
        symmetric_kl  KL(p_ref || p) + KL(p || p_ref)
        js            Jensen-Shannon of p_ref and p
        mse           of the raw outputs, for a regression head
        k3            r - 1 - log r with r = p_ref(y) / p(y) for the label y alone (NeMo-RL)
        l2            |w - w_ref|^2 / 2 over the trained weights, in place of outputs (L2-SP; its decay of new weights,
                      as we recall it, is left to the optimizer)

    Args:
        weight: 0.1, the default of the official ASFT code and of LLaMA-Factory
        divergence: see the formula
        reference: "start", a copy of the trained weights when training begins, part of `Criterion.state_dict`;
            "average", a moving average of them, as `bregman` keeps; or a folder that `save_pretrained` wrote, of a
            model that computes the same function of the same parameters. With PEFT adapters the start is the model
            with adapters switched off: nothing is copied but what is trained besides adapters (biases)
        beta: momentum of the average
        positions: "labels" counts positions with a label; "all" every real target position (also those of a prompt)
        dropout: of the reference's pass: "off" (evaluation mode), as in the official ASFT code and LLaMA-Factory,
            "shared" with the model's own pass, or "independent". The model's own pass is the clean one, in training
            mode: with dropout in the model, "off" and "independent" also ask for the same output under dropout
        per: averaged per "token" or per "sequence"
        head: with "l2", also hold the head of a classifier, which fine-tuning usually begins with at random
        preset: "asft_official", "llamafactory", "nemo_rl" or "asft_paper": the divergence of each ASFT, together with
            `Criterion(loss="dft")`. Of the paper we read the abstract alone: that it has the reverse KL is what a user
            of its code reads in its section 5.3 (issue 3 there). The weights of paper and NeMo-RL are not known to us

    Cost:
        1 extra forward without a graph, no backward; "l2" none. Memory: one copy of the trained parameters in their own
        precision (reference="average": in float32); none with adapters.

    Differs from:
        the official ASFT code and LLaMA-Factory divide by the labels of a micro-batch and hold all logits of both
        models; here the mean is over the labels of the whole optimizer step. With accumulation their gradient grows
        with the number of micro-batches; without it the numbers are the same. NeMo-RL's ASFT, as far as its pull
        request can be read, estimates the reverse KL from the label, which is a sample of the data and not of the
        model; whether it clamps the ratio, as NeMo-RL does elsewhere, we could not see: here it is not clamped.

    References:
        Zhu et al., Anchored Supervised Fine-Tuning, arXiv 2509.23753; Li et al., Explicit Inductive Bias for Transfer
        Learning with Convolutional Networks, arXiv 1802.01483 (L2-SP)

    Example:
        >>> from seqreg import Criterion
        >>> from seqreg.terms.anchor import Anchor
        >>> asft = Criterion(Anchor(preset="asft_official"), loss="dft")
        >>> Anchor(divergence="l2").cost
        Cost(forwards=0, backwards=0)
    """

    weight: Weight = 0.1
    divergence: Literal["kl", "reverse_kl", "symmetric_kl", "js", "mse", "k3", "l2"] = "kl"
    reference: str = "start"
    beta: float = 0.999
    positions: Positions = "labels"
    dropout: Dropout = "off"
    per: Literal["token", "sequence"] = "token"
    head: bool = False

    stateful: ClassVar[bool] = True
    hints: ClassVar[Hints] = Hints(starts_at_zero=True)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "asft_official": {"divergence": "kl", "weight": 0.1},
        "llamafactory": {"divergence": "kl", "weight": 0.1},
        "nemo_rl": {"divergence": "k3"},
        "asft_paper": {"divergence": "reverse_kl"},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < 1:
            self.refuse("beta", "expected a number in (0, 1): at 0 the average is the model itself")
        if self.reference not in ("start", "average") and not os.path.isdir(self.reference):
            self.refuse("reference", "expected 'start', 'average', or a folder that save_pretrained wrote")
        if self.positions == "all" and self.divergence in ("k3", "l2"):
            reason = "k3 is of labels" if self.divergence == "k3" else "l2 is of weights"
            self.refuse("positions", f"{reason}, and has no other positions: use positions='labels'")
        if self.on != "labelled" and self.divergence in ("k3", "l2"):
            self.refuse("on", f"divergence={self.divergence!r} counts on no texts without labels: use divergence='kl'")
        if self.head and self.divergence != "l2":
            self.refuse("head", "it is for divergence='l2', which is of weights: leave it out")

    @property
    def cost(self) -> Cost:
        return Cost(0 if self.divergence == "l2" else 1, 0)

    def prepare(self, ctx: Evaluation) -> None:
        """The start is that of training, also where a schedule begins later."""
        if self.reference == "start" and self.name not in ctx.memory:
            self._weights(ctx)

    def declare(self, ctx: Evaluation) -> Passes:
        if self.divergence == "l2":
            return Passes(other_weights=True)
        return Passes(self._of_reference(ctx, self.dropout))

    def _of_reference(self, ctx: Evaluation, dropout: Dropout) -> ExtraPass:
        adapters = self.reference == "average"  # any other reference has no adapters
        return ExtraPass(dropout=dropout, grad=False, weights=partial(self._weights, ctx), adapters=adapters)

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Part | Tensor:
        if self.divergence == "l2":
            return self._half_squared_distance(ctx)
        return self._part(passes[0], ctx.clean)

    def _part(self, view: Pass, own: Pass) -> Part:
        """The divergence of a pass of the model from the reference's."""
        if self.divergence == "k3":
            return LabelRatio(view, own, self.per)
        name = cast("Divergence", self.divergence)  # l2 has no pass
        return Consistency(view, own, name, "first", self.per, positions=self.positions)

    def diagnostics(self, ctx: Evaluation) -> dict[str, float]:
        """Numbers about the reference.

        drift: the value where neither model nor reference has dropout; what the term has besides is dropout's.
        distance: how far the trained weights are from the reference's, |w - w_ref| / |w|; not with adapters.
        """
        numbers = {}
        if self.divergence != "l2":
            numbers["drift"] = float(self._part(ctx.run(self._of_reference(ctx, "off")), ctx.eval_view).value(ctx))
        if not ctx.forward.adapters:
            numbers["distance"] = distance(ctx.forward.trained(), self._weights(ctx))
        return numbers

    def _weights(self, ctx: Evaluation) -> Mapping[str, Tensor]:
        """The reference's parameters by name, as far as they are not the model's own."""
        forward = ctx.forward
        if forward.engine == "FSDP2" and self.divergence == "l2":
            self.refuse("divergence", "under FSDP2 its gradient would miss the shares of other ranks: use 'kl', or DDP")
        if forward.adapters and self.divergence == "l2":
            self.refuse("divergence", "the weights that are trained are those of adapters, not the model's: use 'kl'")
        if self.reference == "average":
            average = MovingAverage(self.beta, self.beta)
            return average(ctx.memory, self.name, forward.trained(), ctx.step, module=forward.module)
        if self.reference == "start":
            with forward.without_adapters():
                parameters = forward.trained()
            if self.name not in ctx.memory and ctx.step and parameters:
                ctx.notes[self.name] = (
                    f"its reference is the model at step {ctx.step}, where it was first used: to resume a run, load "
                    "Criterion.state_dict() of its checkpoint"
                )
            if buffers := moved_buffers(forward.module):
                _ = ctx.clean  # the pass of the step that moves them
            return start_weights(ctx.memory, self.name, parameters, buffers)
        if forward.adapters:
            self.refuse("reference", "with adapters the reference is the model they were put on: use 'start'")
        try:
            return forward.saved_weights(self.reference)
        except BadInput as error:
            self.refuse("reference", str(error))

    def _half_squared_distance(self, ctx: Evaluation) -> Tensor:
        """The mean over an optimizer step: every micro-batch on every rank adds its share."""
        others = self._weights(ctx)
        free = set() if self.head else ctx.forward.head_parameters()
        held = {name: parameter for name, parameter in ctx.forward.trained().items() if name not in free}
        parts = [_HalfSquaredDistance.apply(parameter, others[name]) for name, parameter in held.items()]  # type: ignore[no-untyped-call]
        if not parts:
            self.refuse("divergence", "no parameter of the model is trained but its head: there is nothing to hold")
        total: Tensor = torch.stack(parts).sum() * ctx.share
        return total


class _HalfSquaredDistance(torch.autograd.Function):
    """|w - w_ref|^2 / 2 of one parameter; its gradient is w - w_ref, computed when it is asked for, and not kept."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, other: Tensor) -> Tensor:
        ctx.save_for_backward(parameter, other)
        return _difference(parameter, other).square_().sum() / 2

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        parameter, other = ctx.saved_tensors
        return _difference(parameter, other).mul_(upstream).to(parameter.dtype), None


def _difference(parameter: Tensor, other: Tensor) -> Tensor:
    return at_least_float32(parameter.detach()) - other.detach().to(parameter.device)


@dataclass(frozen=True, eq=False)
class LabelRatio(Part):
    """r - 1 - log r with r = p_ref(y) / p(y), for the label y: an estimate of KL(p || p_ref) if y were drawn from p."""

    reference: Pass
    view: Pass
    per: Literal["token", "sequence"] = "token"

    @property
    def passes(self) -> tuple[Pass, ...]:
        return self.reference, self.view

    @property
    def learning(self) -> tuple[Pass, ...]:
        return (self.view,)

    def check(self, ctx: Evaluation) -> None:
        if ctx.kind == "regression":
            raise BadInput(
                "divergence='k3' is of the probability of a label, which a regression head has not: use 'mse'"
            )

    def weights(self, ctx: Evaluation) -> Tensor:
        return ctx.weights(self.per)

    def from_logits(self, ctx: Evaluation) -> Values:
        own, others = (label_smoothed_nll(view.logits, ctx.labels)[1] for view in (self.view, self.reference))
        ratio = own - others.detach()  # log r
        return (torch.expm1(ratio) - ratio).masked_fill(ctx.labels == IGNORE, 0.0), None

    def from_block(self, block: Block, weight: Tensor | None) -> Values:
        labels = block.labels.clamp_min(0).unsqueeze(1)
        own, others = (
            block.tops[view] - block.logits[view].gather(1, labels) + block.norms[view]
            for view in (self.view, self.reference)
        )
        ratio = own - others  # [n, 1]
        if weight is not None and self.view in block.learning:  # d/dlogits = (1 - r) (onehot - p)
            gradient = block.probabilities[self.view] * (weight * torch.expm1(ratio))
            block.add_gradient(self.view, gradient.scatter_add_(1, labels, -weight * torch.expm1(ratio)))
        return (torch.expm1(ratio) - ratio).squeeze(1), None
