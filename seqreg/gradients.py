"""What happens between backward and the optimizer's step: selective updates.

Used around the step, in a loop of your own or by the trainers (`update=`):

    with update.around(model.parameters()):
        optimizer.step()
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from seqreg.errors import BadInput


def _check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise BadInput(f"{name}={value!r}: expected a number in (0, 1]")


def largest(saliency: Tensor, ratio: float) -> Tensor:
    """True on exactly max(1, round(ratio * n)) of the n entries, those of the largest saliency."""
    count = max(1, round(ratio * saliency.numel()))
    chosen = torch.zeros(saliency.numel(), dtype=torch.bool, device=saliency.device)
    chosen[saliency.flatten().topk(count).indices] = True
    return chosen.reshape(saliency.shape)


class Update(ABC):
    """Changes one optimizer step."""

    @abstractmethod
    def before(self, parameters: list[nn.Parameter]) -> None:
        """After backward, before the step."""

    def after(self, parameters: list[nn.Parameter]) -> None:  # noqa: B027 - most have nothing to do
        """After the step."""

    @contextlib.contextmanager
    def around(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Inside, call `optimizer.step()` once."""
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        self.before(trained)
        yield
        self.after(trained)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise BadInput(f"{type(self).__name__} has no state, and was given one")


class SelectiveUpdate(Update):
    """UEGR's backward stage: only the most salient entries of every tensor change.

    Saliency is the square of the gradient, summed since the mask was last chosen. Entries outside the mask truly stay
    still: masking gradients would not do that, because Adam's momentum and weight decay still move them; so their
    values are put back after the step.

    Args:
        ratio: share of the entries of every tensor that may change
        refresh: choose the mask anew every so many steps
    """

    def __init__(self, ratio: float = 0.3, refresh: int = 1) -> None:
        _check_share("ratio", ratio)
        if isinstance(refresh, bool) or not isinstance(refresh, int) or refresh < 1:
            raise BadInput(f"refresh={refresh!r}: expected a whole number >= 1")
        self.ratio, self.refresh, self.steps = ratio, refresh, 0
        self.saliency: list[Tensor] = []
        self.masks: list[Tensor] = []
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        squares = [p.grad.float().square() for p in parameters if p.grad is not None]
        if self.saliency and [s.shape for s in self.saliency] != [s.shape for s in squares]:
            raise BadInput(
                "the parameters that have gradients changed between two steps: SelectiveUpdate cannot follow"
            )
        self.saliency = (
            [a.to(b.device) + b for a, b in zip(self.saliency, squares, strict=True)] if self.saliency else squares
        )
        if self.steps % self.refresh == 0:
            self.masks = [largest(saliency, self.ratio) for saliency in self.saliency]
            self.saliency = [torch.zeros_like(saliency) for saliency in self.saliency]
        self.masks = [mask.to(p.device) for mask, p in zip(self.masks, parameters, strict=True)]
        self._kept = [p.detach().clone() for p in parameters]
        self.steps += 1

    @torch.no_grad()
    def after(self, parameters: list[nn.Parameter]) -> None:
        for parameter, kept, mask in zip(parameters, self._kept, self.masks, strict=True):
            parameter.copy_(torch.where(mask, parameter, kept))
        self._kept = []

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "steps": torch.tensor(self.steps),
            **{f"saliency/{i}": value for i, value in enumerate(self.saliency)},
            **{f"mask/{i}": value for i, value in enumerate(self.masks)},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.steps = int(state["steps"])
        numbers = range(sum(key.startswith("mask/") for key in state))
        self.saliency = [state[f"saliency/{i}"] for i in numbers]
        self.masks = [state[f"mask/{i}"] for i in numbers]


class ChildTuningF(Update):
    """Child-Tuning without a task: a random share of the gradient's entries, scaled up to keep its expectation.

    As in the released code the gradient is masked, not the update: momentum and weight decay still move the rest.

    Args:
        reserve: share of entries that keep their gradient
    """

    def __init__(self, reserve: float = 0.3) -> None:
        _check_share("reserve", reserve)
        self.reserve = reserve

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            kept = torch.bernoulli(torch.full_like(parameter.grad, self.reserve))
            parameter.grad.mul_(kept / self.reserve)


class ChildTuningD(Update):
    """Child-Tuning driven by the task: only the entries of the largest Fisher information get a gradient, for good.

    Call `measure` after the backward pass of every batch of the training set, then train.

    Args:
        reserve: share of all entries of the model, by a single threshold, that keep their gradient
    """

    def __init__(self, reserve: float = 0.3) -> None:
        _check_share("reserve", reserve)
        self.reserve = reserve
        self.fisher: list[Tensor] = []
        self.masks: list[Tensor] = []

    @torch.no_grad()
    def measure(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the squares of the present gradients to the Fisher information."""
        squares = [p.grad.float().square() for p in parameters if p.grad is not None]
        self.fisher = [a + b for a, b in zip(self.fisher, squares, strict=True)] if self.fisher else squares
        self.masks = []

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        if not self.masks:
            if not self.fisher:
                raise BadInput(
                    "ChildTuningD has measured nothing: call measure(model.parameters()) after backward first"
                )
            together = torch.cat([value.flatten() for value in self.fisher])
            chosen = largest(together, self.reserve)
            pieces = torch.split(chosen, [value.numel() for value in self.fisher])
            self.masks = [piece.reshape(value.shape) for piece, value in zip(pieces, self.fisher, strict=True)]
        for parameter, mask in zip(parameters, self.masks, strict=True):
            assert parameter.grad is not None
            parameter.grad.mul_(mask.to(parameter.device))

    def state_dict(self) -> dict[str, Tensor]:
        return {f"mask/{i}": mask for i, mask in enumerate(self.masks)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.masks = [state[f"mask/{i}"] for i in range(len(state))]
