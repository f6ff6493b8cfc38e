"""Drop-in trainers: the Hugging Face ones plus `criterion=`."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer

from seqreg import spectral_norm
from seqreg.context import Context, Count, Evaluation
from seqreg.criterion import Criterion, LossReport
from seqreg.errors import BadInput
from seqreg.integrations.hf.callbacks import Alternate, Around, Nothing
from seqreg.integrations.hf.context import context, count
from seqreg.integrations.hf.loss_log import Window
from seqreg.losses import IGNORE, Base
from seqreg.overrides import generator_state, replay, training_off
from seqreg.selective_update import ChildTuningD, Update
from seqreg.smoothness import observe, source_gap

RAW_HEAD = "seqreg_head.safetensors"
"""Raw weights of a spectrally normalised head, beside the folded ones that `from_pretrained` reads."""


TERM_STATE = "seqreg_terms.safetensors"
"""What the terms of a criterion keep from step to step, and the update."""
UPDATE, REFERENCE = "#update", "#reference"


class RegularizedTrainer(Trainer):
    """`transformers.Trainer` with `criterion=`: for classifiers, regression heads and language models.

    The loss, also of a baseline without terms, is the criterion's alone; terms are off in evaluation. Every log has
    part/<name> (these add up to the loss), value/<name> and weight/<name>. An R4F head is saved folded, so that
    `from_pretrained` reads it, with what a resumed training needs beside it.

    Args:
        criterion: the loss
        diagnostics_steps: log `Criterion.diagnostics` under diagnostics/ every so many steps; 0 for never
        unlabeled_dataset: rows for terms that take unlabelled data: after every optimizer step on labelled ones another
            is made on these, of the terms alone. Their order depends on the seed and the step, so that it resumes
        update: a change of the optimizer's step, such as `seqreg.selective_update.SelectiveUpdate()`
        smoothness_steps: log the Jacobian norm, the effective rank and the CKA to the model at the start, of every
            layer, under smoothness/ every so many steps, on the first rows of the evaluation (or training) data
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *args: Any,
        criterion: Criterion,
        diagnostics_steps: int = 500,
        unlabeled_dataset: Any = None,
        update: Update | None = None,
        smoothness_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        if not isinstance(criterion, Criterion):
            raise BadInput(f"criterion={criterion!r}: expected a Criterion, such as Criterion(R3F(weight=0.1))")
        super().__init__(*args, **kwargs)
        if isinstance(diagnostics_steps, bool) or not isinstance(diagnostics_steps, int) or diagnostics_steps < 0:
            raise BadInput(f"diagnostics_steps={diagnostics_steps!r}: expected a whole number >= 0")
        if isinstance(smoothness_steps, bool) or not isinstance(smoothness_steps, int) or smoothness_steps < 0:
            raise BadInput(f"smoothness_steps={smoothness_steps!r}: expected a whole number >= 0")
        self.criterion, self.diagnostics_steps, self.smoothness_steps = criterion, diagnostics_steps, smoothness_steps
        self._reference: dict[str, Tensor] | None = None
        self._window = Window(criterion)
        self._diagnostics: dict[str, float] = {}
        self._diagnostics_at = self._smoothness_at = -1
        self.unlearnable = False
        """Whether no row of the present step has a label."""
        self.add_callback(Nothing(self))
        self.update = update
        if update is not None:
            self.add_callback(Around(self, update))
        self.unlabeled_dataset = unlabeled_dataset
        self._unlabelled: dict[str, list[Tensor]] = defaultdict(list)
        waiting = [term.name for term in criterion.terms if term.needs_unlabelled]
        if waiting and unlabeled_dataset is None:
            raise BadInput(f"{waiting[0]}: mode='alternate' needs unlabeled_dataset=")
        if unlabeled_dataset is not None:
            if not hasattr(unlabeled_dataset, "__getitem__") or not len(unlabeled_dataset):
                raise BadInput("unlabeled_dataset: expected rows that can be counted and indexed, at least one")
            if not any(term.takes_unlabelled for term in criterion.terms):
                raise BadInput("unlabeled_dataset: no term of this criterion takes unlabelled data; JacHess does")
            self.add_callback(Alternate(self))
        settings = self.args
        if settings.label_smoothing_factor:
            raise BadInput(
                f"label_smoothing_factor={settings.label_smoothing_factor}: set Criterion(label_smoothing=...) instead"
            )
        if (alpha := settings.neftune_noise_alpha) is not None:
            raise BadInput(
                f"neftune_noise_alpha={alpha} would noise every pass of a term on its own, and no encoder-decoder at "
                f"all: set Criterion(NEFTune(alpha={alpha})) instead"
            )
        if self.compute_loss_func is not None:
            raise BadInput("compute_loss_func and criterion both compute the loss: pass one of them")
        if settings.n_gpu > 1:
            raise BadInput(f"{settings.n_gpu} GPUs in one process (DataParallel) are not supported: use torchrun")
        if spectral_norm.raw_state(self.model) and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise BadInput("an R4F head cannot be exported under FSDP or DeepSpeed yet: train it with DDP")
        settings.logging_nan_inf_filter = False  # a NaN must be seen in the log, not replaced by the last good loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._window, self._diagnostics_at, self._smoothness_at, self._reference = Window(self.criterion), -1, -1, None
        self.criterion.memory.clear()  # a resumed training loads it
        return super().train(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[Any, Any]:
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        whole = count(self.model, samples) if samples else None
        self.unlearnable = whole is not None and whole.labels == 0
        if self.unlearnable:
            self._check_some_label()
            warnings.warn(f"step {self.state.global_step}: no row has a label, so the step is not made", stacklevel=2)
        return samples, whole

    def _check_some_label(self) -> None:
        """Refuse data without any label; looked at only when a whole step had none."""
        rows = self.train_dataset
        if self.state.global_step == 0 and hasattr(rows, "__getitem__"):
            found = (torch.as_tensor(rows[index]["labels"]) for index in range(len(rows)))
            if not any(bool((labels != IGNORE).any()) for labels in found):
                raise BadInput(f"all labels of all {len(rows)} training rows are {IGNORE}: there is nothing to learn")

    def report(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        whole: Count | None = None,
        *,
        outputs: bool = False,
        criterion: Criterion | None = None,
    ) -> tuple[LossReport, Context]:
        """The loss of one micro-batch of the present step, and the context that it was taken on."""
        ctx = context(model, inputs, step=self.state.global_step, count=whole)
        return (self.criterion if criterion is None else criterion)(ctx, batched=not outputs), ctx

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        whole, step = num_items_in_batch if isinstance(num_items_in_batch, Count) else None, self.state.global_step
        report, ctx = self.report(model, inputs, whole, outputs=return_outputs)
        every = self.diagnostics_steps
        if ctx.training and every and step % every == 0 and step != self._diagnostics_at:
            diagnostics = self.criterion.diagnostics(ctx)
            if self.unlabeled_dataset is not None:  # what is regularized there shows here, on labelled rows
                with ctx.forward.observed(), torch.no_grad():
                    gap = source_gap(Evaluation(ctx, self.criterion.base))
                diagnostics |= {} if gap is None else {"source_gap": gap}
            self._diagnostics |= {f"diagnostics/{key}": number for key, number in diagnostics.items()}
            self._diagnostics_at = step
        if ctx.training and self.smoothness_steps and step % self.smoothness_steps == 0 and step != self._smoothness_at:
            self._diagnostics |= {f"smoothness/{key}": number for key, number in self._smoothness(model).items()}
            self._smoothness_at = step
        if ctx.training:
            self._window.add(report, 1 / getattr(self, "current_gradient_accumulation_steps", 1))
        return (report.total, report.clean and report.clean.output) if return_outputs else report.total

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._window.flush(self.accelerator))
            logs.update(self._diagnostics)
            self._diagnostics = {}
            for name, values in self._unlabelled.items():
                logs[f"unlabelled/{name}"] = float(torch.stack(values).float().mean())
            self._unlabelled.clear()
        super().log(logs, start_time)

    def _smoothness(self, model: nn.Module) -> dict[str, float]:
        rows = self.eval_dataset if hasattr(self.eval_dataset, "__getitem__") else self.train_dataset
        rows = next(iter(rows.values())) if isinstance(rows, dict) else rows
        size = min(self.args.per_device_eval_batch_size, len(rows))
        collate = self._get_collator_with_removed_columns(self.data_collator, "smoothness")
        batch = self._prepare_inputs(collate([rows[i] for i in range(size)]))
        base = Base(self.criterion.label_smoothing)
        with training_off(self.model.modules()):
            numbers, own = observe(context(self.model, batch), self._reference, base=base)
        if self._reference is None:
            self._reference = own
        return numbers

    @property
    def _remembers(self) -> bool:
        return (
            self.update is not None or self.smoothness_steps > 0 or any(term.stateful for term in self.criterion.terms)
        )

    def regularizer_step(self, step: int) -> None:
        """One optimizer step on unlabelled rows, of the terms alone."""
        model, settings = self.model_wrapped.train(), self.args
        batch = self._prepare_inputs(self._unlabelled_batch(step))
        with self.compute_loss_context_manager():
            ctx, world = context(model, batch, unlabelled=True, step=step), self.accelerator.num_processes
            ctx = replace(ctx, count=Count(ctx.count.labels * world, ctx.count.sequences * world, world))
            report = self.criterion(ctx)
            if self.diagnostics_steps and step % self.diagnostics_steps == 0:
                diagnostics = self.criterion.diagnostics(ctx)
                self._diagnostics |= {f"diagnostics/{key}": number for key, number in diagnostics.items()}
        if not report.total.requires_grad:  # no term counts at this step
            return
        self.accelerator.backward(report.total)
        norm = self._clip_grad_norm(model) if settings.max_grad_norm else None
        self._get_grad_norm(model, grad_norm=norm)
        with contextlib.nullcontext() if self.update is None else self.update.around(model.parameters()):
            self.optimizer.step()
        self.optimizer.zero_grad()
        for name, part in report.parts.items():
            if name != "base":
                self._unlabelled[name].append(part)

    def measure(self, update: ChildTuningD) -> None:
        """The Fisher information of the training set, of the base loss in training mode; draws nothing."""
        rows, size, base = self.train_dataset, self.args.per_device_train_batch_size, self.criterion
        if not hasattr(rows, "__getitem__"):
            raise BadInput(
                "ChildTuningD measures the training set first: it needs rows that can be counted and indexed"
            )
        loss = Criterion(label_smoothing=base.label_smoothing, smoothing=base.smoothing, per=base.per, fused=base.fused)
        module, device = self.model.train(), self.args.device
        with replay(generator_state(device), device):
            for first in range(self.args.process_index * size, len(rows), self.args.world_size * size):
                batch = self.training_batch(range(first, min(first + size, len(rows))))
                with self.compute_loss_context_manager():
                    total = loss(context(module, batch)).total
                total.backward()  # type: ignore[no-untyped-call]
                update.measure(module.parameters())
                module.zero_grad()
        if self.args.world_size > 1:
            update.fisher = {i: self.accelerator.reduce(fisher, "sum") for i, fisher in sorted(update.fisher.items())}

    def training_batch(self, indices: Iterable[int]) -> dict[str, Any]:
        """Some rows of the training set."""
        collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        return dict(self._prepare_inputs(collate([self.train_dataset[index] for index in indices])))

    def _unlabelled_batch(self, step: int) -> Any:
        """The rows of this rank at a step: epochs of a permutation that depends on the seed alone."""
        rows, size, world = self.unlabeled_dataset, self.args.per_device_train_batch_size, self.args.world_size
        first = (step * world + self.args.process_index) * size
        chosen = []
        for place in range(first, first + size):
            epoch, index = divmod(place, len(rows))
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.args.seed + epoch))
            chosen.append(rows[int(order[index])])
        return self._get_collator_with_removed_columns(self.data_collator, "unlabelled")(chosen)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self._save_terms(output_dir)

    def _save_terms(self, output_dir: str) -> None:
        state = self.criterion.state_dict()
        if self._reference is not None:
            state |= {f"{REFERENCE}/{key}": value for key, value in self._reference.items()}
        if self.update is not None:
            state |= {f"{UPDATE}/{key}": value for key, value in self.update.state_dict().items()}
        if self._remembers and self.args.should_save:  # also while there is nothing to remember yet
            state = {key: value.contiguous() for key, value in state.items()}
            safetensors.torch.save_file(state, os.path.join(output_dir, TERM_STATE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_terms(checkpoint)

    def _load_terms(self, checkpoint: str, *, changed: bool = False) -> None:
        """What the terms remember.

        Args:
            changed: the terms need not be those of the checkpoint: what is gone is forgotten, what is new begins
        """
        path = os.path.join(checkpoint, TERM_STATE)
        if os.path.exists(path):
            state = safetensors.torch.load_file(path)
            reference = {key: state.pop(key) for key in list(state) if key.startswith(f"{REFERENCE}/")}
            self._reference = {key.removeprefix(f"{REFERENCE}/"): value for key, value in reference.items()} or None
            of_update = {key: state.pop(key) for key in list(state) if key.startswith(f"{UPDATE}/")}
            if changed:
                names = {term.name for term in self.criterion.terms}
                state = {key: value for key, value in state.items() if key.partition("/")[0] in names}
            self.criterion.load_state_dict(state)
            if self.update is not None:
                self.update.load_state_dict({key.removeprefix(f"{UPDATE}/"): value for key, value in of_update.items()})
        elif self._remembers and not changed:
            raise BadInput(f"{path} is missing: a term of this criterion remembers, and cannot resume without it")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        raw = spectral_norm.raw_state(self.model)
        if raw and state_dict is None:
            state_dict = spectral_norm.folded_state(self.model)
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
        normalised = bool(spectral_norm.raw_state(model))
        if normalised != os.path.exists(path):
            fix = "was not trained with a normalised head" if normalised else "was: call r4f(model) before resuming"
            raise BadInput(f"{folder} {fix}")
        if normalised:
            model.load_state_dict(safetensors.torch.load_file(path), strict=False)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        raw = spectral_norm.raw_state(self.model)
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
