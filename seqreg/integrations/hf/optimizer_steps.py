"""The optimizer steps of a loop of your own: micro-batches with what they are averaged over."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from seqreg.engines import deepspeed
from seqreg.errors import BadInput
from seqreg.integrations.hf.context import ContextBuilder, context, count
from seqreg.integrations.hf.streams import FurtherStream, endless


def optimizer_steps(
    model: nn.Module,
    loader: Iterable[Mapping[str, Any]],
    gradient_accumulation_steps: int | None = None,
    *,
    accelerator: Any = None,
    first: int = 0,
    unlabelled: Iterable[Mapping[str, Any]] | None = None,
    replay: Iterable[Mapping[str, Any]] | None = None,
    build_context: ContextBuilder = context,
) -> Iterator[tuple[int, Iterator[Any]]]:
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
        unlabelled, replay: batches of texts without labels, and of labelled examples of an old task: every micro-batch
            has one of each, and the loader begins again when it ends. Every micro-batch is then a tuple of contexts in
            place of one context: `criterion(*contexts)`
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
    streams: dict[FurtherStream, Iterable[Mapping[str, Any]] | None] = {"replay": replay, "unlabelled": unlabelled}
    further = {name: endless(given, name) for name, given in streams.items() if given is not None}
    for step in itertools.count(first):
        group = list(itertools.islice(batches, size))
        if not group:
            return
        groups = {name: list(itertools.islice(given, len(group))) for name, given in further.items()}
        total = count(model, group, accelerator, build_context=build_context, **groups)
        micro: Iterator[Any] = (build_context(model, batch, step=step, count=total) for batch in group)
        if groups:
            others = (
                [context(model, some[place], step=step, count=total, stream=name) for name, some in groups.items()]
                for place in range(len(group))
            )
            micro = ((ctx, *more) for ctx, more in zip(micro, others, strict=True))
        yield step, _synchronised_last(model, micro, len(group), accelerator)


def _synchronised_last(model: nn.Module, contexts: Iterator[Any], number: int, accelerator: Any) -> Iterator[Any]:
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
