"""RoAST's selective update: a gradient is kept with a probability that grows with its parameter's importance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from seqreg.errors import BadInput
from seqreg.selective_update.base import (
    MeasuredUpdate,
    by_place,
    check_choice,
    check_number,
    check_whole,
    layer_places,
)

PIECE = 2**22
"""Entries that are looked at together where all entries of a model are ranked."""


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
        check_number("alpha", alpha, 0, 1)
        check_number("beta", beta, 0, 1000)
        if refresh != "epoch":
            check_whole("refresh", refresh, 1, ", or 'epoch'")
        check_choice("start", start, "measure", "plain")
        check_choice("scope", scope, "layers", "all")
        check_number("floor", floor, 1e-8, 1)
        check_whole("seed", seed, 0)
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
            check_whole("steps_per_epoch", steps_per_epoch, 1)
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
        self.squares, self.factors = by_place(state, "squares"), by_place(state, "factor")
