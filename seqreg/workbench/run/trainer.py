"""The trainers of the workbench: those of the Hugging Face integration, made to survive."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seqreg.context import Context, Count
from seqreg.criterion import Criterion, LossReport
from seqreg.errors import Interrupted, NotFinite
from seqreg.integrations.hf import RegularizedSeq2SeqTrainer
from seqreg.workbench.data import weights
from seqreg.workbench.data.batches import GroupedOrder
from seqreg.workbench.data.encoding import INDEX
from seqreg.workbench.run import checkpoints, disk, rng
from seqreg.workbench.run.nonfinite import Attempt, Health, not_finite
from seqreg.workbench.run.resuming import ResumingTrainer
from seqreg.workbench.run.run_directory import check_own
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.run.watch import Watch, stopped_at

MINUTE = 60.0


class FaultTolerantTrainer(ResumingTrainer):
    """For classes and numbers: sealed checkpoints, no step that is not finite, signals, preserve_rng_state evaluations.

    `order` gives the training rows, if there is one; `facts` go into the manifests.
    """

    order: GroupedOrder | None = None
    facts: Mapping[str, Any] = {"run": ""}
    keep, minutes, needed = 1, 0.0, 0
    _evaluated = 0.0
    """Seconds of the last evaluation."""

    def __init__(self, *args: Any, patience: int = 3, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.signals, self.attempt = Signals(), Attempt()
        self.health = Health(Path(self.args.output_dir), patience)
        self.clock = self.saved = time.monotonic()
        self.add_callback(Watch(self))

    # Rows

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_train_sampler(*args, **kwargs) if self.order is None else self.order

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if INDEX not in self._signature_columns:
            self._signature_columns.append(INDEX)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[Any, Any]:
        self.attempt = attempt = Attempt()

        def without_rows() -> Iterator[Any]:
            for batch in epoch_iterator:
                attempt.rows += batch.pop(INDEX).tolist() if INDEX in batch else []
                yield batch

        return super().get_batch_samples(without_rows(), num_batches, device)

    def training_batch(self, indices: Iterable[int]) -> dict[str, Any]:
        batch = super().training_batch(indices)
        batch.pop(INDEX, None)
        return batch

    # Steps that are not finite

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if not self.attempt.batches:
            self.attempt.begin(self._tr_loss, self._window)
        self.attempt.batches.append(inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def report(
        self, model: nn.Module, inputs: Any, whole: Count | None = None, **options: Any
    ) -> tuple[LossReport, Context]:
        before = rng.rng_state()
        report, ctx = super().report(model, inputs, whole, **options)
        bad = not_finite(report) if ctx.training else []
        if bad and "base" not in bad:  # a term alone: the step is made without it
            self.attempt.dropped.update(bad)
            rng.set_rng_state(before)
            rest: Criterion = self.criterion.without(*bad)
            report, ctx = super().report(model, inputs, whole, criterion=rest, **options)
            bad = not_finite(report)
        self.attempt.faults.update(bad)
        return report, ctx

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training and self.attempt.faults:  # nothing, with a gradient of zero: the step will not be made
            return sum((p * 0).sum() for p in model.parameters() if p.requires_grad)
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Where the gradient is complete and nothing has been done with it yet: the step is made or left."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scaler = self.accelerator.scaler
        if not torch.isfinite(torch.as_tensor(norm)) and (scaler is None or scaler.get_scale() <= 1):
            self.attempt.faults.add("gradient")  # float16 finds its scale by overflows, and leaves those steps itself
        skip, drop = self._agreed(bool(self.attempt.faults), bool(self.attempt.dropped))
        if skip:
            for parameter in model.parameters():
                parameter.grad = None
            self.attempt.undo(self._tr_loss, self._window)
        self.health.note(self, self.attempt, skip, drop)
        self.attempt = Attempt()
        return norm

    def _agreed(self, *flags: bool) -> list[bool]:
        """What holds on any of the processes."""
        if self.args.world_size == 1:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.float32, device=self.args.device)
        return [bool(flag) for flag in self.accelerator.reduce(found, "sum").tolist()]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["loss"] *= self.health.correction()
        if "train_loss" in logs:  # transformers divides by the steps since the last resume
            logs["train_loss"] = self.mean_loss()
        self._correct_times(logs)
        super().log(logs, start_time)

    def _correct_times(self, logs: dict[str, float]) -> None:
        """Durations by a clock that cannot be set: transformers takes the time of day."""
        for kind, took in (("train", time.monotonic() - self.clock), ("eval", self._evaluated)):
            if f"{kind}_runtime" in logs:
                for key in (f"{kind}_samples_per_second", f"{kind}_steps_per_second"):
                    if key in logs:
                        logs[key] *= logs[f"{kind}_runtime"] / max(took, 1e-9)
                logs[f"{kind}_runtime"] = took

    def mean_loss(self) -> float:
        """The loss averaged over the steps of the whole run that were made; not a number if there was none."""
        made = self.state.global_step - self.health.skipped
        return float(self._total_loss_scalar) / made if made else float("nan")

    def check_weights(self) -> None:
        """Stop a run whose last update made weights infinite, before they are saved or called finished."""
        bad = weights.not_finite(self.model)
        if bad:
            kept = checkpoints.sealed(Path(self.args.output_dir), str(self.facts["run"]))
            last = f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint"
            raise NotFinite(
                f"{self.args.output_dir}: after step {self.state.global_step} {bad}; they are not saved, and {last}. "
                "Lower optimisation.learning_rate (with --allow-change)"
            )

    # Evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """What may be stopped anywhere: the points of a curve that follow are written as a whole, and once."""
        begin = time.monotonic()
        with rng.preserve_rng_state(), self.signals.deferred(self.args.world_size > 1):
            found = super().evaluation_loop(*args, **kwargs)
        self._evaluated = time.monotonic() - begin
        return found

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._evaluate(*args, **kwargs)
        except Interrupted as error:
            self._owed = True  # a resumed run makes it first
            self._save_checkpoint(self.model_wrapped, None)
            raise Interrupted(error.number, stopped_at(self.state.global_step)) from None

    def stopping(self) -> bool:
        """Whether a signal came, to any of the processes."""
        return self._agreed(self.signals.received is not None)[0]

    def _run_epoch(self, **details: Any) -> None:
        if self.order is not None:
            self.order.set_epoch(details["epoch"])
        if self._owed:
            self._make_up(details["trial"], details["start_time"])
        if self.state.global_step >= self.state.max_steps:  # all steps were made: transformers would make another
            self.control.should_training_stop = True
            return
        super()._run_epoch(**details)

    def _make_up(self, trial: Any, start_time: float) -> None:
        """Make the evaluation that a signal cut short."""
        self._owed, self.control.should_evaluate = False, True
        self._maybe_log_save_evaluate(
            self._tr_loss, None, self.model_wrapped, trial, self.state.epoch, None, start_time
        )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        found: bool = super()._determine_best_metric(metrics, trial)
        if found and self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = str(self._folder(self.state.global_step))
            self.control.should_save = True
        return found

    def _finalize_training(self, trial: Any, samples: float, start_time: float) -> Any:
        if self._owed:  # at the end of the last epoch: there was none to begin
            self._make_up(trial, start_time)
        if self.args.load_best_model_at_end or self.due():
            self._save_checkpoint(self.model_wrapped, None)  # the last weights: others may take their place
        result = super()._finalize_training(trial, samples, start_time)
        self._tr_loss -= self._tr_loss  # it is in the total now
        return result

    # Checkpoints

    def due(self) -> bool:
        """Whether it is time for a checkpoint by the clock of the first process."""
        late = self.minutes > 0 and time.monotonic() - self.saved > self.minutes * MINUTE
        return self._agreed(late and self.is_world_process_zero())[0] if self.minutes else False

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        final, run = self._folder(self.state.global_step), str(self.facts["run"])
        first = bool(self.args.should_save)
        self.check_weights()
        if first and run:
            check_own(final.parent, run)
        kept = checkpoints.sealed(final.parent, run)
        hint = f"; the last checkpoint is {kept[-1]}" if kept else "; there is no checkpoint"
        if final not in kept or checkpoints.fault(final):
            facts = {**self.facts, "step": self.state.global_step}
            with disk.writing(final, self.needed, hint + "; free some space, and run the same command again"):
                with checkpoints.staged(final, facts, first, self.accelerator.wait_for_everyone) as aside:
                    self._write_checkpoint(aside)
        if first:
            checkpoints.rotate(final.parent, run, self.keep, self.state.best_model_checkpoint)
        self.saved = time.monotonic()

    def _write_checkpoint(self, aside: Path) -> None:
        self.store_flos()
        self.save_model(str(aside), _internal_call=True)
        self._save_optimizer_and_scheduler(str(aside))
        self._save_scaler(str(aside))
        self._save_rng_state(str(aside))
        progress = json.dumps(self._progress())
        (aside / f"progress_{self.args.process_index}.json").write_text(progress, encoding="utf-8")
        if self.args.should_save:
            self.state.save_to_json(str(aside / "trainer_state.json"))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        super()._save(output_dir, state_dict)
        (Path(output_dir or self.args.output_dir) / "training_args.bin").unlink(missing_ok=True)  # a pickle

    def _progress(self) -> dict[str, Any]:
        """What is under way between two logs, and what has been counted."""
        return {
            "loss": float(self._tr_loss), "total": self._total_loss_scalar, "logged": self._globalstep_last_logged,
            "sums": {key: float(value) for key, value in self._window.sums.items()}, "shares": dict(self._window.steps),
            "diagnostics": self._diagnostics, "owed": self._owed, "health": self.health.state(),
            "seconds": self.seconds + time.monotonic() - self.clock, "spent": [self.cpu_seconds, self.step_seconds],
            "monitor": {} if self.monitor is None else self.monitor.state(),
        }  # fmt: skip


class FaultTolerantSeq2SeqTrainer(FaultTolerantTrainer, RegularizedSeq2SeqTrainer):
    """The same for text."""
