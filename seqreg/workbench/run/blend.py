"""Weights made of the weights of several models: means, greedy soups, interpolations with the start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from seqreg.errors import BadInput
from seqreg.workbench.scores.evaluate import Scored

BEST = "best"
GRID = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the trained weights that `interpolate="best"` tries; 0, the start itself, is none of them."""
Weights = dict[str, Tensor]
ToScored = Callable[[Weights], Scored]
"""From weights to their scores on the validation set."""


@dataclass(frozen=True)
class Blend:
    """How the weights of runs become those of one model.

    Args:
        greedy: add runs by their validation score, each only if the soup does not become worse; else the mean of all
        interpolate: the share of the trained weights, the rest is the start's; "best" chooses from `GRID` by validation
        ema: take the average of its weights that every run kept while it trained (optimisation.ema_decay)
    """

    greedy: bool = False
    interpolate: float | str | None = None
    ema: bool = False

    def check(self, count: int) -> None:
        """Refuse what is no model, or only that of the one run."""
        share = self.interpolate
        if share is not None and share != BEST and not (isinstance(share, float) and 0 <= share <= 1):
            raise BadInput(f"--interpolate {share}: expected a number from 0 to 1, or {BEST!r}")
        if count < 2 and (self.greedy or not (self.ema or share is not None)):
            raise BadInput("one run: a soup needs at least two; of one there are --interpolate ALPHA and --ema")

    @property
    def chooses(self) -> bool:
        """Whether it looks at validation scores."""
        return self.greedy or self.interpolate == BEST

    def settings(self) -> dict[str, Any]:
        """For the record of the model, by dotted key as the settings of a run."""
        return {f"soup.{key}": value for key, value in asdict(self).items()}

    def title(self, count: int) -> str:
        """In a few words.

        >>> Blend(interpolate=0.5, ema=True).title(1), Blend(greedy=True).title(3)
        ('interpolated ema', 'greedy soup')
        """
        soup = "" if count == 1 else "greedy soup" if self.greedy else "soup"
        return " ".join(filter(None, ["interpolated" * (self.interpolate is not None), "ema" * self.ema, soup]))


@dataclass(frozen=True)
class Blended:
    """Weights, their validation scores if they were looked at, and how they were chosen."""

    weights: Weights
    scored: Scored | None = None
    choice: dict[str, Any] = field(default_factory=dict)


def mean_weights(several: Sequence[Weights]) -> Weights:
    """The mean of every weight, in float32.

    >>> mean_weights([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
    {'w': tensor([2.])}
    """
    totals = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in several[0].items()}
    for weights in several:
        for name, total in totals.items():
            total += weights[name]
    return {name: total / len(several) for name, total in totals.items()}


def interpolated(start: Weights, end: Weights, share: float, kept: Collection[str] = ()) -> Weights:
    """(1 - share) * start + share * end, in float32; `kept` are names that stay as they ended.

    >>> interpolated({"w": torch.tensor(0.0)}, {"w": torch.tensor(2.0)}, 0.25)
    {'w': tensor(0.5000)}
    """
    return {
        name: value if name in kept or share == 1 else (1 - share) * start[name].float() + share * value.float()
        for name, value in end.items()
    }


def greedy_soup(several: Sequence[Weights], score: ToScored, *, greater_is_better: bool = True) -> Blended:
    """Models in the order of their validation scores; each is added if the score of the mean is not worse."""
    alone = [score(weights) for weights in several]
    sign = 1 if greater_is_better else -1
    order = sorted(range(len(several)), key=lambda place: -sign * alone[place].metrics["score"])
    members, best = order[:1], alone[order[0]]
    tried = [{"members": [place], "validation": alone[place].metrics["score"]} for place in order]
    for place in order[1:]:
        candidate = [*members, place]
        scored = score(mean_weights([several[index] for index in candidate]))
        tried.append({"members": candidate, "validation": scored.metrics["score"]})
        if sign * scored.metrics["score"] >= sign * best.metrics["score"]:
            members, best = candidate, scored
    return Blended(mean_weights([several[index] for index in members]), best, {"members": members, "tried": tried})


def best_interpolation(
    start: Weights, end: Weights, kept: Collection[str], score: ToScored, *, greater_is_better: bool = True
) -> Blended:
    """The share of `GRID` with the best validation score; of equal ones the largest."""
    scores = {share: score(interpolated(start, end, share, kept)) for share in GRID}
    sign = 1 if greater_is_better else -1
    best = max(GRID, key=lambda share: (sign * scores[share].metrics["score"], share))
    tried = [{"alpha": share, "validation": scored.metrics["score"]} for share, scored in scores.items()]
    return Blended(interpolated(start, end, best, kept), scores[best], {"alpha": best, "tried": tried})
