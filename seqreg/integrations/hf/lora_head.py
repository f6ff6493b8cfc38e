"""A language-model head with a LoRA adapter is one wider linear head: x W' + s (x A') B' = [x, s x A'] [W, B]'.

Nothing is merged, so that in low precision what the adapter adds is not rounded away beside W, and its dropout stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LoraHead:
    """The head of one batch: its passes share one weight, [W, B].

    Args:
        layer: `peft.tuners.lora.Linear`
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._weight: Tensor | None = None
        self._made_of: tuple[int, ...] = ()

    @staticmethod
    def fits(head: Any) -> bool:
        """Whether a head is a linear layer with one plain LoRA adapter; not DoRA's, which normalises the sum."""
        if not hasattr(head, "lora_A") or type(getattr(head, "base_layer", None)) is not nn.Linear:
            return False
        active = [name for name in head.active_adapters if name in head.lora_A]
        if len(active) != 1 or len(head.active_adapters) != 1 or head.merged or active[0] in head.lora_variant:
            return False
        return all(type(part[active[0]]) is nn.Linear and part[active[0]].bias is None for part in _parts(head))

    def __call__(self, states: Tensor, *, fresh: bool = False) -> tuple[Tensor, Tensor]:
        """The wider states, [B, T, D + r], and the weight, [V, D + r]; those of the layer where adapters are disabled.

        Args:
            fresh: the weights are exchanged for this pass, and the weight is of no use to others
        """
        layer, base = self.layer, self.layer.base_layer.weight
        if layer.disable_adapters:
            return states, base
        name = layer.active_adapters[0]
        down, up = (part[name] for part in _parts(layer))
        low = down(layer.lora_dropout[name](states.to(down.weight.dtype))) * layer.scaling[name]
        wide = torch.cat([states, low.to(states.dtype)], -1)
        return wide, _joined(base, up.weight) if fresh else self._shared(base, up.weight)

    def _shared(self, base: Tensor, up: Tensor) -> Tensor:
        made_of = (id(base), base._version, id(up), up._version)  # an optimizer's step makes it anew
        if self._weight is None or self._made_of != made_of:
            self._weight, self._made_of = _joined(base, up), made_of
        return self._weight


def _parts(layer: Any) -> tuple[Any, Any]:
    return layer.lora_A, layer.lora_B


def _joined(base: Tensor, up: Tensor) -> Tensor:
    with torch.enable_grad():  # the first pass of a step may be one without
        return torch.cat([base, up], 1)
