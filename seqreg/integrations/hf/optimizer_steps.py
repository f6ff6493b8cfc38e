"""The optimizer steps of a loop of your own: micro-batches with what they are averaged over."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqreg.context import Context
from seqreg.engines import deepspeed
from seqreg.errors import BadInput
from seqreg.integrations.hf.context import ContextBuilder, context, count


def optimizer_steps(
    model: nn.Module,
    loader: Iterable[Mapping[str, Any]],
    gradient_accumulation_steps: int | None = None,
    *,
    accelerator: Any = None,
    first: int = 0,
    build_context: ContextBuilder = context,
) -> Iterator[tuple[int, Iterator[Context]]]:
    """The optimizer steps that a loader has batches for: the number of each, and its contexts.

    Every context knows the step and what all micro-batches of all ranks add up to, so that the gradient does not depend
    on how a batch is cut. Gradients are synchronised across ranks in the last micro-batch of a step alone: call
    `backward` on the loss of one context before the next is taken, and do not use `accelerator.accumulate`.

    Args:
        model: as it is trained: the one that DistributedDataParallel or `accelerator.prepare` gave
        loader: batches, on the device of the model; the last step has what is left
        gradient_accumulation_steps: micro-batches of a step; those of the accelerator, or 1, by default
        accelerator: your `accelerate.Accelerator`, if you use one
        first: the number of the first step, for schedules of weights: those made before, where a run resumes
        build_context: makes the context of a batch
    """
    if gradient_accumulation_steps is None and accelerator is None:
        gradient_accumulation_steps = deepspeed.accumulation_steps(model)
    elif gradient_accumulation_steps is None:
        gradient_accumulation_steps = accelerator.gradient_accumulation_steps
    size = gradient_accumulation_steps
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise BadInput(f"gradient_accumulation_steps={size!r}: expected a whole number >= 1")
    batches = iter(loader)
    for step in itertools.count(first):
        group = list(itertools.islice(batches, size))
        if not group:
            return
        total = count(model, group, accelerator, build_context=build_context)
        micro = (build_context(model, batch, step=step, count=total) for batch in group)
        yield step, _synchronised_last(model, micro, len(group), accelerator)


def _synchronised_last(
    model: nn.Module, contexts: Iterator[Context], number: int, accelerator: Any
) -> Iterator[Context]:
    for index, ctx in enumerate(contexts, 1):
        manager: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if deepspeed.is_deepspeed(model):
            model.set_gradient_accumulation_boundary(index == number)  # type: ignore[operator]
            if accelerator is not None:  # which sets it again, and steps
                accelerator.gradient_state._set_sync_gradients(index == number)
        elif index < number and accelerator is not None:
            manager = accelerator.no_sync(model)
        elif index < number and isinstance(model, DistributedDataParallel):
            manager = model.no_sync()
        with manager:
            yield ctx
