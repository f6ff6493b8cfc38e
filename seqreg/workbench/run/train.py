"""Train a recipe: data, model and trainer put together, and everything written down at the end."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Seq2SeqTrainingArguments, TrainingArguments

from seqreg.errors import BadInput, Interrupted
from seqreg.integrations.hf.trainer import RAW_HEAD
from seqreg.workbench.config import run_config as configs
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.config.settings import Config
from seqreg.workbench.data import loading, models
from seqreg.workbench.data.batches import GroupedOrder
from seqreg.workbench.data.encoding import Collator, Encoded, Numbered
from seqreg.workbench.data.hardware import check_precision
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.run import checkpoints, disk, disk_space
from seqreg.workbench.run.launch import check_accelerate
from seqreg.workbench.run.preflight import trial
from seqreg.workbench.run.run_directory import RunDirectory, RunRecord, first_process
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.run.tensorboard import TensorBoardWriter
from seqreg.workbench.run.trainer import FaultTolerantSeq2SeqTrainer, FaultTolerantTrainer
from seqreg.workbench.scores import results
from seqreg.workbench.scores.evaluate import Scored, Scorer, evaluate, with_average
from seqreg.workbench.text.atomic_files import ASIDE, REMOVED
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.progress import Bars
from seqreg.workbench.text.terminal import console, say

NO_CLIPPING = 1e9
"""A bound that no gradient reaches: the norm is measured, and not clipped."""


@dataclass
class LoadedRun:
    """All that a run needs, built and checked; nothing is written yet."""

    run: Run
    splits: Splits
    tokenizer: Any
    model: Any


def prepare(run: Run, *, needs_train: bool = True, splits: Splits | None = None) -> LoadedRun:
    """Load the data, if `splits` are not given, the tokenizer and the model of a run."""
    splits = loading.load(run.card, run.config.data, needs_train=needs_train) if splits is None else splits
    for note in splits.notes if first_process() else ():
        console.print(plain(note), style="dim")
    if loading.UNLABELLED in splits.sets and not _takes_unlabelled(run.config) and first_process():
        console.print("data.unlabelled is not used: no term of this run takes unlabelled rows", style="dim")
    check_precision(run.config.optimisation.precision)
    transformers.set_seed(run.config.seed)
    texts = (text for one in splits.sets.get("train", ()) for text in (one.source, one.second, one.target) if text)
    tokenizer = models.load_tokenizer(run.config, texts, trust=run.trust)
    shop = LoadedRun(run, splits, tokenizer, models.load_model(run.config, run.card, tokenizer, trust=run.trust))
    if "train" in splits.sets:
        trial(run.config, shop.model, tokenizer, splits.sets["train"])
    return shop


def train(
    run: Run, *, overwrite: bool = False, resume: bool = False, allow_change: Sequence[str] = ()
) -> dict[str, Any]:
    """Train, evaluate and write everything to `config.output`; returns what is in metrics.json.

    A run that was stopped goes on from its newest whole checkpoint, and ends with the weights that it would have had.

    Args:
        overwrite: replace the run that is in the folder
        resume: refuse to begin at step 0
        allow_change: settings that may differ from those that the run was begun with
    """
    folder = Path(run.config.output)
    with Signals() as signals, contextlib.ExitStack() as stack:
        check_accelerate(run.config.optimisation.precision)
        place = RunDirectory(folder, run, stack, resume)
        with disk.writing(folder):
            place.look(overwrite, allow_change)
        splits = loading.load(run.card, run.config.data)
        place.compare(splits, allow_change)
        if place.finished:
            place.reopen()
        if place.finished:
            if not first_process():
                return {}
            say(f"{folder}: this run is finished, nothing to do (seqreg train --overwrite begins it anew)")
            return results.read_metrics(folder)
        shop = prepare(run, splits=splits)
        scorer = Scorer(splits.sets["validation"], run, shop.tokenizer)
        needed = disk_space.check(shop.model, run.config, folder)
        with disk.writing(folder):
            trainer = make_trainer(shop, folder, scorer)
        trainer.signals, trainer.needed = signals, needed
        try:
            return _trained(trainer, shop, place, scorer)
        finally:
            trainer.bars.progress.stop()


def _trained(trainer: Any, shop: LoadedRun, place: RunDirectory, scorer: Scorer) -> dict[str, Any]:
    """Go through a training from where it stands to its end."""
    run, folder, signals = shop.run, place.folder, trainer.signals
    checkpoint = place.take(trainer)
    first = shop.splits.evaluations(run.card)[0]
    if run.config.evaluation.eval_before_training and not place.record.before:
        untrained = evaluate(trainer, run, shop.tokenizer, shop.splits.sets[first], first, untrained=True)
        place.note(before=results.scores(untrained))
    monitor = TensorBoardWriter(folder / "tensorboard", run, scorer)
    if run.config.logging.tensorboard:
        trainer.add_callback(monitor)
        trainer.monitor = monitor
    with signals.deferred():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = trainer.seconds + time.monotonic() - trainer.clock
    place.check_own()
    trainer.check_weights()
    steps, health = trainer.state.global_step, trainer.health
    numbers = {
        "steps": steps, "seconds": seconds,
        "cpu_seconds": trainer.cpu_seconds, "step_seconds": trainer.step_seconds, "device": trainer.args.device.type,
        "loss": trainer.mean_loss(),
        "tokens": trainer.state.num_input_tokens_seen,
        "parameters": sum(p.numel() for p in shop.model.parameters()), **health.numbers(),
    }  # fmt: skip
    found = _judged(trainer, shop)
    if place.record.before:
        found = {"before": Scored(**dict[str, Any](place.record.before)), **found}
    with signals.deferred(), disk.writing(folder, trainer.needed, "; the same command goes on"):
        return _finish(trainer, shop, place, found, numbers, monitor)


def _judged(trainer: Any, shop: LoadedRun) -> dict[str, Scored]:
    """The scores of the trained model on all its splits."""
    run, found = shop.run, {}
    try:
        trainer.signals.check()
        for name in dict.fromkeys(["validation", *shop.splits.evaluations(run.card)]):
            found[name] = evaluate(trainer, run, shop.tokenizer, shop.splits.sets[name], name)
    except Interrupted as stop:
        with trainer.signals.deferred():
            trainer._save_checkpoint(trainer.model_wrapped, None)
        last = f"stopped after the last step, {trainer.state.global_step}: the same command goes on with the evaluation"
        raise Interrupted(stop.code - 128, last) from None
    return with_average(found, run.card)


def _finish(
    trainer: Any,
    shop: LoadedRun,
    place: RunDirectory,
    found: dict[str, Scored],
    numbers: Mapping[str, Any],
    monitor: TensorBoardWriter,
) -> dict[str, Any]:
    """Write the model, the scores and the card; last of all that the run is finished."""
    folder = place.folder
    place.check_own()
    aside = folder / f"{ASIDE}model"
    trainer.save_model(str(aside))
    if not trainer.is_world_process_zero():
        return {}
    (aside / RAW_HEAD).unlink(missing_ok=True)  # the final model is folded
    files = checkpoints.publish(aside, folder)
    (folder / REMOVED).unlink(missing_ok=True)  # of a model that was not kept
    metrics = results.write_scores(folder, shop.run, found, method=shop.run.config.method, train=dict(numbers))
    results.write_card(folder, shop.run, metrics)
    monitor.close(found)
    place.note(finished=True, files=files)
    if not shop.run.config.checkpoints.save_steps:
        checkpoints.rotate(folder, place.record.run, 0, None)
    return metrics


def _takes_unlabelled(config: Config) -> bool:
    return any(term.takes_unlabelled for term in config.criterion().terms)


def _order(rows: Encoded, config: Config, world: int) -> GroupedOrder:
    """An order of the training rows by the lengths of source and target."""
    coded = (rows[index] for index in range(len(rows)))
    lengths = [(len(row["input_ids"]), len(row["labels"]) if isinstance(row["labels"], list) else 1) for row in coded]
    return GroupedOrder(lengths, config.optimisation.per_device_train_batch_size, world=world, seed=config.seed)


def make_trainer(shop: LoadedRun, folder: Path, scorer: Scorer | None = None) -> Any:
    """The trainer of a run, with bars instead of transformers' own."""
    run, config = shop.run, shop.run.config
    seq2seq = run.card.kind == "generation"
    sets = {name: Encoded(found, shop.tokenizer, config) for name, found in shop.splits.sets.items()}
    kind = FaultTolerantSeq2SeqTrainer if seq2seq else FaultTolerantTrainer
    collate = DataCollatorForSeq2Seq if seq2seq else DataCollatorWithPadding
    trainer = kind(
        shop.model,
        arguments(config, folder, seq2seq),
        data_collator=Collator(collate(shop.tokenizer)),
        train_dataset=Numbered(sets["train"]) if "train" in sets else None,
        eval_dataset=sets.get("validation"),
        processing_class=shop.tokenizer,
        compute_metrics=scorer,
        criterion=config.criterion(),
        diagnostics_steps=config.logging.diagnostics_steps,
        smoothness_steps=config.logging.smoothness_steps,
        unlabeled_dataset=sets.get(loading.UNLABELLED) if _takes_unlabelled(config) else None,
        update=config.update(),
        patience=config.optimisation.nonfinite_patience,
    )
    trainer.keep, trainer.minutes = config.checkpoints.save_total_limit, config.checkpoints.save_minutes
    if config.data.group_by_length and "train" in sets:
        trainer.order = _order(sets["train"], config, trainer.args.world_size)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.bars = Bars(run.card.score)
    trainer.add_callback(trainer.bars)
    return trainer


