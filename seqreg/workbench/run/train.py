"""Train a run, evaluate it, and write its files."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Seq2SeqTrainingArguments, TrainingArguments

from seqreg.errors import BadInput, Interrupted
from seqreg.integrations.hf.trainer import RAW_HEAD
from seqreg.workbench.config import run_config
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.config.settings import Config
from seqreg.workbench.data import loading, models
from seqreg.workbench.data.batches import GroupedOrder
from seqreg.workbench.data.encoding import Collator, Encoded, Numbered
from seqreg.workbench.data.hardware import check_precision
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.run import checkpoints, disk, launch, preflight
from seqreg.workbench.run.checkpointing import RunOptions
from seqreg.workbench.run.run_directory import RunDirectory, RunRecord
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.run.tensorboard import TensorBoardWriter
from seqreg.workbench.run.trainer import FaultTolerantSeq2SeqTrainer, FaultTolerantTrainer
from seqreg.workbench.scores import results
from seqreg.workbench.scores.evaluate import Scored, Scorer, evaluate, with_average
from seqreg.workbench.text.atomic_files import ASIDE, REMOVED
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.progress import Bars
from seqreg.workbench.text.terminal import console, first_process, say

NO_CLIPPING = 1e9
"""A bound that no gradient reaches: the norm is measured, and not clipped."""


@dataclasses.dataclass
class LoadedRun:
    """A run with its data, tokenizer and model; nothing is written yet."""

    run: Run
    splits: Splits
    tokenizer: Any
    model: Any


def prepare(run: Run, *, splits: Splits | None = None) -> LoadedRun:
    """Load the data, if `splits` are not given, the tokenizer and the model of a run, and check that they work."""
    launch.check_environment(run.config.optimisation.precision)
    splits = loading.load(run.card, run.config.data) if splits is None else splits
    notes = list(splits.notes)
    if loading.UNLABELLED in splits.sets and not _takes_unlabelled(run):
        notes.append("data.unlabelled is not used: no term of this run takes unlabelled examples")
    for note in notes if first_process() else ():
        console.print(plain(note), style="dim")
    check_precision(run.config.optimisation.precision)
    transformers.set_seed(run.config.seed)
    texts = (text for row in splits.sets.get("train", ()) for text in (row.source, row.second, row.target) if text)
    tokenizer = models.load_tokenizer(run.config, texts, trust=run.trust)
    model = models.load_model(run.config, run.card, tokenizer, trust=run.trust)
    if "train" in splits.sets:
        preflight.check_loss(run, model, tokenizer, splits.sets["train"])
    return LoadedRun(run, splits, tokenizer, model)


def train(
    run: Run, *, overwrite: bool = False, resume: bool = False, allow_change: Sequence[str] = ()
) -> dict[str, Any]:
    """Train, evaluate and write everything to `config.output`; returns what is in metrics.json.

    A run that was stopped resumes from its newest whole checkpoint, and ends with the weights that it would have had.

    Args:
        overwrite: replace the run that is in the folder
        resume: refuse to start at step 0
        allow_change: settings that may differ from those that the run was started with
    """
    folder = Path(run.config.output)
    with Signals() as signals, contextlib.ExitStack() as stack:
        launch.check_environment(run.config.optimisation.precision)
        directory = RunDirectory(folder, run, stack, overwrite=overwrite, resume=resume, allowed=allow_change)
        with disk.writing(folder):
            directory.check()
        splits = loading.load(run.card, run.config.data)
        directory.check_data(splits)
        if directory.finished():
            if not first_process():
                return {}
            say(f"{folder}: this run is finished, nothing to do (seqreg train --overwrite restarts it)")
            return results.read_metrics(folder)
        loaded = prepare(run, splits=splits)
        scorer = Scorer(splits.sets["validation"], run, loaded.tokenizer)
        size = preflight.check_disk_space(run, loaded.model, folder)
        curves = TensorBoardWriter(folder / "tensorboard", run, scorer) if run.config.logging.tensorboard else None
        with disk.writing(folder):
            trainer = make_trainer(
                loaded, folder, scorer, directory=directory, signals=signals, checkpoint_bytes=size, tensorboard=curves
            )
        stack.callback(trainer.options.bars.progress.stop)
        return _train(trainer, loaded, directory)


def _train(trainer: Any, loaded: LoadedRun, directory: RunDirectory) -> dict[str, Any]:
    """Train from the newest checkpoint, or from the start, to the end."""
    run, signals = loaded.run, trainer.options.signals
    checkpoint = directory.take()
    if not directory.record.pretrained:
        directory.update(pretrained=models.pretrained_digest(loaded.model, run.config))
    first = _judged(loaded)[0]
    if run.config.evaluation.eval_before_training and not directory.record.before:
        untrained = evaluate(trainer, run, loaded.tokenizer, loaded.splits.sets[first], first, untrained=True)
        directory.update(before=results.scores(untrained))
    with signals.deferred():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = trainer.seconds + time.monotonic() - trainer.clock
    directory.check_own()
    trainer.check_weights()
    numbers = {
        "steps": trainer.state.global_step, "seconds": seconds,
        "cpu_seconds": trainer.cpu_seconds, "step_seconds": trainer.step_seconds, "device": trainer.args.device.type,
        "loss": trainer.mean_loss(), "tokens": trainer.state.num_input_tokens_seen,
        "parameters": sum(p.numel() for p in loaded.model.parameters()), **trainer.nonfinite.numbers(),
    }  # fmt: skip
    scores = _evaluate(trainer, loaded)
    if directory.record.before:
        scores = {"before": Scored(**dict[str, Any](directory.record.before)), **scores}
    size, hint = trainer.options.checkpoint_bytes, "; run the same command to resume"
    with signals.deferred(), disk.writing(directory.folder, size, hint):
        return _finish(trainer, run, directory, scores, numbers)


def _judged(loaded: LoadedRun) -> list[str]:
    """The splits that the trained model is judged by; a trial of a search sees the validation set alone."""
    run = loaded.run
    return loaded.splits.evaluations(run.card) if run.config.evaluation.test_sets else ["validation"]


def _evaluate(trainer: Any, loaded: LoadedRun) -> dict[str, Scored]:
    """The scores of the trained model on all its splits."""
    run, splits, signals = loaded.run, loaded.splits, trainer.options.signals
    try:
        signals.check()
        names = dict.fromkeys(["validation", *_judged(loaded)])
        scores = {name: evaluate(trainer, run, loaded.tokenizer, splits.sets[name], name) for name in names}
    except Interrupted as stop:
        with signals.deferred():
            trainer._save_checkpoint(trainer.model_wrapped, None)
        step = trainer.state.global_step
        message = f"stopped after the last step, {step}: run the same command to resume with the evaluation"
        raise Interrupted(stop.number, message) from None
    return with_average(scores, run.card)


def _finish(
    trainer: Any, run: Run, directory: RunDirectory, scores: dict[str, Scored], numbers: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the model, the scores and the card; last of all that the run is finished."""
    folder = directory.folder
    directory.check_own()
    aside = folder / f"{ASIDE}model"
    trainer.save_model(str(aside))
    trainer.save_ema(aside)
    if not trainer.is_world_process_zero():
        return {}
    (aside / RAW_HEAD).unlink(missing_ok=True)  # the final model is folded
    files = checkpoints.publish(aside, folder)
    (folder / REMOVED).unlink(missing_ok=True)  # of a model that was not kept
    metrics = results.write_scores(folder, run, scores, method=run.config.method, train=dict(numbers))
    results.write_card(folder, run, metrics)
    if trainer.options.tensorboard is not None:
        trainer.options.tensorboard.close(scores)
    directory.update(finished=True, files=files)
    if not run.config.checkpoints.save_steps:
        checkpoints.rotate(folder, directory.record.run, 0, None)
    return metrics


