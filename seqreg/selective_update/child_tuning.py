"""Child-Tuning: a random part of the gradient, or the parameters that matter most to the task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from seqreg.errors import BadInput
from seqreg.selective_update.base import (
    MeasuredUpdate,
    Update,
    by_place,
    check_share,
    check_whole,
    largest,
)


class ChildTuningF(Update):
    """Child-Tuning without a task: a random share of the gradient's entries, scaled up to keep its expectation.

    As in the released code the gradient is masked, not the update: momentum and weight decay still move the rest. The
    masks depend on the seeds and the step alone, so that all ranks have the same.

    Args:
        reserve: share of entries that keep their gradient
        seed: of the masks, beside that of the run
    """

    def __init__(self, reserve: float = 0.3, seed: int = 0) -> None:
        check_share("reserve", reserve)
        check_whole("seed", seed, 0)
        self.reserve, self.seed = reserve, seed
        self.reset()

    def reset(self) -> None:
        self.steps = 0

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        generator = self.generator(self.seed, self.steps)
        for parameter in parameters:
            if parameter.grad is not None:
                kept = torch.bernoulli(torch.full(parameter.shape, self.reserve), generator=generator)
                parameter.grad.mul_((kept / self.reserve).to(parameter.grad))
        self.steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.steps = int(state["steps"])


class ChildTuningD(MeasuredUpdate):
    """Child-Tuning driven by the task: only the entries of the largest Fisher information get a gradient, for good.

    Args:
        reserve: share of all entries of the model, by a single threshold, that keep their gradient
    """

    state_bytes = 1

    def __init__(self, reserve: float = 0.3) -> None:
        check_share("reserve", reserve)
        super().__init__()
        self.reserve = reserve

    def reset(self) -> None:
        super().reset()
        self.masks: dict[int, Tensor] = {}

    @property
    def wants_measuring(self) -> bool:
        return not self.masks and not self.squares

    def measure(self, parameters: Iterable[nn.Parameter]) -> None:
        super().measure(parameters)
        self.masks = {}

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        if not self.masks:
            if not self.squares:
                raise BadInput(
                    "ChildTuningD has measured nothing: call measure(model.parameters()) after backward first"
                )
            chosen = largest(torch.cat([value.flatten() for value in self.squares.values()]), self.reserve)
            pieces = torch.split(chosen, [value.numel() for value in self.squares.values()])
            self.masks = {
                i: piece.reshape(self.squares[i].shape) for i, piece in zip(self.squares, pieces, strict=True)
            }
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None:  # what was never measured has no information
                mask = self.masks.get(i, torch.zeros((), dtype=torch.bool))
                parameter.grad.mul_(mask.to(parameter.device))

    def state_dict(self) -> dict[str, Tensor]:
        return {f"mask/{i}": mask for i, mask in self.masks.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.masks = by_place(state, "mask")
