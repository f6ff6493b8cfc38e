"""Steps that are not finite: named, counted, stored for `seqreg replay`, and never applied."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from seqreg.criterion import LossReport, term_of
from seqreg.errors import BadInput, DiskError, NotFinite
from seqreg.workbench.run import checkpoints, rng
from seqreg.workbench.text import stored_json
from seqreg.workbench.text.atomic_files import remove, staged_folder, to_json, write_text
from seqreg.workbench.text.terminal import warn

BATCHES, REPORT, RNG_STATE = "batch.safetensors", "crash.json", "rng_state.pth"
MAX_SHOWN = 16
"""Training examples that are named on the console; crash/ has all."""
MAX_STORED = 10
"""Steps of a run that are stored."""
MAX_WEIGHTS = 256 * 2**20
"""Bytes of weights up to which they are stored with the step."""


def not_finite(report: LossReport) -> list[str]:
    """The names of the terms whose part is not finite on any stream; "base" for the total if all parts are."""
    values = torch.stack([*(part.detach().float() for part in report.parts.values()), report.total.detach().float()])
    finite = values.isfinite().tolist()
    bad = [term_of(name) for name, good in zip(report.parts, finite, strict=False) if not good]
    return list(dict.fromkeys(bad)) or ([] if finite[-1] else ["base"])


@dataclass
class StepAttempt:
    """One optimizer step while it is made: what it saw, and what went wrong.

    Args:
        rows: numbers of the training examples of all its micro-batches
        batches: the micro-batches so far
        faults: parts of the loss, or "gradient", that are not finite, so that the step is skipped
        dropped: terms that were left out
        rng_state: of the generators before it
    """

    rows: list[int] = field(default_factory=list)
    batches: list[Any] = field(default_factory=list)
    faults: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    rng_state: dict[str, Any] = field(default_factory=dict)
    _log: tuple[Any, ...] = ()

    def begin(self, loss: Tensor, window: Any) -> None:
        """Note what the step starts from."""
        self.rng_state = rng.rng_state()
        self._log = (loss.clone(), dict(window.sums), window.steps.copy())

    def undo(self, loss: Tensor, window: Any) -> None:
        """Take a skipped step out of the log again."""
        if self._log:
            before, window.sums, window.steps = self._log
            loss.copy_(before)


class NonfiniteSteps:
    """Counts steps that are not finite; `patience` of them in a row end the run."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.streak = self.skipped = 0
        self.dropped: Counter[str] = Counter()
        self.window = [0, 0]
        """Steps since the last log, and those of them that were made."""

    def record(self, trainer: Any, attempt: StepAttempt, skip: bool, drop: bool) -> None:
        """Count one step; one that was skipped, or made without a term, is reported and stored."""
        self.window = [self.window[0] + 1, self.window[1] + (not skip)]
        self.streak = self.streak + 1 if skip or drop else 0
        if not skip and not drop:
            return
        self.skipped += skip
        self.dropped.update(() if skip else attempt.dropped)
        names = ", ".join(sorted(attempt.faults if skip else attempt.dropped) or ["another process"])
        crash = write_crash(trainer, attempt, skip) if attempt.faults or attempt.dropped else None
        rows = ", ".join(map(str, attempt.rows[:MAX_SHOWN])) + (" ..." if len(attempt.rows) > MAX_SHOWN else "")
        action = "the step is skipped" if skip else "the step is made without"
        line = f"step {trainer.state.global_step + 1}: {names} not finite, {action} (training examples {rows})"
        warn(f"{line}{f'; seqreg replay {crash}' if crash else ''}")
        if self.streak >= self.patience:
            raise NotFinite(
                f"{trainer.args.output_dir}: {self.streak} steps in a row were not finite ({names}); none of it was "
                "applied, and the last checkpoint is as it was. Lower optimisation.learning_rate or the weight of the "
                "term (with --allow-change), or raise optimisation.nonfinite_patience"
            )

    def correction(self) -> float:
        """What a mean over all steps since the last log is multiplied by, to be one over those made."""
        (steps, made), self.window = self.window, [0, 0]
        return 1.0 if steps == made else steps / made if made else float("nan")

    def numbers(self) -> dict[str, Any]:
        """For metrics.json."""
        return {"skipped": self.skipped, "dropped": dict(self.dropped)}

    def state(self) -> dict[str, Any]:
        return {"streak": self.streak, "window": self.window, **self.numbers()}

    def load(self, state: stored_json.NonfiniteState) -> None:
        self.streak, self.skipped, self.window = state.streak, state.skipped, list(state.window)
        self.dropped = Counter(state.dropped)


def write_crash(trainer: Any, attempt: StepAttempt, skip: bool) -> Path | None:
    """Write RUN/crash/step-N: the batches, the generators, what was wrong, and the weights of a small model."""
    rank, step = trainer.args.process_index, trainer.state.global_step
    parent = Path(trainer.args.output_dir) / "crash"
    folder = parent / f"step-{step + 1}{f'-process-{rank}' if rank else ''}"
    remove([folder])  # of the same step before the run was resumed: with other settings, for all we know
    if len(list(parent.glob("step-*"))) >= MAX_STORED:
        return None
    report = {
        **trainer.facts, "step": step, "rows": attempt.rows, "made": not skip,
        "not_finite": sorted(attempt.faults | attempt.dropped), "batches": len(attempt.batches),
    }  # fmt: skip
    tensors = {
        f"{index}/{key}": value.cpu().contiguous()
        for index, batch in enumerate(attempt.batches)
        for key, value in batch.items()
        if isinstance(value, Tensor)
    }
    try:
        with staged_folder(folder) as stage:
            safetensors.torch.save_file(tensors, stage / BATCHES)
            torch.save(attempt.rng_state, stage / RNG_STATE)
            write_text(stage / REPORT, to_json(report, indent=1) + "\n")
            size = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
            if size <= MAX_WEIGHTS and not trainer.sharded:  # which other processes hold too
                trainer.save_weights(stage)
            checkpoints.seal(stage, {"step": step})
    except DiskError as error:
        warn(f"the step is not stored for a replay: {error}")
        return None
    return folder


def read_crash(folder: Path) -> tuple[stored_json.CrashReport, dict[str, Any], list[dict[str, Any]]]:
    """The report of a crash folder, the state of the generators, and its batches."""
    if not os.path.isdir(folder):
        raise BadInput(f"{folder}: no such folder; a run writes one as RUN/crash/step-N")
    fault = checkpoints.fault(folder, (BATCHES, REPORT, RNG_STATE)) or checkpoints.unreadable(folder)
    if fault is not None:
        raise BadInput(f"{folder}: cannot be replayed: {fault}")
    report = stored_json.read(stored_json.CrashReport, folder / REPORT, "it cannot be replayed")
    tensors = safetensors.torch.load_file(folder / BATCHES)
    batches: dict[int, dict[str, Any]] = {}
    for path, tensor in tensors.items():
        index, _, key = path.partition("/")
        batches.setdefault(int(index) if index.isdecimal() else -1, {})[key] = tensor
    if sorted(batches) != list(range(len(batches))) or len(batches) != report.batches:
        raise BadInput(f"{folder}: {REPORT} tells of {report.batches} batches, and {BATCHES} holds {len(batches)}")
    return report, checkpoints.load_state(folder / RNG_STATE), [batches[index] for index in range(len(batches))]
