"""The fused loss: head product, softmax, values and gradients in chunks of tokens; see README.md in this folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from seqreg.errors import BadInput
from seqreg.forward import Pass
from seqreg.fused.block import Block
from seqreg.fused.block_sizes import ROWS
from seqreg.fused.head import LinearHead, Projection, refuse_second_derivative
from seqreg.losses import Base

LEAST_ROWS = 256
"""Where a pass learns nothing, a small batch is cut too, so that no more is held than without it; not below this."""

Values = tuple[Tensor, Tensor | None]
"""The loss of every position, and its plain negative log-likelihood where it is of labels; [n] each."""


class FusedPart(Protocol):
    """What the chunk loop asks of a part of the loss: see `seqreg.objective.Part`."""

    @property
    def passes(self) -> tuple[Pass, ...]: ...

    @property
    def learning(self) -> tuple[Pass, ...]: ...

    def from_block(self, block: Block, weight: Tensor | None) -> Values: ...


@dataclass(frozen=True)
class Summand:
    """A part of the loss, and what every position counts in it.

    Args:
        weight: of every position; None for a part that is evaluated without a gradient    # [B, T]
        where: the positions that are evaluated                     # [B, T]
    """

    part: FusedPart
    weight: Tensor | None
    where: Tensor


@dataclass(frozen=True)
class LogitSource:
    """Where the logits of a pass come from: a projection, or constant logits, or both (logits computed early).

    Args:
        state_index: the row of every position in the states; None where it is its number    # [P]
        logits: constant, or computed early                         # [n, V]
        logit_index: the row of every position in the logits        # [P]
    """

    projection: Projection | None
    state_index: Tensor | None = None
    logits: Tensor | None = None
    logit_index: Tensor | None = None

    @classmethod
    def of(cls, view: Pass, shape: torch.Size, needed: Tensor) -> LogitSource:
        """The source for a pass in a batch of this shape, of which some positions are needed, [P]."""
        projection, index = view.deferred, None
        if view.rows is not None:  # the pass is of some rows of the batch
            positions = torch.arange(shape.numel(), device=needed.device).view(shape)[view.rows].flatten()
            index = torch.zeros_like(needed, dtype=torch.long)
            index[positions] = torch.arange(len(positions), device=index.device)
        else:
            size = view.logits.shape if projection is None else (*projection.states.shape[:-1], len(projection.weight))
            if size[:-1] != shape:
                raise BadInput(f"labels {list(shape)} do not fit logits {list(size)}: one label per position")
        if projection is None:
            return cls(None, index, view.logits.detach().flatten(0, -2), index)
        if view.early_logits is not None:
            logits, logit_index, covered = view.early_logits
            if not (needed & ~covered).any():
                return cls(projection, index, logits, logit_index)
        return cls(projection, index)


class FusedObjective:
    """All that one call computes.

    Args:
        summands: those of their passes that learn share one head; others may have one of their own (other weights), or
            constant logits
        labels: of every position; any number where no base loss is evaluated    # [B, T]
    """

    def __init__(self, summands: Sequence[Summand], labels: Tensor, base: Base) -> None:
        self.summands, self.labels, self.base = summands, labels.flatten(), base
        self.needed = {
            view: torch.zeros_like(self.labels, dtype=torch.bool) for s in summands for view in s.part.passes
        }
        """The positions where the logits of a pass are needed, [P]."""
        for summand in summands:
            for view in summand.part.passes:
                self.needed[view] |= summand.where.flatten()
        self.sources = {view: LogitSource.of(view, labels.shape, needed) for view, needed in self.needed.items()}
        self.projections = {view: source.projection for view, source in self.sources.items()}
        projections = [projection for projection in self.projections.values() if projection is not None]
        self.head = next((one for one in projections if one.requires_grad), projections[0])
        """That of the passes that learn."""

    def gather(self) -> None:
        """Make the heads of all passes whole, where an engine frees them between passes."""
        for projection in self.projections.values():
            if projection is not None:
                projection.whole()

    def groups(self) -> Iterator[tuple[Tensor, list[Pass]]]:
        """Positions that need the logits of the same passes, together with those passes."""
        pattern = sum(
            (needed.long() << k for k, needed in enumerate(self.needed.values())), torch.zeros_like(self.labels)
        )
        for code in torch.unique(pattern).tolist():  # waits for the device, as `nonzero` does: chunks have sizes
            if code:
                yield (
                    (pattern == code).nonzero().squeeze(1),
                    [view for k, view in enumerate(self.needed) if code >> k & 1],
                )


def fused_loss(
    summands: Sequence[Summand], labels: Tensor, base: Base, *, head_grad: bool = True, retain_graph: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """The weighted sum of all parts, a scalar to call `backward` on, and the values and plain NLL of each, [2, B, T].

    Its gradient cannot be differentiated again.

    Args:
        summands, labels, base: see `FusedObjective`
        head_grad: False leaves out the gradient of the head, for which an ascent has no use
        retain_graph: there will be several backwards through a retained graph; otherwise they compute everything anew
    """
    objective = FusedObjective(summands, labels, base)
    objective.gather()
    weight, bias = objective.head.weight, objective.head.bias
    if not head_grad:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    states = (None if projection is None else projection.states for projection in objective.projections.values())
    results: list[Tensor] = []
    inputs = (weight, bias, *states)
    total: Tensor = _FusedLoss.apply(objective, results, retain_graph, torch.is_grad_enabled(), *inputs)  # type: ignore[no-untyped-call]
    return total, [result.view(2, *labels.shape) for result in results]


class _FusedLoss(torch.autograd.Function):
    """Gradients are computed in the forward pass, and handed over in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, objective: FusedObjective, results: list[Tensor], retain_graph: bool, grad: bool,
        weight: Tensor, bias: Tensor | None, *states: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.objective, ctx.retain_graph = objective, retain_graph
        ctx.needs_grad = ctx.needs_input_grad[4:] if grad else (False,) * (2 + len(states))
        ctx.save_for_backward(weight, bias)
        loop = _ChunkLoop(objective, weight, bias, ctx.needs_grad)
        total, ctx.gradients = loop.run()
        results += loop.results
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative()
        weight, bias = ctx.saved_tensors
        gradients = ctx.gradients
        if gradients is None:  # a second backward through a retained graph
            ctx.objective.gather()
            gradients = _ChunkLoop(ctx.objective, weight, bias, ctx.needs_grad).run()[1]
        if ctx.retain_graph:
            gradients = [None if gradient is None else gradient * upstream for gradient in gradients]
        else:
            ctx.gradients = None  # handed over, so that autograd may add to them in place
            gradients = [None if gradient is None else gradient.mul_(upstream) for gradient in gradients]
        dtypes = [weight.dtype] * 2 + [
            torch.float32 if each is None else each.states.dtype for each in ctx.objective.projections.values()
        ]
        narrow = (None if each is None else each.to(dtype) for each, dtype in zip(gradients, dtypes, strict=True))
        return (None, None, None, None, *narrow)


