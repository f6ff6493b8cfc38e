"""Trainers with a criterion: what `attach` makes of any trainer, and the Hugging Face ones plus `criterion=`."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_utils import has_length

from seqreg import spectral_norm
from seqreg.context import Context, Count, Evaluation
from seqreg.criterion import Criterion, LossReport
from seqreg.engines import checkpoint as sharded
from seqreg.engines.detect import check_engine, check_processes, engine_of, is_sharded
from seqreg.engines.shards import whole_state
from seqreg.errors import BadInput
from seqreg.integrations.hf.callbacks import CheckedStep, UpdateCallback
from seqreg.integrations.hf.context import ContextBuilder, context, count
from seqreg.integrations.hf.loss_log import Window
from seqreg.integrations.hf.record import CriterionRecord
from seqreg.integrations.hf.reference import adapted
from seqreg.integrations.hf.sft import record_sft_metrics, replace_sft_loss
from seqreg.integrations.hf.streams import (
    FurtherStream,
    StreamSampler,
    count_streams,
    replay_ratio,
    split_streams,
    with_stream,
)
from seqreg.losses import IGNORE, Base
from seqreg.overrides import generator_state, replay, training_off
from seqreg.selective_update import MeasuredUpdate, Update
from seqreg.smoothness import observe, source_gap

RAW_HEAD = "seqreg_head.safetensors"
"""Raw weights of a spectrally normalised head, beside the folded ones that `from_pretrained` reads."""
TERM_STATE = "seqreg_terms.safetensors"
"""State of the terms of a criterion, of the update and of the reference of the smoothness measurements."""
UPDATE, REFERENCE, DRAWN = "#update", "#reference", "#drawn"
SHARDS, SHARDED_OPTIMIZER, SHARDED_TERMS = "sharded/model", "sharded/optimizer", "sharded/terms"
"""Folders of a checkpoint under FSDP2: the weights, and what the optimizer and the terms remember of each."""


def check_criterion(criterion: Any) -> None:
    if not isinstance(criterion, Criterion):
        raise BadInput(f"criterion={criterion!r}: expected a Criterion, such as Criterion(R3F(weight=0.1))")


def is_indexed(examples: Any) -> bool:
    """Whether examples can be counted and indexed, unlike those of an IterableDataset."""
    return hasattr(examples, "__getitem__") and has_length(examples)


class RegularizedTrainer(Trainer):
    """`transformers.Trainer` with `criterion=`: for classifiers, regression heads and language models.

    The loss, also of a baseline without terms, is the criterion's alone; terms are off in evaluation. Every log has
    part/<name> (these add up to the loss), value/<name> and weight/<name>. An R4F head is saved folded, so that
    `from_pretrained` reads it, with what a resumed run needs beside it.

    Args:
        criterion: the loss
        diagnostics_steps: log `Criterion.diagnostics` under diagnostics/ every so many steps; 0 for never
        unlabelled_dataset: texts without labels, for terms with `on="unlabelled"` or "both"; every optimizer step has
            some. For a seq2seq model with "labels" that the starting model wrote (`written_targets`), which are targets
            of the decoder and of divergences, never of the base loss
        unlabelled_ratio: of them per labelled example
        replay_dataset: labelled examples of an old task, which every optimizer step learns too
        replay_share: of old examples among the labelled ones
        update: a change of the optimizer's step, such as `seqreg.selective_update.StochasticUpdate()`
        smoothness_steps: log the Jacobian norm, the effective rank and the CKA to the model at the start, of every
            layer, under smoothness/ every so many steps, on the first examples of the evaluation (or training) data
        build_context: makes the context of a batch, called as `seqreg.integrations.hf.context` is, which is the
            default: for models and losses that it does not know
        strict: refuse to resume from a checkpoint of another criterion, or of none, instead of a warning
    """

    loss_is_scaled_for_ga = True
    keeps_record = True
    """Whether the criterion is written to every checkpoint, and compared by a run that resumes."""

    def __init__(
        self,
        *args: Any,
        criterion: Criterion,
        diagnostics_steps: int = 500,
        unlabelled_dataset: Any = None,
        unlabelled_ratio: float = 1.0,
        replay_dataset: Any = None,
        replay_share: float = 0.05,
        update: Update | None = None,
        smoothness_steps: int = 0,
        build_context: ContextBuilder | None = None,
        strict: bool = False,
        **kwargs: Any,
    ) -> None:
        check_criterion(criterion)
        super().__init__(*args, **kwargs)
        self.set_criterion(
            criterion,
            diagnostics_steps=diagnostics_steps,
            unlabelled_dataset=unlabelled_dataset,
            unlabelled_ratio=unlabelled_ratio,
            replay_dataset=replay_dataset,
            replay_share=replay_share,
            update=update,
            smoothness_steps=smoothness_steps,
            build_context=build_context,
            strict=strict,
        )

    def set_criterion(
        self,
        criterion: Criterion,
        *,
        diagnostics_steps: int = 500,
        unlabelled_dataset: Any = None,
        unlabelled_ratio: float = 1.0,
        replay_dataset: Any = None,
        replay_share: float = 0.05,
        update: Update | None = None,
        smoothness_steps: int = 0,
        build_context: ContextBuilder | None = None,
        strict: bool = False,
    ) -> None:
        """All that a trainer with a criterion has beyond the one that it is made from; called once."""
        check_criterion(criterion)
        engine = engine_of(self.model)
        if engine == "tensor parallelism":
            raise BadInput("tensor parallelism has not been tried in a Trainer: use a loop of your own, DDP or FSDP2")
        self.sharded = engine == "FSDP2"
        """Whether the model was sharded, by `seqreg.integrations.hf.shard`, before the trainer was made."""
        self._check_settings(update)
        if self.sharded:
            if not hasattr(self, "is_distributed_loading_by_transformers"):
                raise BadInput("the Trainer of transformers 4 would wrap a model that FSDP2 shards: use transformers 5")
            self.is_distributed_loading_by_transformers = True  # it is neither wrapped nor moved
        for name, steps in (("diagnostics_steps", diagnostics_steps), ("smoothness_steps", smoothness_steps)):
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
                raise BadInput(f"{name}={steps!r}: expected a whole number >= 0")
        criterion.check_streams({"labelled"} if unlabelled_dataset is None else {"labelled", "unlabelled"})
        self.streams: dict[FurtherStream, StreamSampler] = {}
        """The further examples of every step."""
        if replay_dataset is not None:
            self._add_stream("replay", replay_dataset, replay_ratio(replay_share), build_context)
        if unlabelled_dataset is not None:
            self._add_stream("unlabelled", unlabelled_dataset, unlabelled_ratio, build_context)
        self.criterion, self.diagnostics_steps, self.smoothness_steps = criterion, diagnostics_steps, smoothness_steps
        self.build_context = build_context or context
        self.model_accepts_loss_kwargs = True  # or transformers 4 divides the loss by the accumulated batches again
        self._reference: dict[str, Tensor] | None = None
        self._window = Window(criterion)
        self._diagnostics: dict[str, float] = {}
        self._measured_at = -1
        self._is_sft = replace_sft_loss(self)
        self.step_count: Count | None = None
        """What the present step averages over."""
        self.unlearnable = False
        """Whether no example of the present step has a label."""
        self.losses_of_step = 0
        """Losses that the criterion has computed for the present step."""
        self.update = update
        self.criterion_record = CriterionRecord(self, strict) if self.keeps_record else None
        self.add_callback(CheckedStep(self))
        if self.criterion_record is not None:
            self.add_callback(self.criterion_record)
        if update is not None:
            self.add_callback(UpdateCallback(self, update))
        self.args.logging_nan_inf_filter = False  # a NaN must be seen in the log, not replaced by the last good loss

    def _add_stream(self, name: FurtherStream, examples: Any, ratio: Any, build_context: ContextBuilder | None) -> None:
        if self.is_deepspeed_enabled:
            raise BadInput(f"{name}_dataset has not been tried with DeepSpeed in a Trainer: use DDP or FSDP2")
        if build_context is not None:
            raise BadInput(
                f"{name}_dataset and build_context=: batches of further streams are those of hf.context alone"
            )
        if not is_indexed(examples) or not len(examples):
            raise BadInput(f"{name}_dataset: expected examples that can be counted and indexed, at least one")
        if not isinstance(ratio, (int, float)) or isinstance(ratio, bool) or not 0 < ratio < 1000:
            raise BadInput(f"{name}_ratio={ratio!r}: expected a number > 0, of examples per labelled example")
        self.streams[name] = StreamSampler(
            examples, ratio, self.args.seed, self.args.process_index, self.args.world_size
        )

    def _check_settings(self, update: Update | None) -> None:
        """Refuse settings of the trainer that would be ignored, or make the loss another one."""
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
        cut = getattr(self.accelerator, "parallelism_config", None)
        if cut is not None and (cut.cp_enabled or cut.sp_enabled):
            raise BadInput("context and sequence parallelism cut sequences, which is not supported: use DDP")
        if self.sharded and self.is_fsdp_enabled:
            raise BadInput(f"{self._asked_for_fsdp}: the model is sharded by FSDP2 already: leave the setting out")
        spread = self.sharded or self.is_fsdp_enabled or self.is_deepspeed_enabled
        if spectral_norm.raw_state(self.model) and spread:
            raise BadInput("an R4F head cannot be exported under FSDP or DeepSpeed yet: train it with DDP")
        if update is not None and spread:
            raise BadInput(f"{type(update).__name__} needs whole gradients, not those of FSDP or DeepSpeed: use DDP")
        if self.sharded and adapted(self.model) is not None:
            raise BadInput("adapters are not saved from the shards of FSDP2: train them with DDP")
        if self.sharded and settings.optim == "adafactor":
            raise BadInput("optim='adafactor' averages rows and columns, which FSDP2 cuts: use adamw_torch")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._check_settings(self.update)  # which may have been set since
        self._window, self._measured_at, self._reference = Window(self.criterion), -1, None
        self.criterion.memory.clear()  # a resumed run loads it, and what an update keeps
        if self.update is not None:
            self.update.reset()
        return super().train(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[Any, Any]:
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        check_processes(self.args.world_size)
        self._add_further_batches(samples)
        step_count = count_streams(self.model, samples, self.streams, self.build_context) if samples else None
        if step_count is not None and type(self).compute_loss is not RegularizedTrainer.compute_loss:
            step_count = dataclasses.replace(step_count, contexts=None)  # it may take something out of its inputs first
        self.step_count = step_count
        self.unlearnable, self.losses_of_step = step_count is not None and step_count.labels == 0, 0
        if self.unlearnable:
            self._check_some_label()
            warnings.warn(f"step {self.state.global_step}: no example has a label, so it is skipped", stacklevel=2)
        return samples, step_count

    def _add_further_batches(self, samples: list[Any]) -> None:
        """Let the micro-batches of a step carry their examples of every further stream."""
        labelled = len(samples) * self.args.train_batch_size
        for name, sampler in self.streams.items() if samples else ():
            for place, indices in enumerate(sampler.draw(labelled, len(samples))):
                if indices:
                    samples[place] = with_stream(samples[place], name, self._collated(sampler.examples, indices))

    def _check_some_label(self) -> None:
        """Refuse data without any label; looked at only when a whole step had none."""
        examples = self.train_dataset
        if self.state.global_step == 0 and is_indexed(examples) and "labels" in examples[0]:
            labels = (torch.as_tensor(examples[index]["labels"]) for index in range(len(examples)))
            if not any(bool((tensor != IGNORE).any()) for tensor in labels):
                raise BadInput(
                    f"all labels of all {len(examples)} training examples are {IGNORE}: there is nothing to learn"
                )

    def report(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        step_count: Count | None = None,
        *,
        outputs: bool = False,
        criterion: Criterion | None = None,
    ) -> tuple[LossReport, Context]:
        """The loss of one micro-batch of the present step, and the context that it was taken on."""
        inputs, further = split_streams(inputs)
        made = {"step": self.state.global_step, "count": step_count}
        ctx = self.build_context(model, inputs, **made)
        others = [context(model, batch, stream=name, **made) for name, batch in further.items()]
        return (self.criterion if criterion is None else criterion)(ctx, *others, batched=not outputs), ctx

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if "skip_logits" in inputs:  # which Trainer asks of Liger's kernels, whose loss is not computed here
            inputs = {key: value for key, value in inputs.items() if key != "skip_logits"}
        step_count = num_items_in_batch if isinstance(num_items_in_batch, Count) else None
        if step_count is None and model.training and self.is_in_train:
            step_count = self.step_count  # which a compute_loss of its own need not hand on
        elif step_count is None and num_items_in_batch is not None and self.args.average_tokens_across_devices:
            step_count = count(self.model, [inputs], build_context=self.build_context)  # of an evaluation
        if model.training:
            check_engine(model, self._asked_for_fsdp)
        report, ctx = self.report(model, inputs, step_count, outputs=return_outputs)
        self.losses_of_step += 1
        if self._is_sft:
            record_sft_metrics(self, report, ctx, inputs)
        if ctx.training:
            if self.state.global_step != self._measured_at:
                self._measured_at = self.state.global_step
                self._measure(ctx, inputs)
            self._window.add(report, 1 / getattr(self, "current_gradient_accumulation_steps", 1))
        return (report.total, report.clean and report.clean.output) if return_outputs else report.total

    @property
    def _asked_for_fsdp(self) -> str:
        """The setting that asks for FSDP, if one does."""
        if self.args.fsdp:
            return f"fsdp={self.args.fsdp!r}"
        asked = os.environ.get("ACCELERATE_USE_FSDP", "")
        return f"ACCELERATE_USE_FSDP={asked}" if asked.lower() == "true" else ""

    def _measure(self, ctx: Context, inputs: Mapping[str, Any]) -> None:
        """Diagnostics and smoothness on the first micro-batch of a step, for the next log."""
        step = self.state.global_step
        if self.diagnostics_steps and step % self.diagnostics_steps == 0:
            self._diagnose(ctx)
            if texts := split_streams(inputs)[1].get("unlabelled"):
                self._diagnose(context(self.model, texts, step=step, stream="unlabelled"), ".unlabelled")
            if "unlabelled" in self.streams:  # what is regularized there shows here, on labelled examples
                with ctx.observed() as observed, torch.no_grad():
                    gap = source_gap(Evaluation(observed, self.criterion.base))
                self._diagnostics |= {} if gap is None else {"diagnostics/source_gap": gap}
        if self.smoothness_steps and step % self.smoothness_steps == 0:
            self._diagnostics |= {f"smoothness/{key}": number for key, number in self._smoothness().items()}

    def _diagnose(self, ctx: Context, stream: str = "") -> None:
        for key, value in self.criterion.diagnostics(ctx).items():
            name, _, number = key.partition("/")
            self._diagnostics[f"diagnostics/{name}{stream}/{number}"] = value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._window.flush(self.accelerator))
            logs.update(self._diagnostics)
            self._diagnostics = {}
        super().log(logs, start_time)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """As in the base class, but the loss beside text that a Seq2SeqTrainer generates is the criterion's too."""
        generates = isinstance(self, Seq2SeqTrainer) and self.args.predict_with_generate
        if not generates or prediction_loss_only or "labels" not in inputs:
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

    def _smoothness(self) -> dict[str, float]:
        examples = self.eval_dataset
        examples = next(iter(examples.values())) if isinstance(examples, dict) else examples
        examples = examples if is_indexed(examples) else self.train_dataset
        if not is_indexed(examples):
            raise BadInput("smoothness_steps: it needs evaluation or training examples that can be indexed")
        size = min(self.args.per_device_eval_batch_size, len(examples))
        batch, base = self._batch(examples, range(size)), Base(self.criterion.label_smoothing)
        with training_off(self.model.modules()):
            numbers, reference = observe(self.build_context(self.model, batch), self._reference, base=base)
        if self._reference is None:
            self._reference = reference
        return numbers

    @property
    def _remembers(self) -> bool:
        return (
            self.update is not None
            or self.smoothness_steps > 0
            or bool(self.streams)
            or any(term.stateful for term in self.criterion.terms)
        )

    def begin_update(self, update: Update, loader: Any) -> None:
        """Tell an update about the run, and measure what it needs before the first step."""
        arguments, steps = self.args, None
        if has_length(loader):
            steps = math.ceil(len(loader) / arguments.gradient_accumulation_steps)
        update.begin(self.model, steps_per_epoch=steps, seed=arguments.seed)
        if isinstance(update, MeasuredUpdate) and update.wants_measuring:
            self.measure(update)

    def measure(self, update: MeasuredUpdate) -> None:
        """The squared gradients of the training set, of the base loss in training mode; draws nothing."""
        examples, size, base = self.train_dataset, self.args.per_device_train_batch_size, self.criterion
        if not is_indexed(examples):
            name = type(update).__name__
            raise BadInput(f"{name} measures the training set first: it needs examples that can be indexed")
        loss = base.without(*(term.name for term in base.terms))
        module, device, indices = self.model.train(), self.args.device, self._measured_indices(update)
        with replay(generator_state(device), device):
            for first in range(self.args.process_index * size, len(indices), self.args.world_size * size):
                batch = self._batch(examples, indices[first : first + size])
                with self.compute_loss_context_manager():
                    total = loss(self.build_context(module, batch)).total
                total.backward()  # type: ignore[no-untyped-call]
                update.measure(module.parameters())
                module.zero_grad()
        if self.args.world_size > 1:
            update.squares = self._summed(update.squares)

    def _measured_indices(self, update: MeasuredUpdate) -> Sequence[int]:
        """All examples of the training set, or as many as the update asks for, but no more than the run will use."""
        total, steps = len(self.train_dataset), update.measured_steps
        if steps is None:
            return range(total)
        number = min(steps, self.state.max_steps) * self.args.train_batch_size * self.args.world_size
        number *= self.args.gradient_accumulation_steps
        order = torch.randperm(total, generator=torch.Generator().manual_seed(self.args.seed))
        return range(total) if number >= total else [int(index) for index in order[:number]]

    def _summed(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Sums over all ranks, by the place of a parameter, also of those that some ranks do not have."""
        parameters = list(self.model.parameters())
        present = torch.tensor([float(i in tensors) for i in range(len(parameters))], device=self.args.device)
        everywhere = self.accelerator.reduce(present, "sum").tolist()
        return {
            i: self.accelerator.reduce(tensors.get(i, torch.zeros_like(parameter, dtype=torch.float32)).detach(), "sum")
            for i, parameter in enumerate(parameters)
            if everywhere[i]
        }

    def _batch(self, examples: Any, indices: Iterable[int]) -> dict[str, Any]:
        """Some examples of a dataset, collated, on the device of the model."""
        return dict(self._prepare_inputs(self._collated(examples, indices)))

    def _collated(self, examples: Any, indices: Iterable[int]) -> Any:
        collate = self._get_collator_with_removed_columns(self.data_collator)
        return collate([examples[index] for index in indices])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.sharded:
            self._save_shards(Path(output_dir))
        else:
            super()._save_optimizer_and_scheduler(output_dir)
        self._save_terms(output_dir)

    def _save_shards(self, folder: Path) -> None:
        """The weights and the state of the optimizer, each rank its own; settings of the optimizer beside them."""
        sharded.save(folder / SHARDS, sharded.weights(self.model))
        sharded.save(folder / SHARDED_OPTIMIZER, sharded.optimizer_state(self.optimizer))
        if self.args.should_save:
            groups = self.optimizer.state_dict()["param_groups"]
            torch.save({"state": {}, "param_groups": groups}, folder / "optimizer.pt")
            torch.save(self.lr_scheduler.state_dict(), folder / "scheduler.pt")

    def _save_terms(self, output_dir: str) -> None:
        state = self.criterion.state_dict()
        cut = {key: value for key, value in state.items() if is_sharded(value)}
        if cut:
            sharded.save(Path(output_dir) / SHARDED_TERMS, cut)
        state = {key: value for key, value in state.items() if key not in cut}
        if self._reference is not None:
            state |= {f"{REFERENCE}/{key}": value for key, value in self._reference.items()}
        if self.update is not None:
            state |= {f"{UPDATE}/{key}": value for key, value in self.update.state_dict().items()}
        state |= {f"{DRAWN}/{name}": sampler.state() for name, sampler in self.streams.items()}
        if self._remembers and self.args.should_save:  # also while there is no state yet
            state = {key: value.contiguous() for key, value in state.items()}
            safetensors.torch.save_file(state, os.path.join(output_dir, TERM_STATE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self.criterion_record is not None:
            self.criterion_record.check(checkpoint)
        folder = Path(checkpoint) / SHARDED_OPTIMIZER
        if folder.exists():
            sharded.load_optimizer_state(sharded.read(folder, self.model), self.optimizer)
        elif self.sharded:
            sharded.load_optimizer_state(sharded.optimizer_state(self.optimizer), self.optimizer)
        self._load_terms(checkpoint)

    def _load_terms(self, checkpoint: str, *, changed: bool = False) -> None:
        """The state of the terms and of the update.

        Args:
            changed: the terms need not be those of the checkpoint: old state is dropped, new terms start without
        """
        path = os.path.join(checkpoint, TERM_STATE)
        if os.path.exists(path):
            state = safetensors.torch.load_file(path)
            if (folder := Path(checkpoint) / SHARDED_TERMS).exists():
                state |= sharded.read(folder, self.model)
            self._reference = _pop_prefixed(state, REFERENCE) or None
            update_state, drawn = _pop_prefixed(state, UPDATE), _pop_prefixed(state, DRAWN)
            for name, sampler in self.streams.items():
                if name in drawn:
                    sampler.load_state(drawn[name])
            if changed:
                names = {term.name for term in self.criterion.terms}
                state = {key: value for key, value in state.items() if key.partition("/")[0] in names}
            self.criterion.load_state_dict(state)
            if self.update is not None:
                self.update.load_state_dict(update_state)
        elif self._remembers and not changed:
            raise BadInput(f"{path} is missing: a term of this criterion has a state, and cannot resume without it")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if self.sharded:
            state_dict = whole_state(self.model, keep=self.args.should_save)
            if not self.args.should_save:
                return
        raw = spectral_norm.raw_state(self.model)
        if raw and state_dict is None:
            state_dict = spectral_norm.folded_state(self.model)
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        if self.criterion_record is not None:
            self.criterion_record.write(Path(folder))
        if raw:
            safetensors.torch.save_file(
                {key: value.contiguous() for key, value in raw.items()}, os.path.join(folder, RAW_HEAD)
            )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.criterion_record is not None:
            self.criterion_record.add_to_card()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        if not self._load_shards(resume_from_checkpoint, model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_head(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_shards(self.state.best_model_checkpoint, self.model):
            super()._load_best_model()
        self._load_head(self.state.best_model_checkpoint, self.model)

    def _load_shards(self, folder: str, model: nn.Module) -> bool:
        """Load the weights where a checkpoint has shards, or where the model is sharded; whether that is so."""
        shards = Path(folder) / SHARDS
        if shards.exists() or self.sharded:
            sharded.load_weights(shards if shards.exists() else Path(folder), model)
            return True
        return False

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


def _pop_prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    keys = [key for key in state if key.startswith(f"{prefix}/")]
    return {key.removeprefix(f"{prefix}/"): state.pop(key) for key in keys}


def _is_folded(key: str, raw: Mapping[str, Tensor]) -> bool:
    layer, _, name = key.rpartition(".")
    return f"{layer}.parametrizations.{name}.original" in raw


class RegularizedSeq2SeqTrainer(RegularizedTrainer, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with `criterion=`: a `RegularizedTrainer` that can generate while it evaluates."""