def _takes_unlabelled(run: Run) -> bool:
    return any(term.takes_unlabelled for term in run.criterion.terms)


def _grouped(examples: Encoded, config: Config, world: int) -> GroupedOrder:
    """An order of the training examples by the lengths of source and target."""
    rows = (examples[index] for index in range(len(examples)))
    lengths = [(len(row["input_ids"]), len(row["labels"]) if isinstance(row["labels"], list) else 1) for row in rows]
    return GroupedOrder(lengths, config.optimisation.per_device_train_batch_size, world=world, seed=config.seed)


def make_trainer(loaded: LoadedRun, folder: Path, scorer: Scorer | None = None, **options: Any) -> Any:
    """The trainer of a run; `options` are further `RunOptions`."""
    run, config = loaded.run, loaded.run.config
    seq2seq = run.card.kind == "generation"
    sets = {name: Encoded(examples, loaded.tokenizer, config) for name, examples in loaded.splits.sets.items()}
    kind = FaultTolerantSeq2SeqTrainer if seq2seq else FaultTolerantTrainer
    collate = DataCollatorForSeq2Seq if seq2seq else DataCollatorWithPadding
    args = arguments(config, folder, seq2seq)
    grouped = config.data.group_by_length and "train" in sets
    return kind(
        loaded.model,
        args,
        data_collator=Collator(collate(loaded.tokenizer)),
        train_dataset=Numbered(sets["train"]) if "train" in sets else None,
        eval_dataset=sets.get("validation"),
        processing_class=loaded.tokenizer,
        compute_metrics=scorer,
        criterion=copy.deepcopy(run.criterion),
        diagnostics_steps=config.logging.diagnostics_steps,
        smoothness_steps=config.logging.smoothness_steps,
        unlabeled_dataset=sets.get(loading.UNLABELLED) if _takes_unlabelled(run) else None,
        update=config.update(),
        options=RunOptions(
            config,
            sampler=_grouped(sets["train"], config, args.world_size) if grouped else None,
            bars=Bars(run.card.score),
            **options,
        ),
    )