class _ChunkLoop:
    """One run through the tokens of a batch.

    Args:
        needs_grad: whether weight, bias, and the states of every pass need a gradient
    """

    def __init__(
        self, objective: FusedObjective, weight: Tensor, bias: Tensor | None, needs_grad: Sequence[bool]
    ) -> None:
        self.objective = objective
        self.head = LinearHead(weight, bias, objective.head.dtype, (*needs_grad[:2], any(needs_grad[2:])))
        self.heads = self._heads()
        self.results = [
            weight.new_zeros((2, len(objective.labels)), dtype=self.head.sum_dtype) for _ in objective.summands
        ]
        moved = {view for summand in objective.summands if summand.weight is not None for view in summand.part.learning}
        self.states = {
            view: projection.states.detach().flatten(0, -2)
            for view, projection in objective.projections.items()
            if projection is not None
        }
        self.learning: set[Pass] = set()
        """The passes whose logits get a gradient."""
        self.states_grads: dict[Pass, Tensor] = {}
        for (view, projection), needed in zip(objective.projections.items(), needs_grad[2:], strict=True):
            if projection is not None and projection.requires_grad and view in moved and any((*needs_grad[:2], needed)):
                self.learning.add(view)
                if needed:
                    states = projection.states  # of any strides (fairseq's are transposed); the gradient is contiguous
                    self.states_grads[view] = torch.zeros(states.shape, dtype=self.head.sum_dtype, device=states.device)

    def _heads(self) -> dict[Pass, LinearHead]:
        """The head of every pass that has one: passes with other weights share theirs, which gets no gradient."""
        heads: dict[Pass, LinearHead] = {}
        shared = [(self.objective.head, self.head)]
        for view, projection in self.objective.projections.items():
            if projection is not None:
                head = next((head for one, head in shared if projection.same_head(one)), None)
                if head is None:
                    head = LinearHead(projection.weight, projection.bias, projection.dtype)
                    shared.append((projection, head))
                heads[view] = head
        return heads

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, and the gradients of weight, bias and the states of every pass; fills in the results."""
        head = self.head
        with torch.autocast(head.weight.device.type, enabled=False):  # the products say themselves what they are in
            for positions, passes in self.objective.groups():
                most = ROWS if self.learning.issuperset(passes) else min(ROWS, max(len(positions) // 2, LEAST_ROWS))
                for chunk in torch.split(positions, max(1, most // len(passes))):
                    self.chunk(chunk, passes)
        total = head.weight.new_zeros((), dtype=head.sum_dtype)
        for summand, (values, _) in zip(self.objective.summands, self.results, strict=True):
            if summand.weight is not None:
                total = total + (summand.weight.flatten().to(values.dtype) * values).sum()
        states_grads = (self.states_grads.get(view) for view in self.objective.sources)
        return total, [head.weight_grad, head.bias_grad, *states_grads]

    def chunk(self, positions: Tensor, passes: Sequence[Pass]) -> None:
        """Some positions, all of which need the logits of these passes."""
        head, sources, size = self.head, self.objective.sources, len(positions)
        learning = [view for view in passes if view in self.learning]
        passes = [*learning, *(view for view in passes if view not in self.learning)]
        buffer = head.logits_buffer(len(passes) * size)  # those that learn come first, side by side
        logits = dict(zip(passes, torch.split(buffer, size), strict=True))  # [size, V] each
        states: dict[Pass, Tensor] = {}
        for view, source in ((view, sources[view]) for view in passes):
            if source.projection is not None:
                states[view] = self.states[view][_rows(source.state_index, positions)].to(self.heads[view].dtype)
            if source.logits is None:
                self.heads[view].project(states[view], logits[view])
            else:
                logits[view].copy_(source.logits[_rows(source.logit_index, positions)])
        step = max(1, head.blocks.cells // len(head.weight))
        for start in range(0, size, step):
            some = {view: scores[start : start + step] for view, scores in logits.items()}
            self.block(positions[start : start + step], some, learning)
        if learning:  # the buffer now holds gradients in place of logits
            all_states = torch.cat([states[view] for view in learning])
            states_grad = head.accumulate_grads(buffer[: len(all_states)], all_states)
            for k, view in enumerate(learning):
                if states_grad is not None and view in self.states_grads:
                    rows, grad = _rows(sources[view].state_index, positions), states_grad[k * size : (k + 1) * size]
                    self.states_grads[view].view(-1, grad.shape[-1])[rows] = grad.to(head.sum_dtype)

    def block(self, positions: Tensor, logits: Mapping[Pass, Tensor], learning: Collection[Pass]) -> None:
        """Values of a few positions, and the gradients of their logits in place of these."""
        block = Block(self.objective.labels[positions], self.objective.base, logits, learning)
        for summand, result in zip(self.objective.summands, self.results, strict=True):
            if logits.keys() >= set(summand.part.passes):
                weight = None if summand.weight is None else summand.weight.view(-1, 1)[positions].to(result.dtype)
                for row, values in zip(result, summand.part.from_block(block, weight), strict=True):
                    if values is not None:
                        row[positions] = values.masked_fill(~summand.where.view(-1)[positions], 0.0)
        block.write_gradients()


def _rows(index: Tensor | None, positions: Tensor) -> Tensor:
    return positions if index is None else index[positions]
