"""What a user is told about a term in its first steps: that it does nothing, or more than the task itself."""

from __future__ import annotations

import warnings
from collections import Counter

import torch
from torch import Tensor

from seqreg.errors import Advice
from seqreg.term import Term

STEPS = 10
"""Losses of a term that are looked at."""
ROUNDING = 8.0
"""A term of fewer units in the last place of the base loss than this does nothing."""


class Advisor:
    """Looks at the first losses of every term; says each thing once, on the first rank."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._said: set[tuple[str, str]] = set()
        self._base = 0.0  # of the last batch that had labels

    def look(self, term: Term, weight: float, value: Tensor, base: Tensor) -> None:
        """Compare a term with the base loss of the same batch.

        Args:
            weight: at this step
            value: unweighted, without the task losses of further passes that it may hold
            base: the part of the base loss; 0 where there is none, and the last one counts
        """
        self._seen[term.name] += 1
        if self._seen[term.name] > STEPS or not _first_rank():
            return
        size, amount, task = abs(float(value)), weight * float(value), float(base) or self._base
        if not task > 0:
            return
        self._base = task
        meant = size if callable(term.weight) else abs(amount)  # a schedule may begin at next to nothing
        if self._seen[term.name] == 1 and not term.hints.starts_at_zero and negligible(meant, base, task):
            text = f"it is {meant:.1e} beside a base loss of {task:.3g}, so it does nothing on this model and batch"
            self.say(term.name, "nothing", f"{text}: {term.hints.remedy}")
        if amount > task:
            text = f"it is {amount:.3g}, {amount / task:.1f} times the base loss of {task:.3g}"
            self.say(term.name, "too much", f"{text}, and may undo what pre-training learned: {term.hints.gentler}")

    def say(self, name: str, what: str, text: str, category: type[Warning] = Advice) -> None:
        """Warn, if this criterion has not said so before; what another one has said does not count."""
        if (name, what) not in self._said and _first_rank():
            self._said.add((name, what))
            warnings.warn_explicit(f"{name}: {text}", category, __file__, 1, module=__name__, registry={})


def negligible(amount: float, base: Tensor, task: float) -> bool:
    """Whether a weighted term is at the rounding error of a base loss of the size `task`."""
    return amount <= ROUNDING * torch.finfo(base.dtype).eps * task


def _first_rank() -> bool:
    """As `first_process` of the workbench, which the core does not import."""
    group = torch.distributed
    return not (group.is_available() and group.is_initialized()) or group.get_rank() == 0
