"""One pass through one model.

A `Forward` is all that a framework supplies: it runs the model and says where embeddings can be perturbed. A `Pass` is
what one pass saw.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from seqreg.engines import deepspeed
from seqreg.engines.detect import Engine
from seqreg.engines.shards import Shards
from seqreg.errors import BadInput
from seqreg.fused.head import Projection
from seqreg.losses import at_least_float32
from seqreg.overrides import dropout_rate, generator_state, replay, swapped_weights, trained, training_off

Dropout = Literal["independent", "shared", "off"]
Point = Literal["embedding", "normalised", "layernorm"] | int
"""Where a perturbation is added; a number is the input of that layer, `hidden_states[layer]` in transformers."""
EmbeddingDelta = Tensor | Callable[[Tensor], Tensor]
"""What to add, or a function of what it is added to."""


@dataclass(frozen=True)
class PerturbationSite:
    """A place where a perturbation can be added: the embeddings one stack of the model consumes.

    Args:
        scale: the factor between word embeddings and what the stack consumes (32 on PEGASUS-large, 1 on BART)
        mask: True on real tokens; None when all are real           # [B, S]
        unknown: why it cannot be told which tokens are real, and the fix
        tokens: rows and length of the input, where they are known
        lengths: where rows are packed, the tokens of the document that every token is of    # [B, S]
    """

    scale: float = 1.0
    mask: Tensor | None = None
    unknown: str = ""
    tokens: tuple[int, int] | None = None
    lengths: Tensor | None = None


@dataclass(frozen=True)
class Perturbation:
    """A change of what the stacks of a model consume, for one pass.

    Args:
        delta: what to add, site by site; a function is given what it is added to    # [B, S, D]
        point: "embedding" adds to the embeddings, in the units that the stack consumes; "layernorm" to the output of
            the embedding's LayerNorm; "normalised" to the embeddings after normalising them to mean 0 and variance 1
            and before that LayerNorm. A model without one is normalised by the RMS of each token instead. A number
            adds to the input of that layer: the pass begins there, with what the clean pass gave (`Forward.keep_input`)
        detach: let no gradient through to what is shifted
    """

    delta: Mapping[str, EmbeddingDelta]
    point: Point = "embedding"
    detach: bool = False


@dataclass(frozen=True)
class PassRequest:
    """How one forward pass is to be made.

    Args:
        shifts: perturbations, applied one after the other
        hidden: also return the outputs of every layer
        rows: the rows of the batch to take, in this order; only where `Forward.batch_size` is set    # [n]
        masks: dropout masks of a pass that is otherwise made like the clean one; None where anything else differs
        perturbed: whether a shift belongs to this pass alone, and not to the input of the batch
        other_weights: whether other weights are in place of the model's during the pass
    """

    shifts: Sequence[Perturbation] = ()
    hidden: bool = False
    rows: Tensor | None = None
    masks: Dropout | None = None
    perturbed: bool = False
    other_weights: bool = False


class Pass:
    """What one forward pass saw.

    Args:
        logits: outputs, aligned with the labels; a function computes them when asked for    # [B, T, V] or [B, C]
        embeds: what the stacks consumed, by site and point         # [B, S, D]
        hidden: outputs of every layer, by stack, when asked for    # [B, S, D] each
        output: a function of the view that gives the framework's own output object
        dtype: the coarsest that the embeddings met, where autocast is switched on inside the model
        aux_loss: what the model adds to its loss besides the labels' (the load balance of experts), weighted
        projection: what the logits would be computed from, for the fused path
        rows: the rows of the batch that the pass was made of; None for all    # [n]
    """

    early_logits: tuple[Tensor, Tensor, Tensor] | None = None
    """Logits of some positions, the row of every position in them, and which positions; see `objective.keep_logits`."""

    def __init__(
        self,
        logits: Tensor | Callable[[], Tensor],
        embeds: Mapping[tuple[str, Point], Tensor] | None = None,
        hidden: Mapping[str, tuple[Tensor, ...]] | None = None,
        output: Callable[[Pass], Any] | None = None,
        dtype: torch.dtype | None = None,
        projection: Projection | None = None,
        rows: Tensor | None = None,
        aux_loss: Tensor | None = None,
    ) -> None:
        self._logits, self._output = logits, output
        self.aux_loss = aux_loss
        self.embeds, self.hidden, self.dtype = embeds or {}, hidden or {}, dtype
        self.projection, self.rows = projection, rows

    @cached_property
    def logits(self) -> Tensor:
        return self._logits if isinstance(self._logits, Tensor) else self._logits()

    @cached_property
    def output(self) -> Any:
        return None if self._output is None else self._output(self)

    @property
    def deferred(self) -> Projection | None:
        """What the logits would be computed from, while nobody has asked for them."""
        return None if "logits" in vars(self) else self.projection

    def keep_head(self) -> None:
        """Hold on to the head as it is now: a pass with other weights has a head of its own, without a gradient."""
        if (head := self.deferred) is not None:
            bias = None if head.bias is None else head.bias.detach()
            self.projection = replace(head, weight=head.weight.detach(), bias=bias)
            self._logits = self.projection.logits

    def only_outputs(self) -> None:
        """Let go of what else the framework gave, which is large."""
        self._output, self.embeds = None, {}

    def equals(self, other: Pass) -> bool:
        """Whether two passes gave exactly the same."""
        if self.deferred is not None and other.deferred is not None and self.deferred.same_head(other.deferred):
            return torch.equal(self.deferred.states, other.deferred.states)
        return torch.equal(self.logits, other.logits)

    def select(self, chosen: slice, rows: Tensor | None = None) -> Pass:
        """Some rows of the pass."""
        head = self.projection
        projection = None if head is None else replace(head, states=head.states[chosen])
        return Pass(
            (lambda: self.logits[chosen]) if projection is None else projection.logits,
            _LazyMapping(self.embeds, lambda embeds: embeds[chosen]),
            _LazyMapping(self.hidden, lambda layers: tuple(layer[chosen] for layer in layers)),
            dtype=self.dtype,
            projection=projection,
            rows=rows,
        )


class _LazyMapping(Mapping[Any, Any]):
    """The same mapping, with something done to every value when it is asked for."""

    def __init__(self, values: Mapping[Any, Any], change: Callable[[Any], Any]) -> None:
        self.values_, self.change = values, change

    def __getitem__(self, key: Any) -> Any:
        return self.change(self.values_[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def _all_rows() -> None:
    return None


@dataclass(frozen=True)
class ExtraPass:
    """A further pass, as a term declares it. Nothing that is declared is computed before the pass is made.

    Args:
        noise: by site what is added there: a function of the embeddings and, where the pass is made alone, of the
            coarsest dtype that they will meet
        perturbation: in place of noise, a function of the pass that this one is compared with
        rows: gives the rows of the batch that it is made of, or None for all    # [n]
        dropout, grad, rate: see `Forward.__call__`
        point: where the noise is added, see `Perturbation`; a number makes the pass begin at that layer
        weights: gives parameters to use in place of the model's own, by name; none where it is empty
        adapters: False switches adapters off
        ascends: finding the perturbation takes gradients of other passes
        after_clean: the noise depends on more than the embeddings that it is added to
    """

    noise: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    perturbation: Callable[[Pass], Perturbation] | None = None
    rows: Callable[[], Tensor | None] = _all_rows
    dropout: Dropout = "independent"
    grad: bool = True
    rate: float | None = None
    point: Point = "embedding"
    weights: Callable[[], Mapping[str, Tensor]] | None = None
    adapters: bool = True
    ascends: bool = False
    after_clean: bool = False

    @property
    def batchable(self) -> bool:
        """Whether the pass can be made in one batch with the clean one, before that is known."""
        like_clean = self.weights is None and self.rate is None and self.adapters and self.point == "embedding"
        needs_clean = self.after_clean or self.perturbation is not None
        return self.dropout == "independent" and self.grad and like_clean and not needs_clean

    @property
    def needs_clean_masks(self) -> bool:
        """Whether the pass, or the ascent before it, may replay the dropout masks of the clean one."""
        return self.dropout == "shared" or (self.ascends and self.dropout == "independent")

    @property
    def resumes_at(self) -> tuple[str, int] | None:
        """The site and the layer at whose input the pass begins; None at the start."""
        return (next(iter(self.noise)), self.point) if isinstance(self.point, int) else None


_last_clean_step: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The optimizer step of the last clean pass through a model."""


