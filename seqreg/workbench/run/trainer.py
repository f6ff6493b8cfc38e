"""The trainers of the workbench: exact resumption, no step that is not finite, signals."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback

from seqreg.context import Context, Count
from seqreg.criterion import LossReport
from seqreg.engines.shards import full
from seqreg.errors import Interrupted
from seqreg.integrations.hf import RegularizedSeq2SeqTrainer
from seqreg.selective_update import MeasuredUpdate
from seqreg.workbench.data import completions
from seqreg.workbench.data.encoding import INDEX, Encoded
from seqreg.workbench.data.word_limits import word_limits
from seqreg.workbench.run import rng
from seqreg.workbench.run.checkpointing import CheckpointingTrainer, RunOptions
from seqreg.workbench.run.nonfinite import StepAttempt, not_finite
from seqreg.workbench.scores.evaluate import completion_nll
from seqreg.workbench.text.terminal import first_process, say


class FaultTolerantTrainer(CheckpointingTrainer):
    """For classes and numbers: a `RegularizedTrainer` that keeps the promises of docs/reliability.md."""

    def __init__(self, *args: Any, options: RunOptions, **kwargs: Any) -> None:
        super().__init__(*args, options=options, **kwargs)
        self.attempt, self._evaluation_seconds = StepAttempt(), 0.0
        self.remove_callback(PrinterCallback)
        patience = options.config.evaluation.early_stopping_patience
        self.early_stopping = EarlyStoppingCallback(patience) if patience else None
        for callback in (StopAndSaveCallback(self), options.bars, options.tensorboard, self.early_stopping):
            if callback is not None:
                self.add_callback(callback)

    # Examples

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = self.options.sampler
        return super()._get_train_sampler(*args, **kwargs) if sampler is None else sampler

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return (
            eval_dataset.by_length() if isinstance(eval_dataset, Encoded) else super()._get_eval_sampler(eval_dataset)
        )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if INDEX not in self._signature_columns:
            self._signature_columns.append(INDEX)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[Any, Any]:
        self.attempt = attempt = StepAttempt()

        def without_rows() -> Iterator[Any]:
            for batch in epoch_iterator:
                attempt.rows += batch.pop(INDEX).tolist() if INDEX in batch else []
                yield batch

        return super().get_batch_samples(without_rows(), num_batches, device)

    def _batch(self, examples: Any, indices: Iterable[int]) -> dict[str, Any]:
        batch = super()._batch(examples, indices)
        batch.pop(INDEX, None)
        return batch

    def measure(self, update: MeasuredUpdate) -> None:
        """As in the base class; nothing is lost where it is interrupted, and a resumed run begins it again."""
        if first_process():
            say(f"{type(update).__name__}: squared gradients of the training set, before the first step")
        with self.options.signals.deferred(self.args.world_size > 1):
            super().measure(update)

    @property
    def _asked_for_fsdp(self) -> str:
        engine = self.options.config.engine.name
        return "" if engine == "ddp" else f"engine.name={engine}"

    # Steps that are not finite

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if not self.attempt.batches:
            self.attempt.begin(self._tr_loss, self._window)
        self.attempt.batches.append(inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def report(
        self, model: nn.Module, inputs: Mapping[str, Any], step_count: Count | None = None, **options: Any
    ) -> tuple[LossReport, Context]:
        """The loss without terms that are not finite; if it is not finite itself, nothing with a gradient of zero."""
        before = rng.rng_state()
        report, ctx = super().report(model, inputs, step_count, **options)
        if not ctx.training:
            return report, ctx
        bad = self._agreed(not_finite(report))
        if bad and "base" not in bad:  # a term alone: the step is made without it
            self.attempt.dropped.update(bad)
            rng.set_rng_state(before)
            rest = self.criterion.without(*bad)
            report, ctx = super().report(model, inputs, step_count, criterion=rest, **options)
            bad = self._agreed(not_finite(report))
        self.attempt.faults.update(bad)
        if self.attempt.faults and not self.sharded:  # also of an earlier micro-batch: the step will be skipped
            zeros = ((p * 0).sum() for p in model.parameters() if p.requires_grad)
            report = dataclasses.replace(report, total=sum(zeros, report.total.new_zeros(())))
        return report, ctx

    def _agreed(self, bad: list[str]) -> list[str]:
        """Parts that are not finite on any process, where each holds a shard: all have to make the same passes."""
        if not self.sharded:
            return bad
        names = ["base", *(term.name for term in self.criterion.terms)]
        flags = self._on_any_process(*(name in bad for name in names))
        return [name for name, flag in zip(names, flags, strict=True) if flag]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Where the gradient is complete and nothing has been done with it yet: the step is made or skipped."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scaler = self.accelerator.scaler
        bad = not torch.isfinite(full(torch.as_tensor(norm))) and not (self.sharded and self.attempt.faults)
        if bad and (scaler is None or scaler.get_scale() <= 1):
            self.attempt.faults.add("gradient")  # float16 finds its scale by overflows, and skips those steps itself
        skip, drop = self._on_any_process(bool(self.attempt.faults), bool(self.attempt.dropped))
        if skip:
            for parameter in model.parameters():
                parameter.grad = None
            self.attempt.undo(self._tr_loss, self._window)
        self.nonfinite.record(self, self.attempt, skip, drop)
        self.attempt = StepAttempt()
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["loss"] *= self.nonfinite.correction()
        if "train_loss" in logs:  # transformers divides by the steps since the last resume
            logs["train_loss"] = self.mean_loss()
        # transformers takes durations by the time of day, which may be set
        for kind, seconds in (("train", time.monotonic() - self.clock), ("eval", self._evaluation_seconds)):
            if f"{kind}_runtime" in logs:
                for key in (f"{kind}_samples_per_second", f"{kind}_steps_per_second"):
                    if key in logs:
                        logs[key] *= logs[f"{kind}_runtime"] / max(seconds, 1e-9)
                logs[f"{kind}_runtime"] = seconds
        super().log(logs, start_time)

    def last_nll(self) -> float | None:
        """The NLL of the training examples since the last log but one, without label smoothing and terms."""
        logged = [entry["value/nll"] for entry in self.state.log_history if "value/nll" in entry]
        return logged[-1] if logged else None

    def mean_loss(self) -> float:
        """The loss averaged over all steps of the run that were made; not a number if there was none."""
        made = self.state.global_step - self.nonfinite.skipped
        return float(self._total_loss_scalar) / made if made else float("nan")

    # Evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """What may be interrupted anywhere: the points of a curve that follow are written as a whole, and once."""
        start = time.monotonic()
        with rng.preserve_rng_state(), self.options.signals.deferred(self.args.world_size > 1):
            if self.options.config.generation.do_sample:  # the same draws in every evaluation
                torch.manual_seed(self.options.config.seed)
            output = super().evaluation_loop(*args, **kwargs)
        self._evaluation_seconds = time.monotonic() - start
        return output

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._evaluate(*args, **kwargs)
        except Interrupted as error:
            self._evaluation_due = True  # a resumed run makes it first
            self._save_checkpoint(self.model_wrapped, None)
            raise Interrupted(error.number, _stopped_at(self.state.global_step)) from None

    @property
    def stopped_early(self) -> bool:
        """Whether the score has not become better for long enough."""
        counted = self.early_stopping
        return counted is not None and counted.early_stopping_patience_counter >= counted.early_stopping_patience

    def _progress(self) -> dict[str, Any]:
        counted = self.early_stopping
        return {**super()._progress(), "not_better": 0 if counted is None else counted.early_stopping_patience_counter}

    def restore(self) -> None:
        super().restore()
        if self.early_stopping is not None:
            self.early_stopping.early_stopping_patience_counter = self.not_better

    def stopping(self) -> bool:
        """Whether a signal came, to any of the processes."""
        return self._on_any_process(self.options.signals.received is not None)[0]

    def _run_epoch(self, **details: Any) -> None:
        if self.options.sampler is not None:
            self.options.sampler.set_epoch(details["epoch"])
        self._make_due_evaluation(details["trial"], details["start_time"])
        # all steps were made, or a resumed run had stopped early: transformers would make another
        if self.state.global_step >= self.state.max_steps or self.stopped_early:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**details)

    def _make_due_evaluation(self, trial: Any, start_time: float) -> None:
        """Make the evaluation that a signal interrupted."""
        if self._evaluation_due:
            self._evaluation_due, self.control.should_evaluate = False, True
            self._maybe_log_save_evaluate(
                self._tr_loss, None, self.model_wrapped, trial, self.state.epoch, None, start_time
            )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best: bool = super()._determine_best_metric(metrics, trial)
        if is_best:  # also where no checkpoints are saved by steps
            self.state.best_global_step = self.state.global_step
        if is_best and self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = str(self._folder(self.state.global_step))
            self.control.should_save = True
        return is_best

    def _finalize_training(self, trial: Any, samples: float, start_time: float) -> Any:
        self._make_due_evaluation(trial, start_time)  # at the end of the last epoch: no other follows
        if self.args.load_best_model_at_end or self.save_due():
            self._save_checkpoint(self.model_wrapped, None)  # the last weights: others may take their place
        output = super()._finalize_training(trial, samples, start_time)
        self._tr_loss -= self._tr_loss  # it is in the total now
        return output


class FaultTolerantSeq2SeqTrainer(FaultTolerantTrainer, RegularizedSeq2SeqTrainer):
    """The same for text."""

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """As in the base class, within the limits of words."""
        gen_kwargs |= word_limits(self.options.config.generation, self.model, self.processing_class)
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)


class FaultTolerantCausalTrainer(FaultTolerantTrainer):
    """The same for the completions of a causal language model.

    `generating` is False where plain texts are scored: their NLL alone is computed.
    """

    generating = True

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """The loss; generated ids, and the NLL of the completion with its number of tokens, of every example."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            report, ctx = self.report(model, inputs, outputs=True)
        loss = report.total.detach()
        if prediction_loss_only or report.clean is None:
            return loss, None, None
        numbers = completion_nll(report.clean, ctx)
        if not self.generating:
            return loss, numbers, inputs["labels"]
        gen_kwargs |= word_limits(self.options.config.generation, self.model, self.processing_class)
        return loss, (completions.complete(self.model, inputs, **gen_kwargs), *numbers), inputs["labels"]


