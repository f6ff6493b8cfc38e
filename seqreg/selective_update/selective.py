"""Only the most salient entries of every tensor move."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from seqreg.selective_update.base import (
    Update,
    by_place,
    check_share,
    check_whole,
    largest,
)


class SelectiveUpdate(Update):
    """Only the most salient entries of every tensor change: a harder reading of UEGR's backward stage.

    Saliency is the square of the gradient, summed since the mask was last chosen. Entries outside the mask truly stay
    still: masking gradients would not do that, because Adam's momentum and weight decay still move them; so their
    values are put back after the step. A tensor that first has a gradient between two choices is given a mask then.

    Args:
        ratio: share of the entries of every tensor that may change
        refresh: choose the masks anew every so many steps
    """

    state_bytes = 5

    def __init__(self, ratio: float = 0.3, refresh: int = 1) -> None:
        check_share("ratio", ratio)
        check_whole("refresh", refresh, 1)
        self.ratio, self.refresh = ratio, refresh
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.saliency: dict[int, Tensor] = {}  # by the place of a parameter among all of the model's
        self.masks: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        live = {i: p for i, p in enumerate(parameters) if p.grad is not None}
        for i, parameter in live.items():
            assert parameter.grad is not None
            square = parameter.grad.float().square().nan_to_num_(0, 0, 0)  # of a step that float16 will skip
            self.saliency[i] = self.saliency[i].to(square.device) + square if i in self.saliency else square
        if self.steps % self.refresh == 0:
            self.masks = {i: largest(saliency, self.ratio) for i, saliency in self.saliency.items()}
            self.saliency = {}
        for i, parameter in live.items():
            if i not in self.masks:
                self.masks[i] = largest(self.saliency[i], self.ratio)
            self.masks[i] = self.masks[i].to(parameter.device)
        self._kept = {i: parameter.detach().clone() for i, parameter in live.items()}
        self.steps += 1

    @torch.no_grad()
    def after(self, parameters: list[nn.Parameter]) -> None:
        for i, kept in self._kept.items():
            parameters[i].copy_(torch.where(self.masks[i], parameters[i], kept))
        self._kept = {}

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "steps": torch.tensor(self.steps),
            **{f"saliency/{i}": value for i, value in self.saliency.items()},
            **{f"mask/{i}": value for i, value in self.masks.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.steps = int(state["steps"])
        self.saliency, self.masks = by_place(state, "saliency"), by_place(state, "mask")
