"""EmbeddingTap: read or shift the embeddings of one stack from inside the model's own forward pass.

Passing `inputs_embeds` instead is wrong on models that scale inside the stack (PEGASUS, Marian), moves the positions
of left-padded RoBERTa batches, and is refused by BART and T5 classifiers. A hook on the model's shared embedding never
fires on encoder-decoders, whose stacks own separate modules, and fires twice once the embeddings were resized. So the
hook sits on the stack's own embedding, works only while that stack runs, and must fire exactly once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from seqreg.errors import BadInput
from seqreg.forward import EmbeddingDelta, Perturbation, Point
from seqreg.losses import at_least_float32
from seqreg.noise import arithmetic_dtype


@dataclass(frozen=True)
class Stack:
    """One stack of a model and the embedding it looks its tokens up in.

    Args:
        inner: the factor that the embedding module applies to its own table
        outer: the factor that the stack applies to what the embedding module gives
        norm: the LayerNorm of the embeddings, if the stack has one
    """

    module: nn.Module
    embedding: nn.Module
    inner: float = 1.0
    outer: float = 1.0
    norm: nn.LayerNorm | None = None


class _StackHooks:
    """Hooks that are there inside a `with` block, and work only while the stack itself runs."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self._inside = stack, False
        self._handles: list[RemovableHandle] = []

    def _begin(self, *_: Any) -> None:
        self._inside = True

    def _end(self, *_: Any) -> None:
        self._inside = False

    def _watch(self, hook: RemovableHandle) -> None:
        before = self.stack.module.register_forward_pre_hook(self._begin)
        self._handles = [before, self.stack.module.register_forward_hook(self._end), hook]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._inside = False


