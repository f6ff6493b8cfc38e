"""What happens between backward and the optimizer's step: selective updates.

Used around the step, in a loop of your own or by the trainers (`update=`):

    update.begin(model, steps_per_epoch=len(loader))
    with update.around(model.parameters()):
        optimizer.step()
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from seqreg.engines.detect import is_sharded
from seqreg.errors import BadInput

PIECE = 2**22
"""Entries that are looked at together where all entries of a model are ranked."""


def _refuse(name: str, value: object, fix: str) -> NoReturn:
    raise BadInput(f"{name}={value!r}: {fix}", key=name, value=value, fix=fix)


def _check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        _refuse(name, value, "expected a number in (0, 1]")


def _check_whole(name: str, value: object, least: int, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        _refuse(name, value, f"expected a whole number >= {least}{otherwise}")


def _check_number(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        _refuse(name, value, f"expected a number from {least:g} to {most:g}")


def _check_choice(name: str, value: str, *choices: str) -> None:
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


def _by_place(state: Mapping[str, Tensor], kind: str) -> dict[int, Tensor]:
    return {int(key.partition("/")[2]): value for key, value in state.items() if key.startswith(f"{kind}/")}


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
        _check_share("ratio", ratio)
        _check_whole("refresh", refresh, 1)
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
        self.saliency, self.masks = _by_place(state, "saliency"), _by_place(state, "mask")


class ChildTuningF(Update):
    """Child-Tuning without a task: a random share of the gradient's entries, scaled up to keep its expectation.

    As in the released code the gradient is masked, not the update: momentum and weight decay still move the rest. The
    masks depend on the seeds and the step alone, so that all ranks have the same.

    Args:
        reserve: share of entries that keep their gradient
        seed: of the masks, beside that of the run
    """

    def __init__(self, reserve: float = 0.3, seed: int = 0) -> None:
        _check_share("reserve", reserve)
        _check_whole("seed", seed, 0)
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


class StochasticUpdate(MeasuredUpdate):
    """RoAST's selective update, and UEGR's backward stage as we read it: important entries are updated more often.

    Every entry of the gradient is kept with a probability that grows with the rank of its squared gradient among all
    entries of the model, and scaled up by it, so that the gradient stays what it is on average:

        r = rank(s) / (n - 1),   p = sigmoid(2 beta (r - alpha)),   m ~ Bernoulli(p),   g <- g * m / p

    s sums the squared gradients of the steps since the last draw, before they are masked; entries of equal s are ranked
    in the order of the model's parameters. One draw of m holds until the next. As in RoAST the gradient is masked, not
    the update: momentum and weight decay still move the rest. Trainers clip the gradient before it is masked. p is
    never below `floor`, and m is drawn by that p: at 1e-8 this changes nothing in RoAST's settings, whose least p is
    1.5e-8, and 1 / p stays finite.

    Cost of a draw: one sort of all n entries on the CPU, about 30 n bytes of main memory and 8 s per 10^8 entries.
    Between draws 8 n bytes are held on the device and in checkpoints, and the gradients are read twice in every step.

    Args:
        alpha, beta: where p is 1/2, and how steeply it grows. RoAST has 0.6 and 1 for NLI (p from 0.23 to 0.69), which
            is the default, and 0.9 and 10 for sentiment (about a tenth of the entries, nearly always the same)
        refresh: draw anew every "epoch", as RoAST does, or every so many steps
        start: what the first draw is made from. "measure": as in RoAST, a pass over the training set before the first
            step (but over no more examples than are used until the second draw, or the end of the run); "plain":
            nothing, the gradient is left alone until the second draw is due
        scope: "layers", as in RoAST: embeddings, pooler and head are always updated; or "all" parameters
        floor: the least p
        seed: of the masks, beside that of the run
    """

    state_bytes = 8

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float = 1.0,
        refresh: int | Literal["epoch"] = "epoch",
        start: Literal["measure", "plain"] = "measure",
        scope: Literal["layers", "all"] = "layers",
        floor: float = 1e-8,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_number("alpha", alpha, 0, 1)
        _check_number("beta", beta, 0, 1000)
        if refresh != "epoch":
            _check_whole("refresh", refresh, 1, ", or 'epoch'")
        _check_choice("start", start, "measure", "plain")
        _check_choice("scope", scope, "layers", "all")
        _check_number("floor", floor, 1e-8, 1)
        _check_whole("seed", seed, 0)
        self.alpha, self.beta, self.refresh, self.start, self.scope = alpha, beta, refresh, start, scope
        self.floor, self.seed = floor, seed
        self.interval = 0
        self.places: set[int] = set()

    def reset(self) -> None:
        super().reset()
        self.steps = 0
        self.factors: dict[int, Tensor] = {}  # m / p

    def begin(self, model: nn.Module, *, steps_per_epoch: int | None = None, seed: int = 0) -> None:
        super().begin(model, steps_per_epoch=steps_per_epoch, seed=seed)
        trained = {i for i, parameter in enumerate(model.parameters()) if parameter.requires_grad}
        self.places = trained & layer_places(model) if self.scope == "layers" else trained
        if not self.places:
            raise BadInput(
                f"scope={self.scope!r}: {type(model).__name__} trains no parameter there; 'all' takes every one"
            )
        if self.refresh != "epoch":
            self.interval = self.refresh
        elif steps_per_epoch is None:
            raise BadInput("refresh='epoch': the steps of an epoch are not known: set a number of steps instead")
        else:
            _check_whole("steps_per_epoch", steps_per_epoch, 1)
            self.interval = steps_per_epoch

    @property
    def wants_measuring(self) -> bool:
        return self.start == "measure" and not self.steps and not self.squares

    @property
    def measured_steps(self) -> int | None:
        return self.interval

    def probabilities(self, squares: Tensor) -> Tensor:
        """p of every entry, from its rank among all of them."""  # squares, and the result: [n] float32, on the CPU
        number, probabilities = squares.numel(), torch.empty_like(squares)
        order = torch.argsort(squares.view(torch.int32), stable=True)  # as for floats >= 0, several times as fast
        for first in range(0, number, PIECE):
            entries = order[first : first + PIECE]
            rank = torch.arange(first, first + len(entries), dtype=torch.float64) / max(1, number - 1)
            probabilities[entries] = torch.sigmoid(2 * self.beta * (rank - self.alpha)).clamp_min(self.floor).float()
        return probabilities

    def draw(self) -> None:
        """Draw the masks from the squares, and forget these."""
        squares = dict(sorted(self.squares.items()))
        self.squares = {}
        probabilities = self.probabilities(torch.cat([values.flatten().cpu() for values in squares.values()]))
        pieces = torch.split(probabilities, [values.numel() for values in squares.values()])
        generator = self.generator(self.seed, self.steps)
        self.factors = {}
        for (i, values), p in zip(squares.items(), pieces, strict=True):  # float64: p may be less than 2^-24
            kept = torch.rand(len(p), dtype=torch.float64, generator=generator) < p
            self.factors[i] = (kept / p).reshape(values.shape).to(values.device)

    def gradients(self, parameters: Iterable[nn.Parameter]) -> dict[int, Tensor]:
        if not self.places:
            raise BadInput("StochasticUpdate: call begin(model, steps_per_epoch=...) before the first step")
        return {i: gradient for i, gradient in super().gradients(parameters).items() if i in self.places}

    @torch.no_grad()
    def before(self, parameters: list[nn.Parameter]) -> None:
        gradients = self.gradients(parameters)
        if self.steps % self.interval == 0 and self.squares:
            self.draw()
        self.add_squares(gradients)
        for i, gradient in gradients.items():
            if i in self.factors:  # the others had no gradient before the draw
                self.factors[i] = self.factors[i].to(gradient.device)
                gradient.mul_(self.factors[i])
        self.steps += 1

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "steps": torch.tensor(self.steps),
            **{f"squares/{i}": value for i, value in self.squares.items()},
            **{f"factor/{i}": value for i, value in self.factors.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.steps = int(state["steps"])
        self.squares, self.factors = _by_place(state, "squares"), _by_place(state, "factor")


class ChildTuningD(MeasuredUpdate):
    """Child-Tuning driven by the task: only the entries of the largest Fisher information get a gradient, for good.

    Args:
        reserve: share of all entries of the model, by a single threshold, that keep their gradient
    """

    state_bytes = 1

    def __init__(self, reserve: float = 0.3) -> None:
        _check_share("reserve", reserve)
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
        self.masks = _by_place(state, "mask")
