"""What every change of the optimizer's step has: its place around the step, its state, its checks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from seqreg.engines.detect import is_sharded
from seqreg.errors import BadInput


def _refuse(name: str, value: object, fix: str) -> NoReturn:
    raise BadInput(f"{name}={value!r}: {fix}", key=name, value=value, fix=fix)


def check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        _refuse(name, value, "expected a number in (0, 1]")


def check_whole(name: str, value: object, least: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        _refuse(name, value, f"expected a whole number >= {least}{otherwise}")


def check_number(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        _refuse(name, value, f"expected a number from {least:g} to {most:g}")


def check_choice(name: str, value: str, *choices: str) -> None:
    if value not in choices:
        _refuse(name, value, f"expected {' or '.join(map(repr, choices))}")


def largest(saliency: Tensor, ratio: float) -> Tensor:
    """True on exactly max(1, round(ratio * n)) of the n entries, those of the largest saliency."""
    count = max(1, round(ratio * saliency.numel()))
    chosen = torch.zeros(saliency.numel(), dtype=torch.bool, device=saliency.device)
    chosen[saliency.flatten().topk(count).indices] = True
    return chosen.reshape(saliency.shape)


def layer_places(model: nn.Module) -> set[int]:
    """The places, among all parameters of a model, of those inside its encoder and decoder layers.

    A layer is an item of an `nn.ModuleList`, as in transformers, fairseq and torch. Embedding tables are left out also
    there (T5's relative positions); embeddings, poolers and heads are outside.
    """
    lists = (part for part in model.modules() if isinstance(part, nn.ModuleList))
    inside = {
        id(parameter)
        for layers in lists
        if not isinstance(layers, ParametrizationList)  # the raw weight of a normalised head
        for part in layers.modules()
        if not isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
    }
    return {i for i, parameter in enumerate(model.parameters()) if id(parameter) in inside}


class Update(ABC):
    """Changes one optimizer step."""

    run_seed = 0
    state_bytes = 0
    """Of a checkpoint, at most, per entry of the model."""

    def begin(self, model: nn.Module, *, steps_per_epoch: int | None = None, seed: int = 0) -> None:
        """Before the first step of a run, also of a resumed one. The trainers call it.

        Args:
            model: whose parameters are given to `before` and `after`
            steps_per_epoch: optimizer steps in a pass over the training set, where that is known
            seed: of the run: runs of other seeds draw other masks
        """
        self.run_seed = seed

    def generator(self, seed: int, step: int) -> torch.Generator:
        """Random numbers of a step: the same on all ranks and devices, and in a resumed run."""
        return torch.Generator().manual_seed((seed + step + self.run_seed * 0x9E3779B97F4A7C15) % 2**63)

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

    def reset(self) -> None:  # noqa: B027 - some keep nothing
        """Forget all that is kept from step to step: a new run begins."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            raise BadInput(f"{type(self).__name__} has no state, and was given one")


def by_place(state: Mapping[str, Tensor], kind: str) -> dict[int, Tensor]:
    return {int(key.partition("/")[2]): value for key, value in state.items() if key.startswith(f"{kind}/")}


class MeasuredUpdate(Update):
    """An update by squared gradients, which are first those of a pass over the training set.

    The trainers make that pass, of the base loss, before the first step. In a loop of your own, call `measure` after
    the backward pass of every batch, then train. A batch whose gradient is not finite is not counted.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.squares: dict[int, Tensor] = {}  # by the place of a parameter among all of the model's

    @property
    @abstractmethod
    def wants_measuring(self) -> bool:
        """Whether `measure` should be called before the first step, and has not been."""

    @property
    def measured_steps(self) -> int | None:
        """How many steps' examples are measured; None for the whole training set."""
        return None

    @torch.no_grad()
    def measure(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the squares of the present gradients."""
        self.add_squares(self.gradients(parameters))

    def gradients(self, parameters: Iterable[nn.Parameter]) -> dict[int, Tensor]:
        """Those that the update is about, by place."""
        return {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}

    def add_squares(self, gradients: Mapping[int, Tensor]) -> None:
        for i, gradient in gradients.items():
            if type(gradient) is not Tensor:
                raise BadInput(
                    f"{type(self).__name__}: parameter {i} is sharded: its entries cannot be ranked; use DDP"
                )
        sums = [gradient.float().square().sum().cpu() for gradient in gradients.values()]
        if not sums or not bool(torch.stack(sums).isfinite().all()):
            return
        for i, gradient in gradients.items():
            if i not in self.squares:
                self.squares[i] = torch.zeros_like(gradient, dtype=torch.float32)
            self.squares[i] = self.squares[i].to(gradient.device).addcmul_(gradient.float(), gradient.float())
