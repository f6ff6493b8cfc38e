"""One batch seen through one model.

A `Forward` is all that a framework supplies: it runs the model and says where embeddings can be perturbed. A
`Context` holds one batch: the clean pass, run once and shared by all terms, and the only place that reduces.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from seqreg.errors import BadInput
from seqreg.losses import IGNORE, at_least_float32

Dropout = Literal["independent", "shared", "off"]
Per = Literal["token", "sequence", "fairseq", "sum"]
Where = Literal["input", "encoder", "decoder", "both"]
Point = Literal["embedding", "normalised", "layernorm"]
Kind = Literal["tokens", "classes", "regression"]


@dataclass(frozen=True)
class Site:
    """A place where a perturbation can be added: the embeddings one stack of the model consumes.

    Args:
        scale: the factor between word embeddings and what the stack consumes (32 on PEGASUS-large, 1 on BART)
        mask: True on real tokens; None when all are real           # [B, S]
    """

    scale: float = 1.0
    mask: Tensor | None = None


@dataclass(frozen=True)
class Shift:
    """A change of what the stacks of a model consume, for one pass.

    Args:
        delta: what to add, site by site; a function is given what it is added to    # [B, S, D]
        at: "embedding" adds to the embeddings, in the units that the stack consumes; "layernorm" to the output of the
            embedding's LayerNorm; "normalised" to the embeddings after normalising them to mean 0 and variance 1 and
            before that LayerNorm. A model without one is normalised by the RMS of each token instead
        detach: let no gradient through to what is shifted
    """

    delta: Mapping[str, Tensor | Callable[[Tensor], Tensor]]
    at: Point = "embedding"
    detach: bool = False


@dataclass(frozen=True)
class View:
    """What one forward pass saw.

    Args:
        logits: outputs, aligned with the labels                    # [B, T, V] or [B, C]
        embeds: what the stacks consumed, by site and point         # [B, S, D]
        hidden: outputs of every layer, by stack, when asked for    # [B, S, D] each
        output: the framework's own output object
        dtype: the coarsest that the embeddings met, where autocast is switched on inside the model
    """

    logits: Tensor
    embeds: Mapping[tuple[str, Point], Tensor] = field(default_factory=dict)
    hidden: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    output: Any = None
    dtype: torch.dtype | None = None


_stepped: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The optimizer step of the last clean pass through a model."""


