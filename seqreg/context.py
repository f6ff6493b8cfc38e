"""One batch seen through one model.

A `Context` holds one batch: the clean pass, run once and shared by all terms, and the only place that reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from seqreg.errors import BadInput
from seqreg.forward import Dropout, ExtraPass, Forward, Pass, Perturbation
from seqreg.losses import IGNORE, Base, at_least_float32

Per = Literal["token", "sequence", "fairseq", "sum"]
Where = Literal["input", "encoder", "decoder", "both"]
Kind = Literal["tokens", "classes", "regression"]


@dataclass(frozen=True)
class Count:
    """How much one optimizer step averages over: all micro-batches of all ranks.

    Args:
        labels: labels that count
        sequences: rows with at least one such label
        world: how often the framework will divide the gradient by itself (ranks under DDP, times the accumulation
            steps under Accelerate); the loss is multiplied by it
    """

    labels: float
    sequences: float
    world: int = 1

    @classmethod
    def of(cls, mask: Tensor) -> Count:
        """The count of a single batch on a single rank."""
        return cls(float(mask.sum()), float(mask.reshape(mask.shape[0], -1).any(-1).sum()))


class Context:
    """One batch seen through one model: what every term is given.

    Args:
        forward: runs the model
        labels: targets, `IGNORE` where there is none; None for unlabelled data, on which only terms that need no labels
            count, over the positions of `mask`                     # [B, T] or [B]
        kind: "tokens" (a distribution a position), "classes" (one a row) or "regression"
        step: the optimizer step, from 0; None if it was not given, which schedules do not accept
        count: what one optimizer step averages over; this batch alone by default
        training: whether terms are on
    """

    loss_of: Callable[[Pass, Context], Tensor]
    """Per-position base loss of a view; set by the criterion."""

    mean_of: Callable[[Pass, Context], Tensor]
    """The base loss of a view, averaged as the criterion averages it; set by the criterion."""

    memory: dict[str, dict[str, Tensor]]
    """What terms keep from step to step, by name; set by the criterion and part of its state."""

    base: Base = Base()
    """How the base loss is taken; set by the criterion."""

    hidden: bool = False
    """Whether the clean pass keeps the outputs of every layer; set by the criterion."""

    input_shifts: tuple[Perturbation, ...] = ()
    """Changes of the input itself, for the clean pass and all others; set by the criterion."""

    fused: bool = True
    """Whether parts of the loss may be computed before there are logits; set by the criterion."""

    extras: Sequence[tuple[object, ExtraPass]] = ()
    """Terms and passes that are to be made in one batch with the clean one; set by the criterion."""

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
    ) -> None:
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise BadInput(f"step={step!r}: expected the number of the optimizer step, from 0")
        if count is not None and not isinstance(count, Count):
            raise BadInput(f"count={count!r}: expected what seqreg.integrations.hf.count(model, batches) gives")
        self.forward, self.kind, self.step, self.training = forward, kind, step, training
        self.labelled = labels is not None
        if labels is None:
            if mask is None:
                raise BadInput("unlabelled data need a mask of the positions that count")
            labels = torch.full(mask.shape, IGNORE, device=mask.device)
        elif kind == "regression":
            mask = torch.ones(len(labels), dtype=torch.bool, device=labels.device)
        else:
            mask = labels != IGNORE
        self.labels, self.mask = labels, mask  # [B, T] or [B]
        self.count = count or Count.of(self.mask)
        self.memory = {}
        self.beside: list[tuple[object, Pass]] = []
        """What the `extras` gave, by term."""
        self.notes: dict[str, str] = {}
        """What terms have to say to the user about this batch, by name; the criterion says it once."""
        self.paths: set[str] = set()
        """How parts of the loss were computed: "fused" or "plain"."""

    @cached_property
    def clean(self) -> Pass:
        """The unperturbed pass: run once, shared by the base loss and every term."""
        if self.extras:
            terms, extras = zip(*self.extras, strict=True)
            clean, *views = self.forward.together(extras, step=self.step, hidden=self.hidden)
            self.beside, self.extras = list(zip(terms, views, strict=True)), ()
            return clean
        return self.forward.clean(*self.input_shifts, step=self.step, hidden=self.hidden)

    def made_for(self, term: object) -> Pass | None:
        """The pass that a term asked to have made beside the clean one, if it was."""
        return next((view for owner, view in self.beside if owner is term), None)

    def task_loss(self, view: Pass) -> Tensor:
        """The base loss of every position of a view."""
        return self.loss_of(view, self)

    def task_mean(self, view: Pass) -> Tensor:
        """The base loss of a view, averaged as the criterion averages it."""
        return self.mean_of(view, self)

    @cached_property
    def quiet(self) -> Pass:
        """The unperturbed pass without dropout: the other side of a term that asks for dropout="off"."""
        return self.forward(dropout="off")

    def reference(self, dropout: Dropout) -> Pass:
        """The view that a pass with this dropout policy is to be compared with."""
        return self.quiet if dropout == "off" else self.clean

    @property
    def source_mask(self) -> Tensor | None:
        """True on real source tokens, [B, S]; None when all are real."""
        return self.token_mask(self.sites("input")[0])

    def token_mask(self, site: str) -> Tensor | None:
        """True on the real tokens of a site, [B, S]; None when all are real."""
        if self.forward.sites[site].unknown:
            raise BadInput(self.forward.sites[site].unknown)
        return self.forward.sites[site].mask

    def reduce_rows(self, values: Tensor) -> Tensor:
        """The mean over the rows of the whole optimizer step that have a position that counts, of values [B]."""
        counted = self.mask.reshape(len(self.mask), -1).any(-1)
        total = at_least_float32(values).masked_fill(~counted, 0.0).sum() * self.count.world
        return total / max(self.count.sequences, 1.0)

    def real(self, site: str, embeds: Tensor, rows: Tensor | None = None) -> Tensor | None:
        """The mask of a site, [B, S], for embeddings [B, S, D] that were tapped there; None when all are real.

        Args:
            rows: those of the batch that the embeddings are of; None for all
        """
        mask, tokens = self.token_mask(site), self.forward.sites[site].tokens
        mask = mask if mask is None or rows is None else mask[rows]
        if tokens is not None:
            tokens = tokens if rows is None else (len(rows), tokens[1])
        tokens = tokens if mask is None else (mask.shape[0], mask.shape[1])
        if tokens is not None and tokens != tuple(embeds.shape[:2]):
            raise BadInput(
                f"the {site} has {list(tokens)} tokens and {list(embeds.shape[:2])} positions where it is to be "
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
                f"reduce takes one number a position, {list(self.mask.shape)}, and was given {list(values.shape)}"
            )
        values = at_least_float32(values)
        return (values if padding else values.masked_fill(~self.mask, 0.0)).sum() * self._factor(per)

    def weights(self, per: Per = "token", *, padding: bool = False) -> Tensor:
        """What every position counts in `reduce`, [B, T] or [B]."""
        counted = torch.ones_like(self.mask) if padding else self.mask
        return counted.to(torch.float32 if counted.device.type == "mps" else torch.float64) * self._factor(per)

    def _factor(self, per: Per) -> float:
        world = self.count.world
        if per == "token":
            return world / max(self.count.labels, 1.0)
        if per == "sequence":
            return world / max(self.count.sequences, 1.0)
        return self.share / (len(self.mask) if per == "fairseq" else 1)

    @property
    def share(self) -> float:
        """What this micro-batch counts in the optimizer step: its share of what the base loss is averaged over."""
        here = Count.of(self.mask)
        if self.base.per == "sequence":
            share = here.sequences / max(self.count.sequences, 1.0)
        else:
            share = here.labels / max(self.count.labels, 1.0)
        return self.count.world * share
