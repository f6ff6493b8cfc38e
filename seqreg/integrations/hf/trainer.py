"""Drop-in trainers: the Hugging Face ones plus `criterion=`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer

from seqreg import heads
from seqreg.context import Count
from seqreg.criterion import Criterion, LossReport
from seqreg.errors import BadInput
from seqreg.integrations.hf.context import context, count

RAW_HEAD = "seqreg_head.safetensors"
"""Raw weights of a spectrally normalised head, beside the folded ones that `from_pretrained` reads."""


TERM_STATE = "seqreg_terms.safetensors"
"""What the terms of a criterion keep from step to step."""


class RegularizedTrainer(Trainer):
    """`transformers.Trainer` with `criterion=`: for classifiers, regression heads and language models.

    The loss, also of a baseline without terms, is the criterion's alone; terms are off in evaluation. Every log has
    part/<name> (these add up to the loss), value/<name> and weight/<name>. An R4F head is saved folded, so that
    `from_pretrained` reads it, with what a resumed training needs beside it.

    Args:
        criterion: the loss
        anatomy_steps: log `Criterion.anatomy` under anatomy/ every so many steps; 0 for never
    """

    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, criterion: Criterion, anatomy_steps: int = 500, **kwargs: Any) -> None:
        if not isinstance(criterion, Criterion):
            raise BadInput(f"criterion={criterion!r}: expected a Criterion, such as Criterion(R3F(weight=0.1))")
        super().__init__(*args, **kwargs)
        if isinstance(anatomy_steps, bool) or not isinstance(anatomy_steps, int) or anatomy_steps < 0:
            raise BadInput(f"anatomy_steps={anatomy_steps!r}: expected a whole number >= 0")
        self.criterion, self.anatomy_steps = criterion, anatomy_steps
        self._window = _Window(criterion)
        self._anatomy: dict[str, float] = {}
        self._anatomy_at = -1
        settings = self.args
        if settings.label_smoothing_factor:
            raise BadInput(
                f"label_smoothing_factor={settings.label_smoothing_factor}: set Criterion(label_smoothing=...) instead"
            )
        if self.compute_loss_func is not None:
            raise BadInput("compute_loss_func and criterion both compute the loss: pass one of them")
        if settings.n_gpu > 1:
            raise BadInput(f"{settings.n_gpu} GPUs in one process (DataParallel) are not supported: use torchrun")
        if heads.raw_state(self.model) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise BadInput("an R4F head cannot be exported under FSDP or DeepSpeed yet: train it with DDP")
        settings.logging_nan_inf_filter = False  # a NaN must be seen in the log, not replaced by the last good loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._window = _Window(self.criterion)
        return super().train(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[Any, Any]:
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return samples, count(self.model, samples) if samples else None

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        whole = num_items_in_batch if isinstance(num_items_in_batch, Count) else None
        step = self.state.global_step
        ctx = context(model, inputs, step=step, count=whole)
        report = self.criterion(ctx)
        if ctx.training and self.anatomy_steps and step % self.anatomy_steps == 0 and step != self._anatomy_at:
            self._anatomy, self._anatomy_at = self.criterion.anatomy(ctx), step
        if ctx.training:
            self._window.add(report, 1 / getattr(self, "current_gradient_accumulation_steps", 1))
        return (report.total, ctx.clean.output) if return_outputs else report.total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._window.flush(self.accelerator))
            logs.update({f"anatomy/{key}": number for key, number in self._anatomy.items()})
            self._anatomy = {}
        super().log(logs, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        state = self.criterion.state_dict()
        if state and self.args.should_save:
            state = {key: value.contiguous() for key, value in state.items()}
            safetensors.torch.save_file(state, os.path.join(output_dir, TERM_STATE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, TERM_STATE)
        if os.path.exists(path):
            self.criterion.load_state_dict(safetensors.torch.load_file(path))
        elif any(term.remembers for term in self.criterion.terms):
            raise BadInput(f"{path} is missing: a term of this criterion remembers, and cannot resume without it")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        raw = heads.raw_state(self.model)
        if raw and state_dict is None:
            state_dict = heads.folded_state(self.model)
        super()._save(output_dir, state_dict)
        settings = self.args
        if raw and settings.should_save:
            folder = settings.output_dir if output_dir is None else output_dir
            safetensors.torch.save_file(
                {key: value.contiguous() for key, value in raw.items()}, os.path.join(folder, RAW_HEAD)
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_head(resume_from_checkpoint, self.model if model is None else model)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_head(self.state.best_model_checkpoint, self.model)

    def _load_head(self, folder: str, model: nn.Module) -> None:
        path = os.path.join(folder, RAW_HEAD)
        normalised = bool(heads.raw_state(model))
        if normalised != os.path.exists(path):
            fix = "was not trained with a normalised head" if normalised else "was: call r4f(model) before resuming"
            raise BadInput(f"{folder} {fix}")
        if normalised:
            model.load_state_dict(safetensors.torch.load_file(path), strict=False)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        raw = heads.raw_state(self.model)
        for keys in (load_result.missing_keys, load_result.unexpected_keys):
            keys[:] = [key for key in keys if key not in raw and not _is_folded(key, raw)]
        super()._issue_warnings_after_load(load_result)


def _is_folded(key: str, raw: Mapping[str, Tensor]) -> bool:
    layer, _, name = key.rpartition(".")
    return f"{layer}.parametrizations.{name}.original" in raw


class RegularizedSeq2SeqTrainer(RegularizedTrainer, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with `criterion=`: a `RegularizedTrainer` that can generate while it evaluates."""

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """As in the base class, but the loss beside generated text is the criterion's too."""
        if not self.args.predict_with_generate or prediction_loss_only or "labels" not in inputs:
            plain: tuple[Any, Any, Any] = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
            )
            return plain
        source = {k: v for k, v in inputs.items() if k != "labels" and not k.startswith("decoder_")}
        _, generated, _ = super().prediction_step(model, source, prediction_loss_only, ignore_keys, **gen_kwargs)
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs).detach()
        return loss, generated, inputs["labels"]


class _Window:
    """Parts of the loss since the last log, weighted exactly as the Trainer's own `loss`, so that they add up."""

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion
        self.sums: dict[str, Tensor] = {}
        self.steps: dict[str, float] = defaultdict(float)

    def add(self, report: LossReport, share: float) -> None:
        """Take in one micro-batch, which is `share` of an optimizer step."""
        for prefix, numbers in (("part", report.parts), ("value", report.values)):
            for name, number in numbers.items():
                key = f"{prefix}/{name}"
                self.sums[key] = self.sums.get(key, torch.zeros_like(number)) + number
                self.steps[key] += share
        for name, weight in report.weights.items():
            key = f"weight/{name}"
            self.sums[key] = self.sums.get(key, torch.tensor(0.0)) + weight * share
        self.steps["all"] += share

    def flush(self, accelerator: Any) -> dict[str, float]:
        """Means over the window and over the ranks: parts and weights over all steps, values over active ones."""
        names = [term.name for term in self.criterion.terms]
        keys = ["part/base", "value/nll", *(f"{kind}/{name}" for name in names for kind in ("part", "value", "weight"))]
        keys = [key for key in keys if key in self.sums]
        if not keys:
            return {}
        steps = [self.steps[key] if key.startswith("value/") else self.steps["all"] for key in keys]
        means = torch.stack([self.sums[key].float().to(accelerator.device) for key in keys])
        means = accelerator.reduce(means / torch.tensor(steps, device=accelerator.device), "mean")
        self.sums, self.steps = {}, defaultdict(float)
        return dict(zip(keys, means.tolist(), strict=True))