def arguments(config: Config, folder: Path, seq2seq: bool) -> TrainingArguments:
    """A recipe in the words of transformers."""
    opt, evaluation, saved = config.optimisation, config.evaluation, config.checkpoints
    settings = {
        "output_dir": str(folder), "seed": config.seed, "report_to": "none", "disable_tqdm": True,
        "use_cpu": not torch.accelerator.is_available(),  # said out loud, or several processes on CPUs are not a group
        "learning_rate": opt.learning_rate, "lr_scheduler_type": opt.lr_scheduler_type, "warmup_steps": opt.warmup,
        "optim": "adafactor" if opt.optim == "adafactor" else "adamw_torch", "weight_decay": opt.weight_decay,
        "adam_beta1": opt.adam_beta1, "adam_beta2": opt.adam_beta2, "adam_epsilon": opt.adam_epsilon,
        "max_grad_norm": opt.max_grad_norm or NO_CLIPPING, "bf16": opt.precision == "bf16",
        "fp16": opt.precision == "fp16",
        "gradient_checkpointing": opt.gradient_checkpointing, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "gradient_accumulation_steps": opt.gradient_accumulation_steps,
        "per_device_train_batch_size": opt.per_device_train_batch_size,
        "per_device_eval_batch_size": evaluation.per_device_eval_batch_size,
        "max_steps": opt.max_steps or -1, "num_train_epochs": opt.num_train_epochs or 1.0,
        "logging_steps": min(config.logging.logging_steps, opt.max_steps or config.logging.logging_steps),
         # the parts are shown once
        "include_num_input_tokens_seen": "non_padding",
        "eval_strategy": "steps" if evaluation.eval_steps else "no", "eval_steps": evaluation.eval_steps or None,
        "save_strategy": "steps" if saved.save_steps else "no", "save_steps": saved.save_steps or 500,
        "save_total_limit": None, "load_best_model_at_end": evaluation.load_best_model_at_end,
        "metric_for_best_model": "score" if evaluation.load_best_model_at_end else None, "greater_is_better": True,
        "dataloader_num_workers": config.data.dataloader_num_workers,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }  # fmt: skip
    return (
        Seq2SeqTrainingArguments(**settings, predict_with_generate=True) if seq2seq else TrainingArguments(**settings)
    )