class EmbeddingTap(_StackHooks):
    """Inside `with EmbeddingTap(stack, delta) as tap:` one forward pass sees its embeddings shifted by `delta`.

    Args:
        stack: where
        delta: what to add, or a function of what it is added to; None only reads    # [B, S, D]
        point, detach: see `seqreg.forward.Perturbation`

    Afterwards `tap.embeds` holds what was consumed at that point. With a delta, leaving the block raises unless the
    hook fired exactly once; without one, `tap.fired` tells.
    """

    def __init__(
        self,
        stack: Stack,
        delta: EmbeddingDelta | None = None,
        point: Point = "embedding",
        detach: bool = False,
    ) -> None:
        if point == "layernorm" and stack.norm is None:
            name = type(stack.module).__name__
            raise BadInput(f"{name} has no LayerNorm on its embeddings to perturb after: use inject='scaled' or 'word'")
        super().__init__(stack)
        self.delta, self.point, self.detach, self.fired = delta, point, detach, 0
        self.strange = ""
        """The type of what the embedding gave, if it was no tensor (I-BERT's gives the scale of its integers too)."""
        self.dtype: torch.dtype | None = None
        self._consumed: Callable[[], Tensor] | None = None

    @property
    def embeds(self) -> Tensor | None:
        """What was consumed at this point, computed when asked for."""
        return None if self._consumed is None else self._consumed()

    def __enter__(self) -> EmbeddingTap:
        stack = self.stack
        if self.point == "embedding" or stack.norm is None:
            self._watch(stack.embedding.register_forward_hook(self._at_embedding))
        elif self.point == "layernorm":
            self._watch(stack.norm.register_forward_hook(self._after_norm))
        else:
            self._watch(stack.norm.register_forward_pre_hook(self._before_norm))
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        super().__exit__()
        if kind is None and self.delta is not None and self.fired != 1:
            raise BadInput(self.complaint())

    def complaint(self) -> str:
        stack, embedding = type(self.stack.module).__name__, type(self.stack.embedding).__name__
        if self.strange:
            return f"{stack} cannot be perturbed: its {embedding} gives a {self.strange}, not embeddings"
        return (
            f"the perturbation of {stack} was applied {self.fired} times instead of once: its {embedding} must be "
            "called exactly once per forward pass; feed input_ids, not inputs_embeds, and no prompt or prefix tuning"
        )

    def _at_embedding(self, embedding: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self._inside or (self.fired and _only_padding(embedding, inputs[0])):
            return None
        if not isinstance(output, Tensor):
            self.strange = type(output).__name__
            return None
        unit: Tensor | float = 1 / self.stack.outer  # the shift is in what the stack consumes, the output is not
        if self.point == "normalised":
            unit = at_least_float32(output.detach()).square().mean(-1, keepdim=True).sqrt()
        changed = self._change(output, unit)
        self._consumed = lambda: changed / unit
        return None if self.delta is None else changed

    def _before_norm(self, norm: nn.LayerNorm, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not self._inside:
            return None
        if self.delta is None:
            self.fired += 1
            self._consumed = lambda: functional.layer_norm(inputs[0], norm.normalized_shape, eps=norm.eps)
            return None
        changed = self._change(functional.layer_norm(inputs[0], norm.normalized_shape, eps=norm.eps))
        self._consumed = lambda: changed
        return (changed, *inputs[1:])

    def _after_norm(self, norm: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not self._inside:
            return None
        changed = self._change(output)
        self._consumed = lambda: changed
        return None if self.delta is None else changed

    def _change(self, embeds: Tensor, unit: Tensor | float = 1.0) -> Tensor:
        self.fired += 1
        self.dtype = arithmetic_dtype(embeds)
        if self.delta is None:
            return embeds
        delta = _computed(self.delta, embeds / unit) if callable(self.delta) else self.delta
        return ((embeds.detach() if self.detach else embeds) + delta * unit).to(embeds.dtype)


class TappedEmbeddings(Mapping[tuple[str, Point], Tensor]):
    """The embeddings of one pass, by site and point; what was not consumed exactly once is an error to ask for."""

    def __init__(self, taps: Mapping[tuple[str, Point], EmbeddingTap]) -> None:
        self.taps = taps
        self.layer_inputs: dict[tuple[str, Point], Tensor] = {}

    @property
    def dtype(self) -> torch.dtype | None:
        """The coarsest that the embeddings met."""
        return next((tap.dtype for tap in self.taps.values() if tap.dtype is not None), None)

    def __getitem__(self, key: tuple[str, Point]) -> Tensor:
        if key in self.layer_inputs:
            return self.layer_inputs[key]
        if key not in self.taps:
            raise BadInput(
                f"the {key[0]} has no LayerNorm on its embeddings to perturb after: use inject='scaled' or 'word'"
            )
        embeds = self.taps[key].embeds
        if self.taps[key].fired != 1 or embeds is None:
            raise BadInput(self.taps[key].complaint())
        return embeds

    def __iter__(self) -> Iterator[tuple[str, Point]]:
        return iter(self.taps)

    def __len__(self) -> int:
        return len(self.taps)


@contextlib.contextmanager
def perturbed(stacks: Mapping[str, Stack], perturbations: Sequence[Perturbation]) -> Iterator[TappedEmbeddings]:
    """One pass inside has these perturbations, and what its stacks consume is read at every point that they have."""
    points: tuple[Point, ...] = ("embedding", "normalised", "layernorm")
    readers = {
        (name, point): EmbeddingTap(stack, point=point)
        for name, stack in stacks.items()
        for point in points
        if point != "layernorm" or stack.norm is not None
    }
    with contextlib.ExitStack() as exits:
        for change in perturbations:
            for name, delta in change.delta.items():
                exits.enter_context(EmbeddingTap(stacks[name], delta, change.point, change.detach))
        for reader in readers.values():
            exits.enter_context(reader)
        yield TappedEmbeddings(readers)


class Lookup(_StackHooks):
    """The embeddings that a stack looked up, for all passes over the same tokens.

    A lookup in a large table has a dense gradient; passes that share one lookup share its gradient, and so do two
    stacks that share a table. Every pass would look up the same numbers, unless the embedding is more than a table
    (a PEFT adapter) or a hook of somebody else changes them: `Lookup.possible` says whether there is sharing.
    """

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack)
        self._done = False
        self._embeds: Tensor | None = None
        self._tokens: Tensor | None = None  # that a stack before this one has looked up for it
        self._next: tuple[Lookup, Tensor] | None = None

    @staticmethod
    def possible(stack: Stack) -> bool:
        """Whether the embedding is a table, and nothing else has a say in what is looked up."""
        return isinstance(stack.embedding, nn.Embedding) and not stack.embedding._forward_hooks

    def also_for(self, later: Lookup, tokens: Tensor) -> None:
        """Look up the tokens of a later stack too, if it has the same table."""
        first, second = self.stack.embedding, later.stack.embedding
        same = type(first) is type(second) and first.weight is second.weight and self.stack.inner == later.stack.inner
        if same and first.padding_idx == second.padding_idx:
            self._next = later, tokens

    def __enter__(self) -> Lookup:
        self._done = False
        self._watch(self.stack.embedding.register_forward_hook(self._look))
        return self

    def _look(self, embedding: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self._inside or self._done:
            return None
        self._done = True
        if self._embeds is None and self._next is not None and inputs[0].device == self._next[1].device:
            later, tokens = self._next
            both = embedding.forward(torch.cat([inputs[0].flatten(), tokens.flatten()]))
            self._embeds = both[: inputs[0].numel()].view(output.shape)
            later._embeds, later._tokens = both[inputs[0].numel() :].view(*tokens.shape, -1), tokens
        foreign = self._tokens is not None and not _same(self._tokens, inputs[0])
        if self._embeds is None or self._embeds.shape != output.shape or foreign:
            self._embeds, self._tokens = output, None
        return self._embeds.clone()  # some models change it in place


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _computed(delta: Callable[[Tensor], Tensor], embeds: Tensor) -> Tensor:
    """A perturbation that depends on the embeddings: it may look at numbers, which no graph of torch.compile can."""
    return delta(embeds)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _same(tokens: Tensor, others: Tensor) -> bool:
    return torch.equal(tokens, others)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _only_padding(embedding: nn.Module, ids: Tensor) -> bool:
    """LED looks up a second time: the padding that fills its attention window."""
    padding = getattr(embedding, "padding_idx", None)
    return padding is not None and bool((ids == padding).all())
