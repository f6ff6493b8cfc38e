"""Train a recipe: data, model and trainer put together, and everything written down at the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Seq2SeqTrainingArguments, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from seqreg.errors import BadInput
from seqreg.integrations.hf import RegularizedSeq2SeqTrainer, RegularizedTrainer
from seqreg.integrations.hf.trainer import RAW_HEAD
from seqreg.workbench import config as configs
from seqreg.workbench import data, models, outputs
from seqreg.workbench.batches import GroupedOrder
from seqreg.workbench.config import Run
from seqreg.workbench.console import Bars, console
from seqreg.workbench.data import Splits
from seqreg.workbench.evaluate import Scored, Scorer, evaluate, with_average
from seqreg.workbench.models import Encoded
from seqreg.workbench.monitor import Monitor
from seqreg.workbench.settings import Checkpoints, Config, Model
from seqreg.workbench.trial import trial
from seqreg.workbench.untrusted import plain

NO_CLIPPING = 1e9
"""A bound that no gradient reaches: the norm is measured, and not clipped."""


@dataclass
class Workshop:
    """All that a run needs, built and checked; nothing is written yet."""

    run: Run
    splits: Splits
    tokenizer: Any
    model: Any


def prepare(run: Run, *, needs_train: bool = True) -> Workshop:
    """Load the data, the tokenizer and the model of a run."""
    splits = data.load(run.card, run.config.data, needs_train=needs_train)
    for note in splits.notes if first_process() else ():
        console.print(plain(note), style="dim")
    models.probe(run.config)
    transformers.set_seed(run.config.seed)
    texts = (text for one in splits.sets.get("train", ()) for text in (one.source, one.second, one.target) if text)
    tokenizer = models.load_tokenizer(run.config, texts, trust=run.trust)
    shop = Workshop(run, splits, tokenizer, models.load_model(run.config, run.card, tokenizer, trust=run.trust))
    if "train" in splits.sets:
        trial(run.config, shop.model, tokenizer, splits.sets["train"])
    return shop


def train(run: Run, *, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
    """Train, evaluate and write everything to `config.output`; returns what is in metrics.json."""
    folder, config = Path(run.config.output), run.config
    _check_output(folder, overwrite, resume)
    shop = prepare(run)
    validation = shop.splits.sets["validation"]
    scorer = Scorer(validation, run, shop.tokenizer)
    trainer = make_trainer(shop, folder, scorer)
    if trainer.is_world_process_zero():
        if overwrite and folder.exists() and not resume:
            shutil.rmtree(folder)
        run.save(folder)
    found: dict[str, Scored] = {}
    names = shop.splits.evaluations(run.card)
    if config.evaluation.before:
        found["before"] = evaluate(trainer, run, shop.tokenizer, shop.splits.sets[names[0]], names[0])
        transformers.set_seed(config.seed)
    monitor = Monitor(folder / "tensorboard", run, scorer)
    if config.logging.tensorboard:
        trainer.add_callback(monitor)
    result = trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if resume else None)
    numbers = {
        "steps": trainer.state.global_step, "seconds": result.metrics["train_runtime"], "loss": result.training_loss,
        "tokens": trainer.state.num_input_tokens_seen, "parameters": sum(p.numel() for p in shop.model.parameters()),
    }  # fmt: skip
    for name in dict.fromkeys(["validation", *names]):
        found[name] = evaluate(trainer, run, shop.tokenizer, shop.splits.sets[name], name)
    found = with_average(found, run.card) if not config.evaluation.before else _average_after(found, run)
    return _finish(trainer, shop, folder, found, numbers, monitor)


def _average_after(found: dict[str, Scored], run: Run) -> dict[str, Scored]:
    return {"before": found["before"], **with_average({k: v for k, v in found.items() if k != "before"}, run.card)}


def _finish(
    trainer: Any, shop: Workshop, folder: Path, found: dict[str, Scored], numbers: Mapping[str, Any], monitor: Monitor
) -> dict[str, Any]:
    """Write the model, the scores and the card."""
    trainer.save_model(str(folder))
    if not trainer.is_world_process_zero():
        return {}
    (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody needs
    (folder / RAW_HEAD).unlink(missing_ok=True)  # the final model is folded
    metrics = outputs.write_scores(folder, shop.run, found, method=shop.run.config.method, train=dict(numbers))
    outputs.write_card(folder, shop.run, metrics)
    monitor.close(found)
    return metrics


def first_process() -> bool:
    """Whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _check_output(folder: Path, overwrite: bool, resume: bool) -> None:
    """Refuse to mix two runs. Only the first process looks: the others may be late."""
    if not first_process():
        return
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"output={folder}: a file is in the way")
    if not folder.exists() or not any(folder.iterdir()):
        if resume:
            raise BadInput(f"output={folder}: there is nothing to resume")
        return
    if not (folder / "config.yaml").is_file():
        raise BadInput(f"output={folder}: the folder is not empty, and not a run of seqreg: choose another")
    if resume and get_last_checkpoint(str(folder)) is None:
        raise BadInput(f"output={folder}: there is no checkpoint to resume from (checkpoints.every was 0?)")
    if not overwrite and not resume:
        raise BadInput(
            f"output={folder}: there is a run already: --overwrite it, --resume it, or choose another output"
        )