def arguments(config: Config, folder: Path, seq2seq: bool) -> TrainingArguments:
    """transformers' arguments: settings of the same name are passed as they are."""
    opt, evaluation, saved = config.optimisation, config.evaluation, config.checkpoints
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    sections = (opt, evaluation, saved, config.data, config.logging)
    settings = {key: value for section in sections for key, value in dict(section).items() if key in known}
    settings |= {
        "output_dir": str(folder), "seed": config.seed, "report_to": "none", "disable_tqdm": True,
        "use_cpu": not torch.accelerator.is_available(),  # explicit, or several processes on CPUs are not a group
        "warmup_steps": opt.warmup, "optim": "adafactor" if opt.optim == "adafactor" else "adamw_torch",
        "max_grad_norm": opt.max_grad_norm or NO_CLIPPING, "max_steps": opt.max_steps or -1,
        "num_train_epochs": opt.num_train_epochs or 1.0, "bf16": opt.precision == "bf16",
        "fp16": opt.precision == "fp16", "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": min(config.logging.logging_steps, opt.max_steps or config.logging.logging_steps),
        "include_num_input_tokens_seen": "non_padding", "dataloader_pin_memory": torch.cuda.is_available(),
        "eval_strategy": "steps" if evaluation.eval_steps else "no", "eval_steps": evaluation.eval_steps or None,
        "save_strategy": "steps" if saved.save_steps else "no", "save_steps": saved.save_steps or 500,
        "save_total_limit": None,  # `checkpoints.rotate` does it
        "metric_for_best_model": "score" if evaluation.load_best_model_at_end else None, "greater_is_better": True,
    }  # fmt: skip
    return (
        Seq2SeqTrainingArguments(**settings, predict_with_generate=True) if seq2seq else TrainingArguments(**settings)
    )


def trained(folder: Path, overrides: tuple[str, ...] = (), *, trust: bool = False) -> Run:
    """The run of a folder, with the trained model in place of the one that it started from."""
    run_config.check_trained(folder)
    run = run_config.load(folder, overrides, trust=trust, build_terms=False)
    record = RunRecord.read(folder)
    weights = {} if record is None else {k: v for k, v in record.files.items() if k.endswith(".safetensors")}
    damage = checkpoints.damage(folder, weights)
    if damage is not None:
        raise BadInput(
            f"{folder}: its model is not the one that was trained: {damage}: train it again with --overwrite"
        )
    return Run(run.config.for_evaluation(str(folder)), run.card, run.origins, trust)


def evaluate_run(
    folder: Path,
    *,
    file: Path | None = None,
    output: Path | None = None,
    overrides: tuple[str, ...] = (),
    trust: bool = False,
) -> dict[str, Any]:
    """Score a trained model again, on the splits of its task or on one file, and bring its files up to date."""
    run = trained(folder, overrides, trust=trust)
    launch.check_environment(run.config.optimisation.precision)
    check_precision(run.config.optimisation.precision)
    if file is not None:
        splits = Splits({file.stem: loading.read_file(run.card, file)})
        names = [file.stem]
    else:
        splits = loading.load(run.card, run.config.data, needs_train=False)
        wanted = dict.fromkeys(["validation", *splits.evaluations(run.card)])
        names = [name for name in wanted if name in splits.sets]
    tokenizer = models.load_tokenizer(run.config, (), trust=trust)
    model = models.load_model(run.config, run.card, tokenizer, trust=trust, trained=True)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(LoadedRun(run, splits, tokenizer, model), Path(scratch))
        scores = {name: evaluate(trainer, run, tokenizer, splits.sets[name], name) for name in names}
        first = trainer.is_world_process_zero()
    scores = with_average(scores, run.card)
    with disk.writing(output or folder):
        return results.write_scores(output or folder, run, scores) if first else {}
