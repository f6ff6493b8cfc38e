"""One batch seen through one model.

A `Context` holds one batch. An `Evaluation` is one call of a criterion on it: it owns the passes that terms share, and
is the only place that reduces.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from seqreg.errors import BadInput
from seqreg.forward import Dropout, ExtraPass, Forward, Pass, Perturbation
from seqreg.losses import IGNORE, Base, at_least_float32
from seqreg.overrides import Memory

Per = Literal["token", "sequence", "fairseq", "sum"]
Positions = Literal["labels", "all"]
"""The positions that count: those with a label, or all real target positions (`Forward.targets`)."""
Stream = Literal["labelled", "unlabelled", "replay"]
"""Where the examples of a batch come from: the new task, texts without labels, or labelled examples of an old task."""
On = Literal["labelled", "unlabelled", "both"]
"""The examples that a term counts on: those with labels (old ones too), those without, or all."""
Where = Literal["input", "encoder", "decoder", "both"]
Kind = Literal["tokens", "classes", "regression"]
OutputLoss = Callable[[Tensor], Tensor]
"""A base loss of another kind: from the outputs of a pass, [B, ...], to one number a position, unreduced."""


@dataclass(frozen=True)
class Count:
    """How much one optimizer step averages over: all micro-batches of all ranks.

    Args:
        labels: labels that count
        sequences: rows with at least one such label
        grad_divisor: what the framework will divide the gradient by (ranks under DDP, times the accumulation steps
            under Accelerate); the loss is multiplied by it
        positions: real target positions, with a label or without (see `Forward.targets`); None where they are not known
        contexts: makes the contexts of all micro-batches of this rank; None where they are not known
        replay: the part of these numbers that old examples have; None where the step has none
        unlabelled: what texts without labels add, in the same units: positions in place of labels; None without them
    """

    labels: float
    sequences: float
    grad_divisor: int = 1
    positions: float | None = None
    contexts: Callable[[], Iterable[Context]] | None = field(default=None, compare=False, repr=False)
    replay: Count | None = None
    unlabelled: Count | None = None
    of_batch: bool = field(default=False, compare=False)
    """Whether this is the count of single batches, and not known to be that of a step."""

    @classmethod
    def of(cls, mask: Tensor, targets: Tensor | None = None, stream: Stream = "labelled") -> Count:
        """The count of a single batch on a single rank."""
        positions = None if targets is None else float(targets.sum())
        rows = mask.reshape(mask.shape[0], -1).any(-1)
        here = cls(float(mask.sum()), float(rows.sum()), positions=positions, of_batch=True)
        if stream == "unlabelled":
            return cls(0.0, 0.0, positions=0.0, unlabelled=here, of_batch=True)
        return replace(here, replay=here) if stream == "replay" else here

    def __add__(self, other: Count) -> Count:
        """The count of both, where each is of a part of one optimizer step."""
        known = self.positions is not None and other.positions is not None
        return Count(
            self.labels + other.labels,
            self.sequences + other.sequences,
            self.grad_divisor,
            self.positions + other.positions if known else None,  # type: ignore[operator]
            replay=_both(self.replay, other.replay),
            unlabelled=_both(self.unlabelled, other.unlabelled),
            of_batch=self.of_batch and other.of_batch,
        )

    def of_stream(self, stream: Stream) -> Count:
        """The part of the count that one stream has."""
        old = self.replay
        if stream == "labelled":
            if old is None:
                return self
            part = self + Count(-old.labels, -old.sequences, positions=_negative(old.positions))
        else:
            found = old if stream == "replay" else self.unlabelled
            if found is None:
                raise BadInput(
                    f"the count of this step has no {stream} examples: pass count=count(model, batches, {stream}=[...])"
                )
            part = found
        return replace(part, grad_divisor=self.grad_divisor, contexts=self.contexts)

    def averaged_on(self, on: On) -> Count:
        """What a term averages over that counts on these examples."""
        if on == "labelled":
            return self
        unlabelled = self.of_stream("unlabelled")
        return unlabelled if on == "unlabelled" else replace(self + unlabelled, contexts=self.contexts)


def _both(first: Count | None, second: Count | None) -> Count | None:
    return first + second if first is not None and second is not None else first or second


def _negative(number: float | None) -> float | None:
    return None if number is None else -number


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Context:
    """One batch seen through one model. It is never changed: every call of a criterion makes an `Evaluation` of it.

    Args:
        forward: runs the model
        labels: targets, `IGNORE` where there is none; None for texts without labels, on which only terms that need no
            labels count, over the positions of `mask`              # [B, T] or [B]
        kind: "tokens" (a distribution per position), "classes" (one per row) or "regression"
        mask: the positions that count; those with a label by default
        step: the optimizer step, from 0; None if it was not given, which schedules do not accept
        count: what one optimizer step averages over; this batch alone by default
        training: whether terms are on
        stream: where the examples come from; "unlabelled" without labels
        loss: the base loss, in place of that of the labels: a function of the outputs of a pass that gives one number
            at every position of `mask`; `labels` may then be None
    """

    forward: Forward
    labels: Tensor
    mask: Tensor
    kind: Kind
    step: int | None
    count: Count
    training: bool
    stream: Stream
    loss: OutputLoss | None

    def __init__(
        self,
        forward: Forward,
        labels: Tensor | None,
        *,
        kind: Kind,
        mask: Tensor | None = None,
        step: int | None = None,
        count: Count | None = None,
        training: bool = True,
        stream: Stream = "labelled",
        loss: OutputLoss | None = None,
    ) -> None:
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise BadInput(f"step={step!r}: expected the number of the optimizer step, from 0")
        if count is not None and not isinstance(count, Count):
            raise BadInput(f"count={count!r}: expected what seqreg.integrations.hf.count(model, batches) gives")
        if stream not in get_args(Stream):
            raise BadInput(f"stream={stream!r}: choose {', '.join(get_args(Stream))}")
        if labels is None and loss is None:
            stream = "unlabelled"
        if labels is None:
            if mask is None:
                raise BadInput("without labels, a mask must say which positions count")
            labels = torch.full(mask.shape, IGNORE, device=mask.device)
        elif mask is None and kind == "regression":
            mask = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
        elif mask is None:
            mask = labels != IGNORE
        count = count or Count.of(mask, forward.targets, stream)
        values = (forward, labels, mask, kind, step, count, training, stream, loss)
        for each, value in zip(fields(Context), values, strict=True):
            object.__setattr__(self, each.name, value)

    @property
    def labelled(self) -> bool:
        return self.stream != "unlabelled"

    @contextlib.contextmanager
    def observed(self) -> Iterator[Context]:
        """The context for diagnostics, see `Forward.observed`."""
        with self.forward.observed() as forward:
            yield replace(self, forward=forward)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the model's own weights, whatever autocast makes of them."""
        return self.forward.weight_dtype

    @property
    def full_precision_weights(self) -> bool:
        return self.weight_dtype in (torch.float32, torch.float64)

    def token_mask(self, site: str) -> Tensor | None:
        """True on the real tokens of a site, [B, S]; None when all are real."""
        if self.forward.sites[site].unknown:
            raise BadInput(self.forward.sites[site].unknown)
        return self.forward.sites[site].mask

    def real(self, site: str, embeds: Tensor, rows: Tensor | None = None) -> Tensor | None:
        """The mask of a site, [B, S], for embeddings [B, S, D] that were tapped there; None when all are real.

        Args:
            rows: those of the batch that the embeddings are of; None for all
        """
        mask, tokens = self.token_mask(site), self.forward.sites[site].tokens
        if rows is not None:
            mask = None if mask is None else mask[rows]
            tokens = None if tokens is None else (len(rows), tokens[1])
        shape = tokens if mask is None else tuple(mask.shape)
        if shape is not None and shape != tuple(embeds.shape[:2]):
            raise BadInput(
                f"the {site} has {list(shape)} tokens and {list(embeds.shape[:2])} positions where it is to be "
                "perturbed: this model cannot be perturbed there"
            )
        return mask

    def sites(self, where: Where) -> tuple[str, ...]:
        """Names of the perturbable sites. "input" is the encoder, or the only stack of a model that has one."""
        names = tuple(self.forward.sites)
        if not names:
            raise BadInput("this model has no embeddings that seqreg can perturb")
        wanted = {"input": names[:1], "both": ("encoder", "decoder")}.get(where, (where,))
        for name in wanted:
            if name not in names:
                raise BadInput(f"where={where!r}: this model has only {' and '.join(names)}; use where='input'")
        return wanted


