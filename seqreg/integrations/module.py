"""A `Context` from any torch module, and a loss of any kind.

For heads of your own, pairs of sentences, contrastive and regression losses: whatever gives one number an example (or a
position) can have terms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from seqreg.context import Context, Count, Kind, OutputLoss
from seqreg.engines.detect import engine_of, world_size
from seqreg.engines.shards import Shards
from seqreg.errors import BadInput
from seqreg.forward import Forward, Pass, PassRequest, PerturbationSite
from seqreg.integrations.embedding_hook import Stack, perturbed


class ModuleForward(Forward):
    """Runs any module by a function, and perturbs what its embedding gives.

    Args:
        module: whose parameters learn, and whose dropout policies are set
        outputs: runs the module on one batch, and gives its outputs    # [B, ...]
        embedding: the module that gives embeddings; called once in `outputs`, with all tokens of the batch
        token_mask: True on real tokens; None when all are real         # [rows, S]
        layers: modules whose outputs are the hidden states, for terms that look at every layer
    """

    def __init__(
        self,
        module: nn.Module,
        outputs: Callable[[], Tensor],
        embedding: nn.Module,
        token_mask: Tensor | None = None,
        layers: Sequence[nn.Module] = (),
    ) -> None:
        self.module, self.outputs, self.layers = module, outputs, layers
        self.engine, self.shards = engine_of(module), Shards.of(module)
        if self.engine.startswith("ZeRO"):
            raise BadInput(f"{self.engine}: DeepSpeed cannot be told of the loss of any module: use DDP or FSDP2")
        if self.engine == "tensor parallelism":
            raise BadInput("tensor parallelism has not been tried with the loss of any module: use DDP or FSDP2")
        self.stacks = {"encoder": Stack(embedding, embedding)}
        self.sites = {"encoder": PerturbationSite(mask=None if token_mask is None else token_mask.bool())}

    def run(self, request: PassRequest) -> Pass:
        states: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        if request.hidden and not self.layers:
            raise BadInput("a term looks at the outputs of every layer: pass layers=, such as model.encoder.layer")
        with contextlib.ExitStack() as exits:
            for layer in self.layers if request.hidden else ():
                exits.callback(layer.register_forward_hook(keep).remove)
            embeds = exits.enter_context(perturbed(self.stacks, request.shifts))
            outputs = self.outputs()
        hidden_states = {"encoder": tuple(states)} if request.hidden else {}
        return Pass(outputs, embeds, hidden_states, dtype=embeds.dtype)


def loss_context(
    module: nn.Module,
    outputs: Callable[[], Tensor],
    loss: OutputLoss,
    *,
    mask: Tensor,
    embedding: nn.Module,
    token_mask: Tensor | None = None,
    layers: Sequence[nn.Module] = (),
    kind: Kind = "regression",
    step: int | None = None,
    count: Count | None = None,
) -> Context:
    """One batch of any module with a loss of any kind, ready for a criterion.

    Terms are on when the module is in training mode. Those that compare two outputs need divergence="mse" (and
    inner="mse"), unless `kind` says that the outputs are scores of classes.

    Args:
        module, outputs, embedding, token_mask, layers: see `ModuleForward`
        loss: from outputs to one number an example (or a position), not their mean    # [B, ...] -> [B]
        mask: True on the examples (or positions) that count                           # [B] or [B, T]
        kind: "regression" where outputs are numbers, such as sentence embeddings; "classes" or "tokens" where they are
            scores of classes, of an example or of every position
        step: the number of the optimizer step; schedules need it
        count: what the optimizer step averages over; needed with gradient accumulation and several ranks
    """
    forward = ModuleForward(module, outputs, embedding, token_mask, layers)
    averaged = forward.engine and world_size() > 1
    if count is None and module.training and averaged:
        raise BadInput("several ranks train one model: pass count=, which optimizer_steps and the trainers do")
    return Context(
        forward, None, kind=kind, mask=mask.bool(), step=step, count=count, training=module.training, loss=loss
    )
