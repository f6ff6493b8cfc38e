"""The encoder's output of one pass, for later passes that change nothing before the decoder.

A pass that perturbs the decoder alone, with the dropout masks of the clean pass or without dropout, would compute what
the unperturbed pass has computed: it is given that output, with its graph, and begins where the decoder begins, with
the generators as they were there. Values and gradients are those of the whole pass.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from seqreg.forward import Dropout, Perturbation
from seqreg.integrations.embedding_hook import Stack
from seqreg.overrides import generator_state, replay


@dataclass(frozen=True)
class _Encoded:
    """What an encoder gave, and what that depends on."""

    output: Any
    generators: tuple[Tensor, Tensor | None]
    inputs: Mapping[str, Any]
    versions: tuple[Any, ...]
    grad: bool


class EncoderReuse:
    """Keeps the output of the first unperturbed pass, with dropout and without."""

    def __init__(self, module: nn.Module, encoder: nn.Module) -> None:
        self.module, self.encoder = module, encoder
        self.device = next(module.parameters()).device
        self._kept: dict[Dropout, _Encoded] = {}

    def forget(self) -> None:
        """A new clean pass begins: what is kept is of an earlier one."""
        self._kept.clear()

    @contextlib.contextmanager
    def __call__(
        self, inputs: Mapping[str, Any], masks: Dropout, shifts: Sequence[Perturbation]
    ) -> Iterator[Mapping[str, Any]]:
        """The inputs of a pass: with the encoder's output where it is known, else they are kept when it is.

        Args:
            masks: "shared" for the clean pass and those that replay it, "off" for those without dropout
            shifts: of the pass
        """
        if torch.is_autocast_enabled(self.device.type) or "encoder_outputs" in inputs:
            yield inputs
        elif not shifts:
            with self._keeping(inputs, masks):
                yield inputs
        elif (encoded := self._usable(inputs, masks, shifts)) is not None:
            with replay(encoded.generators, self.device) if masks == "shared" else contextlib.nullcontext():
                yield {**inputs, "encoder_outputs": encoded.output}
        else:
            yield inputs

    def _usable(self, inputs: Mapping[str, Any], masks: Dropout, shifts: Sequence[Perturbation]) -> _Encoded | None:
        encoded = self._kept.get(masks)
        if any(shift.delta.keys() != {"decoder"} for shift in shifts):
            return None
        return encoded if self._fits(encoded, inputs) else None

    def _fits(self, encoded: _Encoded | None, inputs: Mapping[str, Any]) -> bool:
        """Whether a pass over these inputs would compute the same, with a graph where it needs one."""
        if encoded is None or encoded.inputs is not inputs or encoded.versions != self._versions():
            return False
        return encoded.grad or not torch.is_grad_enabled()

    @contextlib.contextmanager
    def _keeping(self, inputs: Mapping[str, Any], masks: Dropout) -> Iterator[None]:
        """Keep what the encoder gives, if it runs once, in the arithmetic of the weights, and is not known already."""
        if self._fits(self._kept.get(masks), inputs):
            yield
            return
        outputs: list[_Encoded] = []

        def keep(_: nn.Module, __: Any, output: Any) -> None:
            if not torch.is_autocast_enabled(self.device.type):
                state, grad = generator_state(self.device), torch.is_grad_enabled()
                outputs.append(_Encoded(output, state, inputs, self._versions(), grad))

        handle = self.encoder.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()
        if len(outputs) == 1:
            self._kept[masks] = outputs[0]

    def _versions(self) -> tuple[Any, ...]:
        """Changes with every update of the weights, other weights in their place, and the mode of a module."""
        weights = ((parameter.data_ptr(), parameter._version) for parameter in self.module.parameters())
        return *weights, *(module.training for module in self.module.modules())


def takes_encoder_output(module: nn.Module, stacks: Mapping[str, Stack]) -> bool:
    """Whether a model can be given its encoder's output, and its weights are the same in all passes of a step."""
    takes = "encoder_outputs" in inspect.signature(type(module).forward).parameters
    return takes and {"encoder", "decoder"} <= stacks.keys() and not any(map(is_parametrized, module.modules()))


def between(module: nn.Module, encoder: nn.Module) -> Iterator[nn.Module]:
    """The modules between a model and its encoder, outermost first."""
    name = next(name for name, part in module.named_modules() if part is encoder)
    for step in name.split(".")[:-1]:
        module = getattr(module, step)
        yield module


def is_known(module: nn.Module) -> bool:
    """Whether a forward is transformers' own: another may do more to what the encoder gave than to what it is given."""
    return type(module).forward.__module__.startswith("transformers.") and "forward" not in vars(module)