def trained(folder: Path, overrides: tuple[str, ...] = (), *, trust: bool = False) -> Run:
    """The run of a folder, with the trained model in place of the one that it started from."""
    run = configs.load(folder, overrides, trust=trust, build_terms=False)
    if not (folder / "config.json").is_file():
        gone = (folder / REMOVED).exists()
        why = "its comparison has not kept it (--keep-models)" if gone else "has its training ended?"
        raise BadInput(f"{folder}: there is no trained model in it: {why}")
    record = RunRecord.read(folder)
    weights = {} if record is None else {k: v for k, v in record.files.items() if k.endswith(".safetensors")}
    wrong = checkpoints.damage(folder, weights)
    if wrong is not None:
        raise BadInput(f"{folder}: its model is not the one that was trained: {wrong}: train it again with --overwrite")
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
    first_process()  # what the environment says about processes makes sense
    check_accelerate(run.config.optimisation.precision)
    check_precision(run.config.optimisation.precision)
    if file is not None:
        splits = Splits({file.stem: loading.read_file(run.card, file)})
        names = [file.stem]
    else:
        splits = loading.load(run.card, run.config.data, needs_train=False)
        judged = ["validation", *splits.evaluations(run.card)]
        names = [name for name in dict.fromkeys(judged) if name in splits.sets]
    tokenizer = models.load_tokenizer(run.config, (), trust=trust)
    model = models.load_model(run.config, run.card, tokenizer, trust=trust, trained=True)
    shop = LoadedRun(run, splits, tokenizer, model)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(shop, Path(scratch))
        found = {name: evaluate(trainer, run, tokenizer, splits.sets[name], name) for name in names}
        first = trainer.is_world_process_zero()
    found = with_average(found, run.card)
    with disk.writing(output or folder):
        return results.write_scores(output or folder, run, found) if first else {}
