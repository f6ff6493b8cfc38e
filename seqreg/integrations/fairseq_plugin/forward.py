"""Passes of a fairseq model on one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from seqreg.errors import BadInput
from seqreg.forward import Forward, Pass, PassRequest, PerturbationSite
from seqreg.fused.head import Projection
from seqreg.integrations.embedding_hook import Stack, perturbed
from seqreg.integrations.fairseq_plugin import model as fs


class FairseqForward(Forward):
    """Runs a fairseq model, wrapped or not, on the `net_input` of a sample.

    Args:
        head: the name of a classification head; None for a model that gives a distribution a token
    """

    checkpointing, reentrant_fix = "--checkpoint-activations", "leave it out"
    dropouts = (*Forward.dropouts, FairseqDropout)

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], head: str | None = None) -> None:
        self.model, self.inputs = model, dict(inputs)
        self.module = module = fs.unwrap(model)
        self.stacks = fs.stacks(module)
        read = {"encoder": "src_tokens", "decoder": "prev_output_tokens" if "encoder" in self.stacks else "src_tokens"}
        for name in self.stacks:
            if not isinstance(self.inputs.get(read[name]), Tensor):
                raise BadInput(
                    f"a sample has no {read[name]}, which the {name} reads: is --add-prev-output-tokens missing?"
                )
        self.sites = {
            name: PerturbationSite(stack.outer, self.inputs[read[name]].ne(fs.padding(stack)))
            for name, stack in self.stacks.items()
        }
        self.drops_layers = module.training and fs.drops_layers(module)
        self.ragged = self.drops_layers and model is not module
        self.reentrant = self.recomputes = module.training and fs.checkpoints(module)
        if self.recomputes:
            self.no_double_backward = "--checkpoint-activations has no second derivatives: leave it out"
        sizes = {len(value) for value in self.inputs.values() if isinstance(value, Tensor)}
        self.batch_size = sizes.pop() if len(sizes) == 1 else None
        self.projection = fs.head_of(model, module) if head is None else None
        self.options: dict[str, Any] = {}
        if head is not None:
            self.options = {"features_only": True, "classification_head_name": head}
        elif self.projection is not None:
            self.options = {"features_only": True}

    def run(self, request: PassRequest) -> Pass:
        inputs, rows, hidden = self.inputs, request.rows, request.hidden
        if rows is not None:
            inputs = {key: value[rows] if isinstance(value, Tensor) else value for key, value in inputs.items()}
        options = {**self.options, "return_all_hiddens": True} if hidden else self.options
        with contextlib.ExitStack() as exits:
            embeds = exits.enter_context(perturbed(self.stacks, request.shifts))
            states = exits.enter_context(_layers(self.stacks)) if hidden else {}
            output, _ = (self.module if self.observing else self.model)(**inputs, **options)
        if self.projection is None:
            return Pass(output, embeds, states, dtype=embeds.dtype, rows=rows)
        projection = _project(output, self.projection)
        return Pass(projection.logits, embeds, states, dtype=embeds.dtype, projection=projection, rows=rows)


def _project(states: Tensor, head: nn.Linear) -> Projection:
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    return Projection(states, head.weight, head.bias, dtype, torch.is_grad_enabled())


@contextlib.contextmanager
def _layers(stacks: Mapping[str, Stack]) -> Iterator[dict[str, tuple[Tensor, ...]]]:
    """The outputs of the layers of every stack that runs inside, [B, S, D] each."""
    found: dict[str, tuple[Tensor, ...]] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            states = output["encoder_states"] if isinstance(output, dict) else output[1]["inner_states"]
            found[name] = tuple(state.transpose(0, 1) for state in states[1:])  # the first is what the stack consumes

        return hook

    handles = [stack.module.register_forward_hook(keep(name)) for name, stack in stacks.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