class Forward(ABC):
    """Runs the model on one batch. A framework implements `run`, `module` and `sites`; the policies live here."""

    module: nn.Module
    sites: Mapping[str, Site]
    reentrant: bool = False
    aside: bool = False
    """Passes now are for observation: a framework's wrapper that prepares for backward is to be left out."""
    drops_layers: bool = False
    """Whole layers are left out at random."""
    no_double_backward: str = ""
    """Why a gradient of a gradient would fail in the middle of training, and the fix."""
    ragged: bool = False
    """Passes drop different layers, and gradients are synchronised across ranks: extra passes need shared dropout."""
    _start: tuple[Tensor, Tensor | None] | None = None
    _always: tuple[Shift, ...] = ()
    _replaying: bool = False

    @abstractmethod
    def run(self, shifts: Sequence[Shift], *, hidden: bool) -> View:
        """One pass of the model, with these shifts applied one after the other."""

    def clean(self, *shifts: Shift, step: int | None = None, hidden: bool = False) -> View:
        """The pass that the base loss is taken of; remembers the generator's state for passes that share its dropout.

        Args:
            shifts: part of the input for this batch: later passes have them too, with the same values
            step: the optimizer step; only its first clean pass moves the state of parametrized weights
        """
        self._always = tuple(
            replace(shift, delta={name: self._once(change) for name, change in shift.delta.items()}) for shift in shifts
        )
        self._start = _generator_state(self._device)
        again = step is not None and _stepped.get(self.module) == step
        with training_off(self._parametrizations if again else iter(())):
            view = self.run(self._always, hidden=hidden)
        if step is not None and self.module.training and not self.aside:
            _stepped[self.module] = step
        return view

    def __call__(
        self,
        shift: Shift | None = None,
        *,
        dropout: Dropout,
        hidden: bool = False,
        grad: bool = True,
        weights: Mapping[str, Tensor] | None = None,
        rate: float | None = None,
    ) -> View:
        """An extra pass.

        Args:
            shift: what to change
            dropout: "independent" draws new masks, "shared" replays those of the clean pass, "off" uses none
            hidden: also return the states of every layer
            grad: False runs the pass under no_grad
            weights: parameters to use in place of the model's own, by name; needs grad=False
            rate: dropout probability to use everywhere in place of the model's own
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad and torch.is_grad_enabled()))
            stack.enter_context(training_off(self._parametrizations if dropout != "off" else self.module.modules()))
            if dropout == "shared":
                if self._start is None:
                    raise RuntimeError('dropout="shared" replays the clean pass, and no clean pass has run yet')
                stack.enter_context(_replay(self._start, self._device))
                self._replaying = True
                stack.callback(setattr, self, "_replaying", False)
            if rate is not None:
                stack.enter_context(_dropout_rate(self.module, rate))
            if weights is not None:
                if torch.is_grad_enabled():
                    raise RuntimeError("a pass with other weights carries no gradient: use grad=False")
                stack.enter_context(_borrowed(self.module, weights))
            return self.run((*self._always, *(() if shift is None else (shift,))), hidden=hidden)

    @property
    def shifted(self) -> bool:
        """Whether the clean pass had a changed input."""
        return bool(self._always)

    def other_source(self) -> View | None:
        """A pass in which every row reads the source of another row; None for models without a separate source."""
        return None

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Passes inside change nothing: not the generators, nor the state of parametrized weights."""
        device = self._device
        with _replay(_generator_state(device), device), training_off(self._parametrizations):
            self.aside = True
            try:
                yield
            finally:
                self.aside = False

    @contextlib.contextmanager
    def full_precision(self) -> Iterator[None]:
        """Passes inside are made without autocast."""
        with torch.autocast(self._device.type, enabled=False):
            yield

    def _once(self, change: Tensor | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A change that is drawn in the clean pass and then kept; drawn again, alike, where that pass is replayed."""
        drawn: list[Tensor] = []

        def apply(embeds: Tensor) -> Tensor:
            if not drawn or self._replaying:
                drawn[:] = [change(embeds) if callable(change) else change]
            return drawn[0]

        return apply

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters(), torch.empty(0)).device

    @property
    def _parametrizations(self) -> Iterator[nn.Module]:
        """Weights that are functions with a state of their own (spectral norm) move on in the clean pass only."""
        for module in self.module.modules():
            if isinstance(module, ParametrizationList):
                yield from module.modules()


def _generator_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    here = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), here


@contextlib.contextmanager
def _replay(state: tuple[Tensor, Tensor | None], device: torch.device) -> Iterator[None]:
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.get_device_module(device).set_rng_state(state[1], device)
        yield


@contextlib.contextmanager
def training_off(modules: Iterator[nn.Module]) -> Iterator[None]:
    """These modules are in evaluation mode inside: no dropout, no power iteration."""
    switched = [module for module in modules if module.training]
    try:
        for module in switched:
            module.training = False
        yield
    finally:
        for module in switched:
            module.training = True


@contextlib.contextmanager
def _dropout_rate(module: nn.Module, rate: float) -> Iterator[None]:
    """Another dropout probability inside: nn.Dropout has it in `p`, transformers in modules or their configuration."""
    changed: list[tuple[Any, str, Any]] = []
    owners = {id(owner): owner for part in module.modules() for owner in (part, getattr(part, "config", part))}
    try:
        for owner in owners.values():
            for name, value in list(vars(owner).items()):
                known = name == "p" if isinstance(owner, nn.modules.dropout._DropoutNd) else "dropout" in name
                if known and isinstance(value, (int, float)) and not isinstance(value, bool):
                    changed.append((owner, name, value))
                    setattr(owner, name, rate)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


@contextlib.contextmanager
def _borrowed(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in some parameters inside. Only the storage is exchanged: graphs that saved the originals hold."""
    own = {name: parameter.data for name, parameter in module.named_parameters() if name in weights}
    torch.clear_autocast_cache()  # of casts of the same parameters
    try:
        for name, parameter in module.named_parameters():
            if name in weights:
                parameter.data = weights[name].to(parameter.dtype)
        yield
    finally:
        for name, parameter in module.named_parameters():
            if name in own:
                parameter.data = own[name]
        torch.clear_autocast_cache()


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

    task_loss: Callable[[View], Tensor]
    """Per-position base loss of a view; set by the criterion, for terms that attack the task itself."""

    memory: dict[str, dict[str, Tensor]]
    """What terms keep from step to step, by name; set by the criterion and part of its state."""

    per: Per = "token"
    """What the base loss is averaged over; set by the criterion."""

    hidden: bool = False
    """Whether the clean pass keeps the outputs of every layer; set by the criterion."""

    input_shifts: tuple[Shift, ...] = ()
    """Changes of the input itself, for the clean pass and all others; set by the criterion."""

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

    @cached_property
    def clean(self) -> View:
        """The unperturbed pass: run once, shared by the base loss and every term."""
        return self.forward.clean(*self.input_shifts, step=self.step, hidden=self.hidden)

    @cached_property
    def quiet(self) -> View:
        """The unperturbed pass without dropout: the other side of a term that asks for dropout="off"."""
        return self.forward(dropout="off")

    def reference(self, dropout: Dropout) -> View:
        """The view that a pass with this dropout policy is to be compared with."""
        return self.quiet if dropout == "off" else self.clean

    @property
    def source_mask(self) -> Tensor | None:
        """True on real source tokens, [B, S]; None when all are real."""
        return self.forward.sites[self.sites("input")[0]].mask

    def task_mean(self, view: View) -> Tensor:
        """The base loss of a view, averaged as the criterion averages it."""
        return self.reduce(self.task_loss(view), per=self.per)

    def reduce_rows(self, values: Tensor) -> Tensor:
        """The mean over the rows of the whole optimizer step that have a position that counts, of values [B]."""
        counted = self.mask.reshape(len(self.mask), -1).any(-1)
        total = at_least_float32(values).masked_fill(~counted, 0.0).sum() * self.count.world
        return total / max(self.count.sequences, 1.0)

    def real(self, site: str, embeds: Tensor) -> Tensor | None:
        """The mask of a site, [B, S], for embeddings [B, S, D] that were tapped there; None when all are real."""
        mask = self.forward.sites[site].mask
        if mask is not None and mask.shape != embeds.shape[:2]:
            raise BadInput(
                f"the {site} has {list(mask.shape)} tokens and {list(embeds.shape[:2])} positions where it is to be "
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
        total = (values if padding else values.masked_fill(~self.mask, 0.0)).sum() * self.count.world
        if per == "token":
            return total / max(self.count.labels, 1.0)
        if per == "sequence":
            return total / max(self.count.sequences, 1.0)
        here = Count.of(self.mask)
        share = here.labels / max(self.count.labels, 1.0)
        if self.per == "sequence":
            share = here.sequences / max(self.count.sequences, 1.0)
        return total * share / (len(values) if per == "fairseq" else 1)
