"""EmbeddingTap: read or shift the embeddings of one stack from inside the model's own forward pass.

Passing `inputs_embeds` instead is wrong on models that scale inside the stack (PEGASUS, Marian), moves the positions
of left-padded RoBERTa batches, and is refused by BART and T5 classifiers. A hook on the model's shared embedding never
fires on encoder-decoders, whose stacks own separate modules, and fires twice once the embeddings were resized. So the
hook sits on the stack's own embedding, works only while that stack runs, and must fire exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from seqreg.errors import BadInput


@dataclass(frozen=True)
class Stack:
    """One stack of a model and the embedding it looks its tokens up in.

    Args:
        inner: the factor that the embedding module applies to its own table
        outer: the factor that the stack applies to what the embedding module gives
    """

    module: nn.Module
    embedding: nn.Module
    inner: float = 1.0
    outer: float = 1.0


class EmbeddingTap:
    """Inside `with EmbeddingTap(stack, delta) as tap:` one forward pass sees its embeddings shifted by `delta`.

    Args:
        stack: where
        delta: what to add, in the units that the stack consumes; None only reads    # [B, S, D]

    Afterwards `tap.embeds` holds what the stack consumed. With a delta, leaving the block raises unless the hook fired
    exactly once; without one, `tap.fired` tells.
    """

    def __init__(self, stack: Stack, delta: Tensor | None = None) -> None:
        self.stack, self.delta = stack, delta
        self.fired, self.embeds, self._inside = 0, None, False
        self._handles: list[RemovableHandle] = []

    fired: int
    embeds: Tensor | None

    def __enter__(self) -> EmbeddingTap:
        stack = self.stack
        self._handles = [
            stack.module.register_forward_pre_hook(self._begin),
            stack.module.register_forward_hook(self._end, always_call=True),
            stack.embedding.register_forward_hook(self._shift),
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is None and self.delta is not None and self.fired != 1:
            raise BadInput(self.complaint())

    def complaint(self) -> str:
        stack, embedding = type(self.stack.module).__name__, type(self.stack.embedding).__name__
        return (
            f"the perturbation of {stack} was applied {self.fired} times instead of once: its {embedding} must be "
            "called exactly once a forward pass; feed input_ids, not inputs_embeds"
        )

    def _begin(self, *_: Any) -> None:
        self._inside = True

    def _end(self, *_: Any) -> None:
        self._inside = False

    def _shift(self, embedding: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not self._inside or (self.fired and _only_padding(embedding, inputs[0])):
            return None
        self.fired += 1
        if self.delta is None:
            self.embeds = output * self.stack.outer if self.stack.outer != 1.0 else output
            return None
        shifted = (output + self.delta / self.stack.outer).to(output.dtype)
        self.embeds = shifted * self.stack.outer if self.stack.outer != 1.0 else shifted
        return shifted


def _only_padding(embedding: nn.Module, ids: Tensor) -> bool:
    """LED looks up a second time: the padding that fills its attention window."""
    padding = getattr(embedding, "padding_idx", None)
    return padding is not None and bool((ids == padding).all())
