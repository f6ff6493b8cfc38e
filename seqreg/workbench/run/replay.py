"""Compute a step again that was not finite, and find where it began."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from seqreg.errors import BadInput
from seqreg.integrations.hf.context import count
from seqreg.integrations.hf.trainer import TERM_STATE, RegularizedTrainer
from seqreg.workbench.config import run_config
from seqreg.workbench.run import checkpoints, crash, rng, train
from seqreg.workbench.run.run_directory import RunRecord


@dataclass
class Replayed:
    """A step that was computed again.

    Args:
        parts: of the loss of every micro-batch: "micro_batch", "part", weighted "value" and whether it is "finite"
        notes: which weights and rows it was computed with, and the first places that are not finite
    """

    step: int
    notes: list[str]
    parts: list[dict[str, Any]] = field(default_factory=list)


def shown(found: Replayed) -> Group:
    """For a terminal."""
    table = Table("micro-batch", "part", "weighted value", "finite", title=f"step {found.step}")
    for one in found.parts:
        table.add_row(str(one["micro_batch"]), one["part"], f"{one['value']:.6g}", "yes" if one["finite"] else "no")
    return Group(table, *found.notes)


def replay(folder: Path, *, trust: bool = False) -> Replayed:
    """The parts of the loss of every micro-batch of RUN/crash/step-N, and the first places that are not finite."""
    story, batches = crash.read(folder)
    home = folder.absolute().parent.parent
    run = run_config.load(home, trust=trust)
    weights = _weights(home, folder, story)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = train.make_trainer(train.prepare(run), Path(scratch))
        trainer._load_from_checkpoint(str(weights))
        if (weights / TERM_STATE).exists():
            trainer._load_terms(str(weights))
        found = Replayed(
            story["step"] + 1, [f"weights of {weights}", f"training rows {', '.join(map(str, story['rows']))}"]
        )
        record = RunRecord.read(home)
        if record is None or record.facts["configuration"] != story["configuration"]:
            found.notes.append("the settings of the run have changed since this step: it is computed with those of now")
        try:
            found.notes += _compute(trainer, story, batches, found.parts)
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            what = next(iter(str(error).splitlines()), type(error).__name__)
            raise BadInput(f"{folder}: its batches do not belong to the model of the run: {what[:200]}") from None
    return found


def _weights(home: Path, folder: Path, story: dict[str, Any]) -> Path:
    """Those kept with the step, or the nearest checkpoint before it."""
    if (folder / "model.safetensors").exists():
        return folder
    found = [path for path in checkpoints.sealed(home, story["run"]) if checkpoints.step_of(path) <= story["step"]]
    if not found:
        raise BadInput(f"{folder}: the model was too large to be kept, and there is no checkpoint before this step")
    return found[-1]


def _compute(
    trainer: Any, story: dict[str, Any], batches: list[dict[str, Any]], parts: list[dict[str, Any]]
) -> list[str]:
    model = trainer.model.train()
    trainer.state.global_step = story["step"]
    whole, seen = count(model, batches), []
    rng.set_rng_state(story["draws"])
    for index, batch in enumerate(batches):
        with _first_not_finite(model) as places, trainer.compute_loss_context_manager():
            report, _ = RegularizedTrainer.report(trainer, model, trainer._prepare_inputs(batch), whole)
        for name, part in report.parts.items():
            said, value = f"{name} (with a second task loss)" if name in report.tasks else name, float(part)
            parts.append({"micro_batch": index, "part": said, "value": value, "finite": math.isfinite(value)})
        seen += places[:1]
        trainer.accelerator.backward(report.total)
    bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    notes = (
        [f"first module whose output is not finite: {seen[0]}"] if seen else ["the outputs of all modules are finite"]
    )
    return [*notes, f"gradients that are not finite: {len(bad)} parameters{f', the first {bad[0]}' if bad else ''}"]


@contextlib.contextmanager
def _first_not_finite(model: torch.nn.Module) -> Iterator[list[str]]:
    """The names of modules in the order in which their outputs stop being finite."""
    places: list[str] = []

    def look(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            if any(isinstance(one, torch.Tensor) and not one.isfinite().all() for one in tensors):
                places.append(name)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        yield places
    finally:
        for handle in handles:
            handle.remove()