class _Grouping:
    """Takes the training rows in the order of `order`, if there is one."""

    order: GroupedOrder | None = None

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if self.order is not None:
            return self.order
        return super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]


class _Seq2SeqTrainer(_Grouping, RegularizedSeq2SeqTrainer):
    """For text."""


class _Trainer(_Grouping, RegularizedTrainer):
    """For classes and numbers."""


def _order(rows: Encoded, config: Config, world: int) -> GroupedOrder:
    """An order of the training rows by the lengths of source and target."""
    coded = (rows[index] for index in range(len(rows)))
    lengths = [(len(row["input_ids"]), len(row["labels"]) if isinstance(row["labels"], list) else 1) for row in coded]
    return GroupedOrder(lengths, config.optimisation.batch_size, world=world, seed=config.seed)


def make_trainer(shop: Workshop, folder: Path, scorer: Scorer | None = None) -> Any:
    """The trainer of a run, with bars instead of transformers' own."""
    run, config = shop.run, shop.run.config
    seq2seq = run.card.kind == "generation"
    sets = {name: Encoded(found, shop.tokenizer, config) for name, found in shop.splits.sets.items()}
    kind = _Seq2SeqTrainer if seq2seq else _Trainer
    collate = DataCollatorForSeq2Seq if seq2seq else DataCollatorWithPadding
    trainer = kind(
        shop.model,
        arguments(config, folder, seq2seq),
        data_collator=collate(shop.tokenizer),
        train_dataset=sets.get("train"),
        eval_dataset=sets.get("validation"),
        processing_class=shop.tokenizer,
        compute_metrics=scorer,
        criterion=config.criterion(),
        anatomy_steps=config.logging.anatomy_steps,
        smoothness_steps=config.logging.smoothness_steps,
    )
    if config.data.group and "train" in sets:
        trainer.order = _order(sets["train"], config, trainer.args.world_size)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(Bars())
    return trainer


def arguments(config: Config, folder: Path, seq2seq: bool) -> TrainingArguments:
    """A recipe in the words of transformers."""
    opt, evaluation, saved = config.optimisation, config.evaluation, config.checkpoints
    settings = {
        "output_dir": str(folder), "seed": config.seed, "report_to": "none", "disable_tqdm": True,
        "use_cpu": not torch.accelerator.is_available(),  # said out loud, or several processes on CPUs are not a group
        "learning_rate": opt.learning_rate, "lr_scheduler_type": opt.schedule, "warmup_steps": opt.warmup,
        "optim": "adafactor" if opt.optimizer == "adafactor" else "adamw_torch", "weight_decay": opt.weight_decay,
        "adam_beta1": opt.betas[0], "adam_beta2": opt.betas[1], "adam_epsilon": opt.epsilon,
        "max_grad_norm": opt.clip or NO_CLIPPING, "bf16": opt.precision == "bf16", "fp16": opt.precision == "fp16",
        "gradient_checkpointing": opt.checkpointing, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "gradient_accumulation_steps": opt.accumulation,
        "per_device_train_batch_size": opt.batch_size, "per_device_eval_batch_size": evaluation.batch_size,
        "max_steps": opt.steps or -1, "num_train_epochs": opt.epochs or 1.0,
        "logging_steps": config.logging.every, "include_num_input_tokens_seen": "non_padding",
        "eval_strategy": "steps" if evaluation.every else "no", "eval_steps": evaluation.every or None,
        "save_strategy": "steps" if saved.every else "no", "save_steps": saved.every or 500,
        "save_total_limit": saved.keep, "load_best_model_at_end": evaluation.best,
        "metric_for_best_model": "score" if evaluation.best else None, "greater_is_better": True,
        "dataloader_num_workers": config.data.workers, "dataloader_pin_memory": torch.cuda.is_available(),
    }  # fmt: skip
    if opt.warmup >= 1:
        settings["warmup_steps"] = int(opt.warmup)
    return (
        Seq2SeqTrainingArguments(**settings, predict_with_generate=True) if seq2seq else TrainingArguments(**settings)
    )


def trained(folder: Path, overrides: tuple[str, ...] = (), *, trust: bool = False) -> Run:
    """The run of a folder, with the trained model in place of the one that it started from."""
    run = configs.load(folder, overrides, trust=trust)
    further = {
        "model": Model(name=str(folder)),
        "terms": {},
        "evaluation": run.config.evaluation.model_copy(update={"every": 0, "best": False}),
        "checkpoints": Checkpoints(),
    }
    return Run(run.config.model_copy(update=further), run.card, run.origins, trust)


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
    models.probe(run.config)
    if file is not None:
        splits = Splits({file.stem: data.read_file(run.card, file)})
        names = [file.stem]
    else:
        splits = data.load(run.card, run.config.data, needs_train=False)
        names = list(dict.fromkeys(["validation", *splits.evaluations(run.card)]))
    tokenizer = models.load_tokenizer(run.config, (), trust=trust)
    shop = Workshop(run, splits, tokenizer, models.load_model(run.config, run.card, tokenizer, trust=trust))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(shop, Path(scratch))
        found = {name: evaluate(trainer, run, tokenizer, splits.sets[name], name) for name in names}
        first = trainer.is_world_process_zero()
    found = with_average(found, run.card)
    return outputs.write_scores(output or folder, run, found) if first else {}