class Evaluation(Context):
    """One call of a criterion on one context: what every term is given.

    Args:
        ctx: the batch
        base: how the base loss is taken
        memory: what terms keep from step to step, by name
        fused: whether parts of the loss may be computed before there are logits
        hidden: whether the clean pass keeps the outputs of every layer
    """

    def __init__(
        self,
        ctx: Context,
        base: Base | None = None,
        *,
        memory: Memory | None = None,
        fused: bool = True,
        hidden: bool = False,
    ) -> None:
        super().__init__(**{each.name: getattr(ctx, each.name) for each in fields(Context)})
        self.base, self.fused, self.hidden = base or Base(), fused, hidden
        self.memory = {} if memory is None else memory
        self.notes: dict[str, str] = {}
        """What terms have to say to the user about this batch, by name; the criterion says it once."""
        self.paths: set[str] = set()
        """How parts of the loss were computed: "fused" or "plain"."""
        self._passes: dict[str, Pass] = {}
        self._input_shifts: Sequence[Perturbation] = ()
        self._batched: list[ExtraPass] = []
        self._made: list[tuple[ExtraPass, Pass]] = []

    def through(self, forward: Forward) -> Evaluation:
        """The same batch and passes; another Forward makes further passes."""
        view = copy.copy(self)
        object.__setattr__(view, "forward", forward)
        return view

    def before_clean(
        self, *, input_shifts: Sequence[Perturbation], batched: list[ExtraPass], hidden: bool = False
    ) -> None:
        """Say how the clean pass is to be made: with a changed input, and with other passes in its batch."""
        self._input_shifts, self._batched, self.hidden = input_shifts, batched, self.hidden or hidden

    def averaged_on(self, on: On) -> Evaluation:
        """The same batch and passes, averaged over the examples of the step that a term counts on."""
        return self if on == "labelled" else self._averaged(self.count.averaged_on(on))

    def averaged_on_stream(self) -> Evaluation:
        """The same batch and passes, averaged over the examples of its stream alone."""
        return self._averaged(self.count.of_stream(self.stream))

    def _averaged(self, count: Count) -> Evaluation:
        view = copy.copy(self)
        object.__setattr__(view, "count", count)
        return view

    @property
    def clean(self) -> Pass:
        """The unperturbed pass: run once, shared by the base loss and every term."""
        if "clean" not in self._passes:
            self._passes["clean"] = self._run_clean()
        return self._passes["clean"]

    def _run_clean(self) -> Pass:
        if not self._batched:
            return self.forward.clean(*self._input_shifts, step=self.step, hidden=self.hidden)
        clean, *others = self.forward.run_batched(self._batched, step=self.step, hidden=self.hidden)
        self._made += zip(self._batched, others, strict=True)
        self._batched.clear()
        return clean

    @property
    def eval_view(self) -> Pass:
        """The unperturbed pass without dropout: the other side of a term that asks for dropout="off"."""
        if "eval_view" not in self._passes:
            self._passes["eval_view"] = self.forward(dropout="off")
        return self._passes["eval_view"]

    def reference(self, dropout: Dropout) -> Pass:
        """The pass that one with this dropout policy is to be compared with."""
        return self.eval_view if dropout == "off" else self.clean

    def draw(self, extra: ExtraPass) -> Perturbation:
        """What a declared pass adds to the embeddings of its reference, or to the input of a layer."""
        reference, rows, deltas = self.reference(extra.dropout), extra.rows(), {}
        if extra.perturbation is not None:
            return extra.perturbation(reference)
        for site, noise in extra.noise.items():
            embeds = reference.embeds[site, extra.point]
            deltas[site] = noise(embeds if rows is None else embeds[rows], reference.dtype)
        return Perturbation(deltas, extra.point)

    def run(self, extra: ExtraPass) -> Pass:
        """A declared pass: that which was made in one batch with the clean one, or a new one."""
        _ = self.clean
        for place, (declared, view) in enumerate(self._made):
            if declared is extra:
                del self._made[place]  # whose noise refers to this evaluation
                return view
        changes = extra.noise or extra.perturbation is not None
        return self.forward(
            self.draw(extra) if changes else None,
            dropout=extra.dropout,
            grad=extra.grad,
            rows=extra.rows(),
            rate=extra.rate,
            weights=(extra.weights() or None) if extra.weights is not None else None,
            adapters=extra.adapters,
        )

    def reduce(self, values: Tensor, *, per: Per = "token", padding: bool = False) -> Tensor:
        """The one reduction: a float32 scalar that neither padding, accumulation nor world size can change.

        Args:
            values: one number a position                           # [B, T] or [B]
            per: "token" divides by the labels of the whole optimizer step, "sequence" by its rows. "fairseq" is what
                fairseq's sample_size does: the mean over the rows of this micro-batch, weighted by its share of what
                the base loss is averaged over; "sum" is the sum over this micro-batch, weighted likewise. These two
                depend on how a batch is cut
            padding: also count positions without a label, as fairseq's R3F does
        """
        if values.shape != self.mask.shape:
            raise BadInput(
                f"reduce takes one number per position, {list(self.mask.shape)}, and was given {list(values.shape)}"
            )
        values = at_least_float32(values)
        return (values if padding else values.masked_fill(~self.mask, 0.0)).sum() * self._factor(per)

    def weights(self, per: Per = "token", *, padding: bool = False, positions: Positions = "labels") -> Tensor:
        """What every position counts in `reduce`, [B, T] or [B].

        Args:
            positions: "all" counts every real target position, and divides by their number where `per` is "token"
        """
        counted, factor = torch.ones_like(self.mask) if padding else self.mask, self._factor(per)
        if positions == "all":
            counted = self._targets
            factor = self.count.grad_divisor / max(self._positions, 1.0) if per == "token" else factor
        return counted.to(torch.float32 if counted.device.type == "mps" else torch.float64) * factor

    @property
    def _targets(self) -> Tensor:
        if self.forward.targets is None:
            raise BadInput(
                "positions='all': it is not known which positions without a label are real: use positions='labels'"
            )
        return self.forward.targets

    @property
    def _positions(self) -> float:
        if self.count.positions is None:
            raise BadInput("positions='all': the count of this step has no positions: pass count=count(model, batches)")
        return self.count.positions

    def reduce_rows(self, values: Tensor) -> Tensor:
        """The mean over the rows of the whole optimizer step that have a position that counts, of values [B]."""
        counted = self.mask.reshape(len(self.mask), -1).any(-1)
        if len(values) != len(counted):  # pairs of sentences
            raise BadInput(
                f"a term counts the rows of the input, {len(values)}, and the loss has {len(counted)} examples: it "
                "needs one row an example"
            )
        total = at_least_float32(values).masked_fill(~counted, 0.0).sum() * self.count.grad_divisor
        return total / max(self.count.sequences, 1.0)

    def _factor(self, per: Per) -> float:
        if per == "token":
            return self.count.grad_divisor / max(self.count.labels, 1.0)
        if per == "sequence":
            return self.count.grad_divisor / max(self.count.sequences, 1.0)
        return self.share / (len(self.mask) if per == "fairseq" else 1)

    @property
    def share(self) -> float:
        """What this micro-batch counts in the optimizer step: its share of what the base loss is averaged over."""
        here = Count.of(self.mask)
        if self.base.per == "sequence":
            share = here.sequences / max(self.count.sequences, 1.0)
        else:
            share = here.labels / max(self.count.labels, 1.0)
        return self.count.grad_divisor * share
