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

from seqreg.engines.detect import is_sharded
from seqreg.errors import BadInput


def _check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise BadInput(f"{name}={value!r}: expected a number in (0, 1]")


def _check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise BadInput(f"{name}={value!r}: expected a whole number >= {least}")


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
        """After backward, before the step. All parameters, always in the same order, also those without a gradient."""

    def after(self, parameters: list[nn.Parameter]) -> None:  # noqa: B027 - most have nothing to do
        """After the step."""

    @contextlib.contextmanager
    def around(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Inside, call `optimizer.step()` once."""
        everything = list(parameters)
        if any(is_sharded(parameter) for parameter in everything):
            raise BadInput(f"{type(self).__name__}: parameters are sharded, and it chooses among whole ones: use DDP")
        self.before(everything)
        yield
        self.after(everything)

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise BadInput(f"{type(self).__name__} has no state, and was given one")


class SelectiveUpdate(Update):
    """UEGR's backward stage: only the most salient entries of every tensor change.

    Saliency is the square of the gradient, summed since the mask was last chosen. Entries outside the mask truly stay
    still: masking gradients would not do that, because Adam's momentum and weight decay still move them; so their
    values are put back after the step. A tensor that first has a gradient between two choices is given a mask then.

    Args:
        ratio: share of the entries of every tensor that may change
        refresh: choose the masks anew every so many steps
    """

    def __init__(self, ratio: float = 0.3, refresh: int = 1) -> None:
        _check_share("ratio", ratio)
        _check_whole("refresh", refresh, 1)
        self.ratio, self.refresh, self.steps = ratio, refresh, 0
        self.saliency: dict[int, Tensor] = {}  # by the place of a parameter among all of the model's
        self.masks: dict[int, Tensor] = {}
        self._kept: dict[int, Tensor] = {}

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        live = {i: p for i, p in enumerate(parameters) if p.grad is not None}
        for i, parameter in live.items():
            assert parameter.grad is not None
            square = parameter.grad.float().square()
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
        self.saliency, self.masks = (
            {int(key.partition("/")[2]): value for key, value in state.items() if key.startswith(f"{kind}/")}
            for kind in ("saliency", "mask")
        )


class ChildTuningF(Update):
    """Child-Tuning without a task: a random share of the gradient's entries, scaled up to keep its expectation.

    As in the released code the gradient is masked, not the update: momentum and weight decay still move the rest. The
    masks depend on the seed and the step alone, so that all ranks have the same.

    Args:
        reserve: share of entries that keep their gradient
        seed: of the masks
    """

    def __init__(self, reserve: float = 0.3, seed: int = 0) -> None:
        _check_share("reserve", reserve)
        _check_whole("seed", seed, 0)
        self.reserve, self.seed, self.steps = reserve, seed, 0

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        generator = torch.Generator().manual_seed(self.seed + self.steps)
        for parameter in parameters:
            if parameter.grad is not None:
                kept = torch.bernoulli(torch.full(parameter.shape, self.reserve), generator=generator)
                parameter.grad.mul_((kept / self.reserve).to(parameter.grad))
        self.steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.steps = int(state["steps"])


class ChildTuningD(Update):
    """Child-Tuning driven by the task: only the entries of the largest Fisher information get a gradient, for good.

    The trainers measure it on the training set before the first step. In a loop of your own, call `measure` after the
    backward pass of every batch of the training set, then train.

    Args:
        reserve: share of all entries of the model, by a single threshold, that keep their gradient
    """

    def __init__(self, reserve: float = 0.3) -> None:
        _check_share("reserve", reserve)
        self.reserve = reserve
        self.fisher: dict[int, Tensor] = {}
        self.masks: dict[int, Tensor] = {}

    @torch.no_grad()
    def measure(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the squares of the present gradients to the Fisher information."""
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None:
                square = parameter.grad.float().square()
                self.fisher[i] = self.fisher[i] + square if i in self.fisher else square
        self.masks = {}

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        if not self.masks:
            if not self.fisher:
                raise BadInput(
                    "ChildTuningD has measured nothing: call measure(model.parameters()) after backward first"
                )
            chosen = largest(torch.cat([value.flatten() for value in self.fisher.values()]), self.reserve)
            pieces = torch.split(chosen, [value.numel() for value in self.fisher.values()])
            self.masks = {i: piece.reshape(self.fisher[i].shape) for i, piece in zip(self.fisher, pieces, strict=True)}
        for i, parameter in enumerate(parameters):
            if parameter.grad is not None:  # what was never measured has no information
                mask = self.masks.get(i, torch.zeros((), dtype=torch.bool))
                parameter.grad.mul_(mask.to(parameter.device))

    def state_dict(self) -> dict[str, Tensor]:
        return {f"mask/{i}": mask for i, mask in self.masks.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.masks = {int(key.partition("/")[2]): mask for key, mask in state.items()}
