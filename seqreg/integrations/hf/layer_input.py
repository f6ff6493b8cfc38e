"""What a pass gave up to the input of a layer, for later passes that begin there.

A later pass runs the model's own forward: the modules below the layer give what they gave before, with its graph, and
the layer is given its input of that time, changed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqreg.errors import BadInput
from seqreg.forward import Dropout, EmbeddingDelta
from seqreg.overrides import generator_state


@dataclass
class _Kept:
    """Of one pass: the outputs of the modules below, the input of the layer, and the generators when it began."""

    outputs: dict[nn.Module, list[Any]]
    inputs: list[tuple[Tensor, tuple[Tensor, Tensor | None]]]
    grad: bool


class LayerInput:
    """Keeps the first unperturbed pass, with dropout and without; under autocast another than without it.

    Args:
        layer: where later passes begin
        below: the modules that come before it, outermost only
        device: of the model
    """

    def __init__(self, layer: nn.Module, below: Sequence[nn.Module], device: torch.device) -> None:
        self.layer, self.below, self.device = layer, below, device
        self._kept: dict[tuple[bool, bool], _Kept] = {}

    def forget(self) -> None:
        """A new clean pass begins: what is kept is of an earlier one."""
        self._kept.clear()

    def _key(self, masks: Dropout) -> tuple[bool, bool]:
        return masks == "off", torch.is_autocast_enabled(self.device.type)

    @contextlib.contextmanager
    def keeping(self, masks: Dropout) -> Iterator[None]:
        """The pass inside is kept: "shared" is the clean one, or one that replays it; "off" has no dropout.

        A later one computes the same again, and perhaps without a graph: the first stays, unless it has none.
        """
        key, grad = self._key(masks), torch.is_grad_enabled()
        if key in self._kept and (self._kept[key].grad or not grad):
            yield
            return
        kept = _Kept({module: [] for module in self.below}, [], grad)

        def keep_output(module: nn.Module, _: Any, output: Any) -> None:
            kept.outputs[module].append(output)

        def keep_input(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            kept.inputs.append((_states(arguments, options), generator_state(self.device)))

        handles = [module.register_forward_hook(keep_output) for module in self.below]
        handles.append(self.layer.register_forward_pre_hook(keep_input, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if any(len(calls) != 1 for calls in (kept.inputs, *kept.outputs.values())):
            raise BadInput("layer: this model does not run each of its layers once per pass: leave layer out")
        self._kept[key] = kept

    def states(self, masks: Dropout) -> Tensor:
        """The input of the layer in the pass that was kept."""
        return self._kept[self._key(masks)].inputs[0][0]

    @contextlib.contextmanager
    def resumed(self, masks: Dropout, delta: EmbeddingDelta, detach: bool = False) -> Iterator[None]:
        """The pass inside begins at the layer, whose input is changed by `delta`.

        Args:
            masks: "shared" draws the dropout masks of the clean pass from there on, "independent" others
            detach: see `seqreg.forward.Perturbation`
        """
        kept = self._kept[self._key(masks)]
        states, generators = kept.inputs[0]

        def change(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if masks == "shared":  # the pass is inside `replay`, which restores them
                torch.set_rng_state(generators[0])
                if generators[1] is not None:
                    torch.get_device_module(self.device).set_rng_state(generators[1], self.device)
            moved = delta(states) if callable(delta) else delta
            changed = ((states.detach() if detach else states) + moved).to(states.dtype)
            return ((changed, *arguments[1:]), options) if arguments else ((), {**options, "hidden_states": changed})

        handle = self.layer.register_forward_pre_hook(change, with_kwargs=True)
        with contextlib.ExitStack() as exits:
            exits.callback(handle.remove)
            for module, (output,) in kept.outputs.items():
                exits.enter_context(_gives(module, output))
            yield


def _states(arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    states: Tensor = arguments[0] if arguments else options["hidden_states"]
    return states


@contextlib.contextmanager
def _gives(module: nn.Module, output: Any) -> Iterator[None]:
    """A call of the module gives this, and runs nothing; what somebody's hook makes of outputs is in it already."""
    before: Callable[..., Any] | None = vars(module).get("forward")
    module.forward = lambda *_, **__: copy.copy(output) if isinstance(output, dict) else output
    last = module.register_forward_hook(lambda *_: output)
    try:
        yield
    finally:
        last.remove()
        del module.forward
        if before is not None:
            module.forward = before
