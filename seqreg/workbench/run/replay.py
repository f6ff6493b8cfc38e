"""Compute a step again that was not finite, and find the first module that is not."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from seqreg.errors import BadInput
from seqreg.integrations.hf import RegularizedTrainer
from seqreg.integrations.hf.streams import count_streams
from seqreg.workbench.config import run_config
from seqreg.workbench.config.settings import EngineSettings
from seqreg.workbench.run import checkpoints, nonfinite, rng, train
from seqreg.workbench.run.record import RunRecord
from seqreg.workbench.text.atomic_files import inside
from seqreg.workbench.text.stored_json import CrashReport


@dataclass
class Replayed:
    """A step that was computed again.

    Args:
        parts: of the loss of every micro-batch: "micro_batch", "part", weighted "value" and whether it is "finite"
        notes: which weights and examples it was computed with, and the first places that are not finite
    """

    step: int
    notes: list[str]
    parts: list[dict[str, Any]] = field(default_factory=list)


def shown(replayed: Replayed) -> Group:
    """For a terminal."""
    table = Table("micro-batch", "part", "weighted value", "finite", title=f"step {replayed.step}")
    for part in replayed.parts:
        table.add_row(str(part["micro_batch"]), part["part"], f"{part['value']:.6g}", "yes" if part["finite"] else "no")
    return Group(table, *replayed.notes)


def replay(folder: Path, *, trust: bool = False) -> Replayed:
    """The parts of the loss of every micro-batch of RUN/crash/step-N, and the first places that are not finite."""
    home = folder.absolute().parent.parent
    inside(home, f"{folder.absolute().parent.name}/{folder.absolute().name}")
    report, rng_state, batches = nonfinite.read_crash(folder)
    run = run_config.load(home, trust=trust)
    run = replace(run, config=run.config.updated(engine=EngineSettings()))  # in this process alone
    weights = _weights(home, folder, report)
    replayed = Replayed(
        report.step + 1, [f"weights of {weights}", f"training examples {', '.join(map(str, report.rows))}"]
    )
    record = RunRecord.read(home)
    if record is None or record.facts["configuration"] != report.configuration:
        replayed.notes.append("the settings of the run have changed since this step: it is computed with those of now")
    with tempfile.TemporaryDirectory() as scratch:
        trainer = train.make_trainer(train.prepare(run), Path(scratch))
        trainer.load_weights(weights)
        trainer.state.global_step = report.step
        try:
            rng.set_rng_state(rng_state)
            _compute(trainer, batches, replayed)
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            what = next(iter(str(error).splitlines()), type(error).__name__)
            raise BadInput(f"{folder}: its step does not belong to the model of the run: {what[:200]}") from None
    return replayed


def _weights(home: Path, folder: Path, report: CrashReport) -> Path:
    """Those stored with the step, or the nearest checkpoint before it."""
    if any((folder / name).exists() for name in (checkpoints.WEIGHTS, checkpoints.ADAPTER_WEIGHTS)):
        return folder
    sealed = [path for path in checkpoints.sealed(home, report.run) if checkpoints.step_of(path) <= report.step]
    if not sealed:
        raise BadInput(f"{folder}: its weights were not stored, and there is no checkpoint before this step")
    return sealed[-1]


def _compute(trainer: Any, batches: Sequence[dict[str, Any]], replayed: Replayed) -> None:
    """Make the step up to its gradient; adds to the parts and the notes."""
    model = trainer.model.train()
    step_count, first = count_streams(model, batches), list[str]()
    for index, batch in enumerate(batches):
        with _not_finite_modules(model) as modules, trainer.compute_loss_context_manager():
            report, _ = RegularizedTrainer.report(trainer, model, trainer._prepare_inputs(batch), step_count)
        for name, part in report.parts.items():
            title, value = f"{name} (with a second task loss)" if name in report.tasks else name, float(part)
            replayed.parts.append({"micro_batch": index, "part": title, "value": value, "finite": math.isfinite(value)})
        first += modules[:1]
        trainer.accelerator.backward(report.total)
    bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    replayed.notes += [
        f"first module whose output is not finite: {first[0]}" if first else "the outputs of all modules are finite",
        f"gradients that are not finite: {len(bad)} parameters{f', the first {bad[0]}' if bad else ''}",
    ]


@contextlib.contextmanager
def _not_finite_modules(model: torch.nn.Module) -> Iterator[list[str]]:
    """The names of modules in the order in which their outputs stop being finite."""
    names: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, (tuple, list)) else [output]
            if any(isinstance(x, torch.Tensor) and not x.isfinite().all() for x in tensors):
                names.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()