class Forward(ABC):
    """Runs the model on one batch. A framework implements `run`, `module` and `sites`; the policies live here."""

    module: nn.Module
    sites: Mapping[str, PerturbationSite]
    targets: Tensor | None = None
    """True on real target positions, with a label or without; None where they are not known    # [B, T] or [B]"""
    packed: bool = False
    """Whether rows hold several documents, one after the other."""
    reentrant: bool = False
    checkpointing: str = "reentrant gradient checkpointing"
    """What a user calls it where it is reentrant, and the fix."""
    reentrant_fix: str = "set gradient_checkpointing_kwargs={'use_reentrant': False}"
    observing: bool = False
    """True for the Forward of diagnostics (`observed`): it calls the module itself, not its DDP wrapper."""
    drops_layers: bool = False
    """Whole layers are left out at random."""
    no_double_backward: str = ""
    """Why a gradient of a gradient would fail in the middle of training, and the fix."""
    recomputes: bool = False
    """Whether gradient checkpointing runs parts of a pass again in its backward."""
    ragged: bool = False
    """Passes drop different layers, and gradients are synchronised across ranks: extra passes need shared dropout."""
    wrapped: nn.Module | None = None
    """The model in its engine, where that has to be told of every loss."""
    engine: Engine = ""
    shards: Shards | None = None
    """The weights, where FSDP2 keeps them as shards."""
    adapters: bool = False
    """Whether the model has adapters that can be switched off (PEFT), which leaves the model they were put on."""
    _clean_rng_state: tuple[Tensor, Tensor | None] | None = None
    _input_shifts: tuple[_DrawnOnce, ...] = ()

    dropouts: tuple[type[nn.Module], ...] = (nn.modules.dropout._DropoutNd,)
    """Modules whose dropout rate is their `p`."""

    batch_size: int | None = None
    """Rows of the batch, where `run` can take some of them, or some twice; None where it cannot."""

    @abstractmethod
    def run(self, request: PassRequest) -> Pass:
        """Make one pass of the model. Most models need `request.shifts` alone."""

    def keep_input(self, site: str, layer: int) -> None:
        """Keep what passes give up to the input of a layer, so that later ones can begin there.

        To be called before the clean pass. `Pass.embeds` then has that input under the number of the layer.
        """
        raise BadInput(f"layer={layer}: passes of this kind of model cannot begin at a layer: leave layer out")

    def clean(self, *shifts: Perturbation, step: int | None = None, hidden: bool = False) -> Pass:
        """The pass that the base loss is taken of; remembers the generator's state for passes that share its dropout.

        Args:
            shifts: part of the input for this batch: later passes have them too, with the same values
            step: the optimizer step; only its first clean pass moves the state of parametrized weights
        """
        self._input_shifts = tuple(map(_DrawnOnce, shifts))
        self._clean_rng_state = generator_state(self._device)
        drawn = tuple(shift.perturbation(again=False) for shift in self._input_shifts)
        with self._clean_pass_of(step):
            return self.run(PassRequest(drawn, hidden, masks="shared"))

    def run_batched(self, extras: Sequence[ExtraPass], *, step: int | None = None, hidden: bool = False) -> list[Pass]:
        """The clean pass and others beside it, as one pass of a larger batch; none can share dropout with it later."""
        if self.batch_size is None:
            raise RuntimeError("this Forward cannot take rows twice")
        self._input_shifts, self._clean_rng_state = (), None
        every = torch.arange(self.batch_size, device=self._device)
        drawn = [extra.rows() for extra in extras]
        indices = [every, *(every if rows is None else rows for rows in drawn)]
        ends = itertools.accumulate((len(index) for index in indices), initial=0)
        clean, *slices = (slice(start, end) for start, end in itertools.pairwise(ends))
        changes: dict[str, list[tuple[slice, Callable[..., Tensor]]]] = {}
        for extra, chosen in zip(extras, slices, strict=True):
            for site, noise in extra.noise.items():
                changes.setdefault(site, []).append((chosen, noise))
        shift = Perturbation({name: _of_slices(parts) for name, parts in changes.items()})
        with self._clean_pass_of(step):
            view = self.run(PassRequest((shift,) if changes else (), hidden, torch.cat(indices), perturbed=True))
        selected = (view.select(chosen, rows) for chosen, rows in zip(slices, drawn, strict=True))
        return [view.select(clean), *selected]

    @contextlib.contextmanager
    def _clean_pass_of(self, step: int | None) -> Iterator[None]:
        """The clean pass: the first of a step moves the state of parametrized weights."""
        again = step is not None and _last_clean_step.get(self.module) == step
        with training_off(self._parametrizations if again else iter(())):
            yield
        if step is not None and self.module.training and not self.observing:
            _last_clean_step[self.module] = step

    def __call__(
        self,
        shift: Perturbation | None = None,
        *,
        dropout: Dropout,
        hidden: bool = False,
        grad: bool = True,
        weights: Mapping[str, Tensor] | None = None,
        rate: float | None = None,
        rows: Tensor | None = None,
        adapters: bool = True,
    ) -> Pass:
        """An extra pass.

        Args:
            shift: what to change
            dropout: "independent" draws new masks, "shared" replays those of the clean pass, "off" uses none
            hidden: also return the states of every layer
            grad: False runs the pass under no_grad
            weights: parameters to use in place of the model's own, by name; needs grad=False
            rate: dropout probability to use everywhere in place of the model's own
            rows: the rows of the batch that it is made of; not with "shared", whose masks are of all rows    # [n]
            adapters: False switches adapters off, see `without_adapters`; needs grad=False
        """
        if rows is not None and (dropout == "shared" or self.batch_size is None):
            raise RuntimeError("a pass of some rows needs a Forward that can take them, and dropout masks of its own")
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad and torch.is_grad_enabled()))
            stack.enter_context(training_off(self._parametrizations if dropout != "off" else self.module.modules()))
            if dropout == "shared":
                if self._clean_rng_state is None:
                    raise RuntimeError('dropout="shared" replays the clean pass, and none has been made alone')
                stack.enter_context(replay(self._clean_rng_state, self._device))
            if rate is not None:
                stack.enter_context(dropout_rate(self.module, rate, self.dropouts))
            if torch.is_grad_enabled() and (weights is not None or not adapters):
                raise RuntimeError("a pass with other weights carries no gradient: use grad=False")
            if weights is not None:
                swap = swapped_weights if self.shards is None else self.shards.swapped
                stack.enter_context(swap(self.module, weights))
            if not adapters:
                stack.enter_context(self.without_adapters())
            as_clean = weights is None and rate is None and rows is None and adapters and dropout != "independent"
            drawn = tuple(one.perturbation(again=dropout == "shared") for one in self._input_shifts)
            view = self.run(
                PassRequest(
                    drawn if shift is None else (*drawn, shift),
                    hidden,
                    rows,
                    masks=dropout if as_clean else None,
                    perturbed=shift is not None,
                    other_weights=weights is not None,
                )
            )
            if weights is not None or not adapters:
                view.only_outputs()
            if weights is not None:
                view.keep_head()  # while these weights are here
            return view

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Adapters are off inside; afterwards all is as before, also what requires a gradient."""
        if self.adapters:
            raise NotImplementedError
        yield

    def saved_weights(self, folder: str) -> Mapping[str, Tensor]:
        """The parameters of a model that was saved to a folder, by their names in this one."""
        raise BadInput(f"{folder}: this kind of model cannot be read from a folder here: use reference='start'")

    def head_parameters(self) -> set[str]:
        """Names of the parameters of a head that fine-tuning usually begins with at random: that of a classifier."""
        return set()

    def other_source(self) -> Pass | None:
        """A pass in which every row reads the source of another row; None for models without a separate source."""
        return None

    @contextlib.contextmanager
    def observed(self) -> Iterator[Self]:
        """A Forward for diagnostics: its passes change neither the generators nor the state of parametrized weights."""
        device = self._device
        with replay(generator_state(device), device), training_off(self._parametrizations):
            yield self.observer()

    def observer(self) -> Self:
        """A copy whose passes are never prepared for a backward across ranks."""
        observer = copy.copy(self)
        observer.observing = True
        return observer

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that training moves, by name; under FSDP2 the shards of this rank."""
        if self.shards is not None:
            self.shards.reshard()
        return trained(self.module)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the weights in a pass, whatever autocast makes of them; FSDP2 may cast them for it."""
        own = next(self.module.parameters(), torch.empty(0)).dtype
        return own if self.shards is None or self.shards.param_dtype is None else self.shards.param_dtype

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """The passes of one evaluation of a loss are made inside; a sharded head is gathered once for all of them."""
        yield
        if self.shards is not None and not torch.is_grad_enabled():
            self.shards.reshard()  # no backward will: an optimizer's step would leave whole weights behind

    def take_loss(self, total: Tensor) -> None:
        """Tell the engine of a loss that was made of these passes, before anything is differentiated."""
        deepspeed.take_loss(self.wrapped, total)

    @contextlib.contextmanager
    def full_precision(self) -> Iterator[None]:
        """Passes inside are made without autocast."""
        with torch.autocast(self._device.type, enabled=False):
            yield

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters(), torch.empty(0)).device

    @property
    def _parametrizations(self) -> Iterator[nn.Module]:
        """Weights that are functions with a state of their own (spectral norm) move on in the clean pass only."""
        for module in self.module.modules():
            if isinstance(module, ParametrizationList):
                yield from module.modules()


class _DrawnOnce:
    """A perturbation of the input of a batch: drawn in the clean pass, and the same in all later passes."""

    def __init__(self, shift: Perturbation) -> None:
        self.shift = shift
        self._drawn: dict[str, Tensor] = {}

    def perturbation(self, *, again: bool) -> Perturbation:
        """The perturbation for one pass.

        Args:
            again: draw the same numbers again, as a pass that replays the generators of the clean pass has to
        """

        def change(site: str, embeds: Tensor) -> Tensor:
            delta = self.shift.delta[site]
            if again or site not in self._drawn:
                self._drawn[site] = delta(embeds) if callable(delta) else delta
            return self._drawn[site]

        return replace(self.shift, delta={site: partial(change, site) for site in self.shift.delta})


def _of_slices(changes: Sequence[tuple[slice, Callable[..., Tensor]]]) -> Callable[[Tensor], Tensor]:
    """A change of some rows of a larger batch, and none of the others."""

    def apply(embeds: Tensor) -> Tensor:
        total = torch.zeros_like(at_least_float32(embeds))
        for chosen, change in changes:
            total[chosen] = change(embeds[chosen])
        return total

    return apply
