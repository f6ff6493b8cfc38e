"""Weights as functions of the optimizer step. A plain number is the constant schedule; schedules nest."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from seqreg.errors import BadInput, yaml_hint

Weight = float | Callable[[int], float]


def weight_at(weight: Weight, step: int | None) -> float:
    """The weight at a step; refuses what no weight can be."""
    at = ""
    if callable(weight):
        if step is None:
            raise BadInput(f"the weight {weight} is a schedule: pass the optimizer step, context(..., step=step)")
        weight, at = weight(step), f" at step {step}"
    if isinstance(weight, str):
        raise BadInput(f"weight={weight!r} is text, not a number{yaml_hint(weight)}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= sys.float_info.max:
        fix = "expected a finite number >= 0"
        raise BadInput(f"weight={weight!r}{at}: {fix}", key="weight", value=weight, fix="" if at else fix)
    return float(weight)


def _check_steps(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(f"{name}={value!r}: expected a whole number >= {least}")


@dataclass(frozen=True)
class Warmup:
    """Linearly from 0 at step `start` to `weight` at step `start + steps`.

    Example:
        >>> [Warmup(2.0, steps=4)(step) for step in (0, 1, 4, 9)]
        [0.0, 0.5, 2.0, 2.0]
    """

    weight: Weight = 1.0
    steps: int = 1000
    start: int = 0

    def __post_init__(self) -> None:
        weight_at(self.weight, 0)
        _check_steps("steps", self.steps, 1)
        _check_steps("start", self.start, 0)

    def __call__(self, step: int) -> float:
        return weight_at(self.weight, step) * min(max((step - self.start) / self.steps, 0.0), 1.0)


@dataclass(frozen=True)
class StartAt:
    """0 before step `start`, `weight` from there on.

    Example:
        >>> [StartAt(2.0, start=3)(step) for step in (0, 2, 3)]
        [0.0, 0.0, 2.0]
    """

    weight: Weight = 1.0
    start: int = 0

    def __post_init__(self) -> None:
        weight_at(self.weight, 0)
        _check_steps("start", self.start, 0)

    def __call__(self, step: int) -> float:
        return weight_at(self.weight, step) if step >= self.start else 0.0


@dataclass(frozen=True)
class Every:
    """`k * weight` at every k-th step and 0 between: the same expected gradient for 1/k of the cost.

    Example:
        >>> [Every(2.0, k=3)(step) for step in (0, 1, 2, 3)]
        [6.0, 0.0, 0.0, 6.0]
    """

    weight: Weight = 1.0
    k: int = 2

    def __post_init__(self) -> None:
        weight_at(self.weight, 0)
        _check_steps("k", self.k, 1)

    def __call__(self, step: int) -> float:
        return self.k * weight_at(self.weight, step) if step % self.k == 0 else 0.0


SCHEDULES: dict[str, type[Warmup | StartAt | Every]] = {"warmup": Warmup, "start_at": StartAt, "every": Every}