def _stopped_at(step: int) -> str:
    return f"stopped at step {step} with everything saved: run the same command to resume"


class StopAndSaveCallback(TrainerCallback):
    """Callback: stop on signals, save by wall clock."""

    def __init__(self, trainer: FaultTolerantTrainer) -> None:
        self.trainer = trainer
        self.start = (0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.restore()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.start = (time.process_time(), time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        trainer.cpu_seconds += time.process_time() - self.start[0]
        trainer.step_seconds += time.perf_counter() - self.start[1]
        if trainer.ema is not None:  # not a part of the step: the times are those of a run without it
            trainer.ema.update(trainer.model)
        if state.global_step >= state.max_steps:
            control.should_log = True  # also what is left since the last of `logging.logging_steps`
        if trainer.stopping():
            trainer._evaluation_due, control.should_evaluate = control.should_evaluate, False
            control.should_save = control.should_training_stop = True
        elif trainer.nonfinite.streak:
            control.should_save = False  # the last good checkpoint is not pushed out in bad times
        elif trainer.save_due():
            control.should_save = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stop("stopped in an evaluation: run the same command to resume")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stop(_stopped_at(state.global_step))

    def _stop(self, message: str) -> None:
        if self.trainer.stopping():
            raise Interrupted(self.trainer.options.signals.received or 15, message)
