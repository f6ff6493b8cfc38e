"""Steps that are not finite: named, counted, kept for a replay, and never applied."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqreg.criterion import LossReport
from seqreg.errors import NotFinite
from seqreg.workbench.run import crash, rng
from seqreg.workbench.text.terminal import warn

SHOWN = 16
"""Row numbers that are named on the console; crash/ has all."""


def not_finite(report: LossReport) -> list[str]:
    """The parts of a loss that are not finite; "base" for the whole if all parts are."""
    values = torch.stack([*(part.detach().float() for part in report.parts.values()), report.total.detach().float()])
    fine = values.isfinite().tolist()
    bad = [name for name, good in zip(report.parts, fine, strict=False) if not good]
    return bad or ([] if fine[-1] else ["base"])


@dataclass
class Attempt:
    """One optimizer step while it is made: what it saw, and what went wrong.

    Args:
        rows: numbers of the training rows of all its micro-batches
        batches: the micro-batches so far
        faults: parts of the loss, or "gradient", that make it impossible
        dropped: terms that were left out
        draws: the generators before it began
    """

    rows: list[int] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    faults: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    draws: dict[str, Any] = field(default_factory=dict)
    _log: tuple[Any, ...] = ()

    def begin(self, loss: Tensor, window: Any) -> None:
        """Note what the step starts from."""
        self.draws = rng.rng_state()
        self._log = (loss.clone(), dict(window.sums), window.steps.copy())

    def undo(self, loss: Tensor, window: Any) -> None:
        """Take a step that is not made out of the log again."""
        if self._log:
            before, window.sums, window.steps = self._log
            loss.copy_(before)


class Health:
    """Counts bad steps of a run; too many in a row end it.

    Args:
        folder: the run's
        patience: how many in a row are too many
    """

    def __init__(self, folder: Path, patience: int) -> None:
        self.folder, self.patience = folder, patience
        self.streak = self.skipped = 0
        self.dropped: Counter[str] = Counter()
        self.window = [0, 0]
        """Steps since the last log, and those of them that were made."""

    def note(self, trainer: Any, attempt: Attempt, skip: bool, drop: bool) -> None:
        """Take in one step."""
        self.window = [self.window[0] + 1, self.window[1] + (not skip)]
        self.streak = self.streak + 1 if skip or drop else 0
        if not skip and not drop:
            return
        self.skipped += skip
        self.dropped.update(() if skip else attempt.dropped)
        names = sorted(attempt.faults if skip else attempt.dropped) or ["another process"]
        kept = crash.write(self.folder, trainer, attempt, skip) if attempt.faults or attempt.dropped else None
        rows = ", ".join(map(str, attempt.rows[:SHOWN])) + (" ..." if len(attempt.rows) > SHOWN else "")
        done = "the step is not made" if skip else "the step is made without"
        line = f"step {trainer.state.global_step + 1}: {', '.join(names)} not finite, {done} (training rows {rows})"
        warn(f"{line}{f'; seqreg replay {kept}' if kept else ''}")
        if self.streak >= self.patience:
            raise NotFinite(
                f"{self.folder}: {self.streak} steps in a row were not finite ({', '.join(names)}); none of it was "
                "applied, and the last checkpoint is as it was. Lower optimisation.learning_rate or the weight of the "
                "term (with --allow-change), or raise optimisation.nonfinite_patience"
            )

    def correction(self) -> float:
        """What a mean over all steps since the last log is to be multiplied by, to be one over those made."""
        (steps, made), self.window = self.window, [0, 0]
        return 1.0 if steps == made else steps / made if made else float("nan")

    def numbers(self) -> dict[str, Any]:
        """For metrics.json."""
        return {"skipped": self.skipped, "dropped": dict(self.dropped)}

    def state(self) -> dict[str, Any]:
        return {"streak": self.streak, "window": self.window, **self.numbers()}

    def load(self, state: dict[str, Any]) -> None:
        self.streak, self.skipped, self.window = state["streak"], state["skipped"], state["window"]
        self.dropped = Counter(state["dropped"])
