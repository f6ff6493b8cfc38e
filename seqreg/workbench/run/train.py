"""Train a run, evaluate it, and write its files."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from seqreg.errors import BadInput, Interrupted
from seqreg.integrations.hf import shard
from seqreg.integrations.hf.reference import adapted
from seqreg.integrations.hf.trainer import RAW_HEAD
from seqreg.selective_update import MeasuredUpdate
from seqreg.workbench.config import run_config
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.config.settings import Config
from seqreg.workbench.data import adapters, completions, loading, models, streams
from seqreg.workbench.data.batches import GroupedOrder
from seqreg.workbench.data.encoding import Collator, Encoded, EncodedStream, Numbered, Packed, collator
from seqreg.workbench.data.hardware import check_precision
from seqreg.workbench.data.loading import REPLAY, UNLABELLED, Splits
from seqreg.workbench.run import checkpoints, launch, preflight, starting_model
from seqreg.workbench.run.checkpointing import RunOptions
from seqreg.workbench.run.record import RECORD, RunRecord, check_model, inputs_of, made_with
from seqreg.workbench.run.run_directory import RunDirectory
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.run.starting_model import DriftMonitor
from seqreg.workbench.run.tensorboard import TensorBoardWriter
from seqreg.workbench.run.trainer import FaultTolerantCausalTrainer, FaultTolerantSeq2SeqTrainer, FaultTolerantTrainer
from seqreg.workbench.scores import corpora, results
from seqreg.workbench.scores.drift import retention
from seqreg.workbench.scores.evaluate import Scored, Scorer, evaluate, with_average
from seqreg.workbench.scores.results import METRICS
from seqreg.workbench.text.atomic_files import ASIDE, REMOVED, writing
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.progress import Bars
from seqreg.workbench.text.terminal import console, first_process, say, warn

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
    if UNLABELLED in splits.sets and not any(term.on != "labelled" for term in run.criterion.terms):
        notes.append("data.unlabelled is not used: no term of this run counts on texts without labels")
    for note in notes if first_process() else ():
        console.print(plain(note), style="dim")
    check_precision(run.config.optimisation.precision)
    transformers.set_seed(run.config.seed)
    tokenizer = models.load_tokenizer(run.config, splits.first, trust=run.trust)
    model = models.load_model(run.config, run.card, tokenizer, trust=run.trust)
    if run.config.model.lora is not None:
        if run.config.model.head == "r4f":
            raise BadInput("model.lora and model.head=r4f: a normalised head is trained as a whole: set one of them")
        model = adapters.with_adapters(model, run.config.model.lora, models.drawn_anew(model))
    corpora.check(splits.corpora, model, tokenizer)
    if splits.stream is not None and isinstance(run.config.update(), MeasuredUpdate):
        raise BadInput(
            f"optimisation.update={run.config.optimisation.update}: measures the training set before it is "
            "trained on: leave it out, or data.streaming=true"
        )
    if splits.first:
        preflight.check_loss(run, model, tokenizer, splits.first)
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
        launch.check_trackers(run.config.logging.report_to)
        directory = RunDirectory(folder, run, stack, overwrite=overwrite, resume=resume, allowed=allow_change)
        with writing(folder):
            directory.check()
        splits = loading.load(run.card, run.config.data)
        directory.check_data(splits)
        if directory.finished():
            if not first_process():
                return {}
            say(f"{folder}: this run is finished, nothing to do (seqreg train --overwrite restarts it)")
            return results.read_metrics(folder)
        warn_of_choosing(run, splits)
        loaded = prepare(run, splits=splits)
        scorer = Scorer(splits.sets["validation"], run, loaded.tokenizer)
        size = preflight.check_disk_space(run, loaded.model, folder)
        curves = TensorBoardWriter(folder / "tensorboard", run, scorer) if run.config.logging.tensorboard else None
        with writing(folder):
            trainer = make_trainer(
                loaded, folder, scorer, directory=directory, signals=signals, checkpoint_bytes=size, tensorboard=curves
            )
        stack.callback(trainer.options.bars.progress.stop)
        inputs = inputs_of(run, loaded.tokenizer, _tokens(trainer))
        directory.check_inputs(inputs, models.pretrained_digest(loaded.model, run.config))
        return _train(trainer, loaded, directory)


def _train(trainer: Any, loaded: LoadedRun, directory: RunDirectory) -> dict[str, Any]:
    """Train from the newest checkpoint, or from the start, to the end."""
    run, signals = loaded.run, trainer.options.signals
    checkpoint = directory.take()
    _score_before(trainer, loaded, directory, resumed=checkpoint is not None)
    start = functools.partial(starting_model.rebuild, run, loaded.tokenizer, directory.record.start)
    monitor = DriftMonitor(trainer, loaded.tokenizer, loaded.splits.sets["validation"], start)
    trainer.add_callback(monitor)
    with signals.deferred():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    seconds = trainer.seconds + time.monotonic() - trainer.clock
    early = trainer.stopped_early and trainer.state.global_step < trainer.state.max_steps
    if early:
        patience, step = run.config.evaluation.early_stopping_patience, trainer.state.global_step
        evaluations = f"{patience} evaluation{'s' * (patience != 1)}"
        say(f"stopped early, after step {step}: {run.card.score} was not better in {evaluations}")
    kept = trainer.model_step
    if kept != trainer.state.global_step or run.config.evaluation.load_best_model_at_end:
        say(f"the model is that of step {kept}, where {run.card.score} on the validation set was best")
    directory.check_own()
    trainer.check_weights()
    numbers = {
        "steps": trainer.state.global_step, "stopped_early": early,
        "best_step": trainer.state.best_global_step, "model_step": kept, "seconds": seconds,
        "cpu_seconds": trainer.cpu_seconds, "step_seconds": trainer.step_seconds, "device": trainer.args.device.type,
        "loss": trainer.mean_loss(), "last_nll": trainer.last_nll(), "tokens": trainer.state.num_input_tokens_seen,
        **_sizes(loaded.model), **trainer.nonfinite.numbers(),
    }  # fmt: skip
    if run.config.model.lora is not None:
        monitor = _without_adapters(monitor, loaded, directory.folder)
    scores, sections = _evaluate(trainer, loaded, monitor, directory.record)
    if directory.record.before:
        scores = {results.BEFORE: Scored(**dict[str, Any](directory.record.before)), **scores}
    size, hint = trainer.options.checkpoint_bytes, "; run the same command to resume"
    with signals.deferred(), writing(directory.folder, size, hint):
        return _finish(trainer, monitor, run, directory, scores, {"train": numbers, **sections})


def _sizes(model: Any) -> dict[str, int]:
    """The parameters of the plain model, and where it has adapters those that were trained."""
    sizes = {"parameters": sum(p.numel() for p in adapters.plain_parameters(model).values())}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return sizes if adapted(model) is None else {**sizes, "trained_parameters": trained}


def _without_adapters(monitor: DriftMonitor, loaded: LoadedRun, folder: Path) -> DriftMonitor:
    """The same for the plain model that adapters are taken into, and a trainer of it: what is scored, and saved.

    An interrupted evaluation is resumed from the checkpoint that is written before.
    """
    trainer, signals = monitor.trainer, monitor.trainer.options.signals
    with signals.deferred():
        trainer._save_checkpoint(trainer.model_wrapped, None)
        if trainer.is_world_process_zero():
            trainer.model.save_pretrained(str(folder / f"{ASIDE}model" / adapters.FOLDER))
        model = trainer.model.merge_and_unload(safe_merge=True)
    run = dataclasses.replace(loaded.run, config=loaded.run.config.for_evaluation(str(folder)))
    sets = {
        name: examples for name, examples in loaded.splits.sets.items() if name not in ("train", UNLABELLED, REPLAY)
    }
    parts = LoadedRun(run, dataclasses.replace(loaded.splits, sets=sets, stream=None), loaded.tokenizer, model)
    final = make_trainer(parts, folder, signals=signals)
    return DriftMonitor(final, loaded.tokenizer, sets["validation"], monitor.start)


def _judged(loaded: LoadedRun) -> list[str]:
    """The splits that the trained model is judged by; a trial of a search sees the validation set alone."""
    run = loaded.run
    return loaded.splits.evaluations(run.card) if run.config.evaluation.test_sets else ["validation"]


def warn_of_choosing(run: Run, splits: Splits) -> None:
    """Say so where the examples that a run is judged by also choose when it stops, or which checkpoint is kept."""
    settings = run.config.evaluation
    choosing = ["early_stopping_patience"] * bool(settings.early_stopping_patience)
    choosing += ["load_best_model_at_end"] * settings.load_best_model_at_end
    if choosing and settings.test_sets and "validation" in splits.evaluations(run.card):
        warn(
            f"evaluation.{choosing[0]}: the task is judged by its validation set, which chooses too: its score "
            "flatters; give it a test set, or a card with holdout"
        )


def _score_before(trainer: Any, loaded: LoadedRun, directory: RunDirectory, *, resumed: bool) -> None:
    """Score the untrained model where it is asked for, and remember its weights; a resumed run did so already."""
    run, splits, settings = loaded.run, loaded.splits, loaded.run.config.evaluation
    start = starting_model.digest(loaded.model)
    if not resumed and directory.record.start != start:
        directory.update(start=start, before={}, retention={})  # of another model, if there are any
    if directory.record.start != start:
        return
    first = _judged(loaded)[0]
    if settings.eval_before_training and not directory.record.before:
        untrained = evaluate(trainer, run, loaded.tokenizer, splits.sets[first], first, untrained=True)
        directory.update(before=results.scores(untrained))
    if not settings.retention or not settings.test_sets or not (splits.also or splits.corpora):
        return
    if not starting_model.knows_tasks(run, loaded.model):
        why = "its classification head is new" if run.config.model.name else "it is from scratch"
        say(f"retention is not measured: the model can do no task before training, {why}", "dim")
        return
    for name in (*splits.also, *splits.corpora):
        if name not in directory.record.retention:
            untrained = _score_other(trainer, loaded, name, untrained=True)
            directory.update(retention={**directory.record.retention, name: results.scores(untrained)})


def _score_other(trainer: Any, loaded: LoadedRun, name: str, *, untrained: bool = False) -> Scored:
    """The scores of a model on a task of data.also, or on the texts of data.corpora."""
    run, splits, tokenizer = loaded.run, loaded.splits, loaded.tokenizer
    if name in splits.corpora:
        return corpora.perplexity(trainer, run, tokenizer, splits.corpora[name], name)
    return evaluate(trainer, run, tokenizer, splits.sets[name], name, untrained=untrained)


def _evaluate(
    trainer: Any, loaded: LoadedRun, monitor: DriftMonitor, record: RunRecord
) -> tuple[dict[str, Scored], dict[str, Any]]:
    """The scores of the trained model on all its splits, and how it differs from the starting one.

    Args:
        trainer: that has trained it
        monitor: with the trainer that scores it, which is another where there were adapters
    """
    run, splits, signals = loaded.run, loaded.splits, trainer.options.signals
    try:
        signals.check()
        names = dict.fromkeys(["validation", *_judged(loaded)])
        scores = {name: evaluate(monitor.trainer, run, loaded.tokenizer, splits.sets[name], name) for name in names}
        others = [name for name in splits.corpora if name in record.retention]
        texts = {name: _score_other(monitor.trainer, loaded, name) for name in others}
        with signals.deferred(trainer.args.world_size > 1):
            before = {name: scored["metrics"] for name, scored in record.retention.items()}
            sections = _against_start(monitor, {**scores, **texts}, before, run.card.score)
            if monitor.measures:
                monitor.keep_states()
        signals.check()  # of one that struck while a library loaded the model, and took it for an error
    except Interrupted as stop:
        with signals.deferred():
            trainer._save_checkpoint(trainer.model_wrapped, None)
        step = trainer.state.global_step
        message = f"stopped after the last step, {step}: run the same command to resume with the evaluation"
        raise Interrupted(stop.number, message) from None
    return with_average(scores, run.card), sections


def _against_start(
    monitor: DriftMonitor, scores: Mapping[str, Scored], before: Mapping[str, Mapping[str, Any]], score: str
) -> dict[str, Any]:
    """The sections `drift` and `retention` of metrics.json, without those that are empty.

    Args:
        scores: of the trained model on all its splits and on the texts of data.corpora
        before: the numbers of the starting model on the tasks of data.also, and on those texts
        score: what the score is called
    """
    if not monitor.measures:
        return {}
    after = {name: scored.metrics for name, scored in scores.items()}
    sections = {"drift": monitor.section(), "retention": retention(before, after, score)}
    return {name: section for name, section in sections.items() if section}


def _finish(
    trainer: Any, monitor: DriftMonitor, run: Run, directory: RunDirectory, scores: dict[str, Scored],
    sections: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Write the model, the scores, other `sections` of metrics.json and the card; last that the run is finished.

    Args:
        trainer: that has trained the model
        monitor: with the trainer that has it as it is saved
    """
    folder = directory.folder
    directory.check_own()
    aside = folder / f"{ASIDE}model"
    monitor.trainer.save_model(str(aside))
    trainer.save_ema(aside)
    if not trainer.is_world_process_zero():
        return {}
    (aside / RAW_HEAD).unlink(missing_ok=True)  # the final model is folded
    files = checkpoints.publish(aside, folder)
    (folder / REMOVED).unlink(missing_ok=True)  # of a model that was not kept
    metrics = results.write_scores(folder / METRICS, run, scores, method=run.config.method, **sections)
    results.write_card(folder, run, metrics)
    if trainer.options.tensorboard is not None:
        if monitor.states:
            trainer.options.tensorboard.project(monitor.states, monitor.examples)
        trainer.options.tensorboard.close(scores, metrics, trainer.state.global_step)
    directory.update(finished=True, files=files)
    if not run.config.checkpoints.save_steps:
        checkpoints.rotate(folder, directory.record.run, 0, None)
    return metrics


def _tokens(trainer: Any) -> dict[str, str]:
    """SHA-256 of the token ids that are kept on disk, by split; made now where they are not there."""
    train = trainer.train_dataset.dataset if isinstance(trainer.train_dataset, Numbered) else None
    further = {name: sampler.examples for name, sampler in trainer.streams.items()}
    further = {name: getattr(examples, "sources", examples) for name, examples in further.items()}
    sets = {"train": train, "validation": trainer.eval_dataset, **further}
    return {name: table.digest for name, split in sets.items() if split is not None and (table := split.tokens)}


def _grouped(examples: Encoded, config: Config, world: int) -> GroupedOrder:
    """An order of the training examples by the lengths of source and target."""
    return GroupedOrder(
        examples.lengths(), config.optimisation.per_device_train_batch_size, world=world, seed=config.seed
    )


def _training_set(loaded: LoadedRun, sets: Mapping[str, Encoded], prompt: str | None) -> Any:
    """The examples that a run is trained on, with their numbers, or bins of them; None where it is only evaluated."""
    config = loaded.run.config
    if loaded.splits.stream is not None:
        return EncodedStream(loaded.splits.stream, Encoded((), loaded.tokenizer, config, prompt))
    if "train" not in sets:
        return None
    return Packed(sets["train"], config.data.bin_length) if config.data.packing else Numbered(sets["train"])


def _further_datasets(loaded: LoadedRun, sets: Mapping[str, Encoded], prompt: str | None) -> dict[str, Any]:
    """Texts without labels and old examples, as options of a trainer."""
    if not sets.keys() & {UNLABELLED, REPLAY}:
        return {}
    collate, digest = collator(loaded.tokenizer, loaded.run.card.kind, prompt), starting_model.digest(loaded.model)
    return streams.datasets_of(loaded.run, loaded.model, loaded.tokenizer, sets, collate, digest)


def make_trainer(loaded: LoadedRun, folder: Path, scorer: Scorer | None = None, **options: Any) -> Any:
    """The trainer of a run; `options` are further `RunOptions`."""
    run, config = loaded.run, loaded.run.config
    generates, prompt = run.card.kind == "generation", completions.prompt_of(run, loaded.model)
    sets = {name: Encoded(examples, loaded.tokenizer, config, prompt) for name, examples in loaded.splits.sets.items()}
    seq2seq = generates and prompt is None
    kind = FaultTolerantSeq2SeqTrainer if seq2seq else FaultTolerantCausalTrainer if generates else FaultTolerantTrainer
    args = arguments(config, folder, seq2seq, greater_is_better=run.card.greater_is_better)
    grouped = config.data.group_by_length and "train" in sets
    if config.engine.name == "fsdp2":
        if args.world_size == 1:
            raise BadInput(
                "engine.name=fsdp2: shards a model over several processes, and there is one: start them with "
                "seqreg launch --nproc 2"
            )
        low = torch.bfloat16 if config.engine.param_dtype == "bf16" else None
        passed = config.engine.model_dump(include={"reshard_after_forward", "cpu_offload"})
        shard(loaded.model, param_dtype=low, **passed)
    return kind(
        loaded.model,
        args,
        data_collator=Collator(
            collator(loaded.tokenizer, run.card.kind, prompt),
            completions.PaddingFreeCollator() if config.data.joins_examples else None,
        ),
        train_dataset=_training_set(loaded, sets, prompt),
        eval_dataset=sets.get("validation"),
        processing_class=loaded.tokenizer,
        compute_metrics=scorer,
        criterion=copy.deepcopy(run.criterion),
        diagnostics_steps=config.logging.diagnostics_steps,
        smoothness_steps=config.logging.smoothness_steps,
        **_further_datasets(loaded, sets, prompt),
        update=config.update(),
        options=RunOptions(
            config,
            sampler=_grouped(sets["train"], config, args.world_size) if grouped else None,
            bars=Bars(run.card.score),
            **options,
        ),
    )


def arguments(config: Config, folder: Path, seq2seq: bool, *, greater_is_better: bool = True) -> TrainingArguments:
    """transformers' arguments: settings of the same name are passed as they are."""
    opt, evaluation, saved = config.optimisation, config.evaluation, config.checkpoints
    best = evaluation.load_best_model_at_end or evaluation.early_stopping_patience
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    sections = (opt, evaluation, saved, config.data, config.logging)
    settings = {key: value for section in sections for key, value in dict(section).items() if key in known}
    settings |= {
        "output_dir": str(folder), "seed": config.seed, "disable_tqdm": True,
        "report_to": list(config.logging.report_to) or "none",
        "use_cpu": not torch.accelerator.is_available(),  # explicit, or several processes on CPUs are not a group
        "warmup_steps": opt.warmup, "optim": "adafactor" if opt.optim == "adafactor" else "adamw_torch_fused",
        "max_grad_norm": opt.max_grad_norm or NO_CLIPPING, "max_steps": opt.max_steps or -1,
        "num_train_epochs": opt.num_train_epochs or 1.0, "bf16": opt.precision == "bf16",
        "fp16": opt.precision == "fp16", "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_steps": min(config.logging.logging_steps, opt.max_steps or config.logging.logging_steps),
        "include_num_input_tokens_seen": "all" if config.data.joins_examples else "non_padding",
        "dataloader_pin_memory": torch.cuda.is_available(),
        "eval_strategy": "steps" if evaluation.eval_steps else "no", "eval_steps": evaluation.eval_steps or None,
        "save_strategy": "steps" if saved.save_steps else "no", "save_steps": saved.save_steps or 500,
        "save_total_limit": None,  # `checkpoints.rotate` does it
        "metric_for_best_model": "score" if best else None,
        "greater_is_better": greater_is_better,
        "accelerator_config": {"dispatch_batches": False},  # every rank reads a stream itself
    }  # fmt: skip
    return (
        Seq2SeqTrainingArguments(**settings, predict_with_generate=True) if seq2seq else TrainingArguments(**settings)
    )


def trained(folder: Path, overrides: tuple[str, ...] = (), *, trust: bool = False, trust_changes: bool = False) -> Run:
    """The run of a folder, with the trained model in place of the one that it started from.

    Args:
        trust: let code run that comes with a model
        trust_changes: take the model as it is, where its files have changed since the run has finished
    """
    run_config.check_trained(folder)
    check_model(folder, RunRecord.read(folder), trusted=trust_changes)
    return _scored(run_config.load(folder, overrides, trust=trust, build_terms=False), folder)


def _scored(run: Run, folder: Path) -> Run:
    """The same run, with the model of a folder in place of the one that it started from."""
    return Run(run.config.for_evaluation(str(folder)), run.card, run.origins, run.trust)


def evaluate_run(
    folder: Path,
    *,
    file: Path | None = None,
    output: Path | None = None,
    overrides: tuple[str, ...] = (),
    trust: bool = False,
    trust_changes: bool = False,
) -> dict[str, Any]:
    """Score a trained model again, on the splits of its task or on one file, and bring its files up to date.

    The files of a run have the scores of the run alone. Scores with other settings, of other examples, or of a model
    whose files have changed, are written to scores/NAME.json, or to `output`.
    """
    run_config.check_trained(folder)
    output = None if output is not None and output.resolve() == folder.resolve() else output
    if output is not None and (output / RECORD).is_file():
        raise BadInput(f"--output {output}: another run, which has scores of its own: choose another")
    record = RunRecord.read(folder)
    changes = check_model(folder, record, trusted=trust_changes or output is not None)
    started = run_config.load(folder, trust=trust, build_terms=False)
    asked = run_config.load(folder, overrides, trust=trust, build_terms=False)
    if file is not None:
        splits = Splits({file.stem: loading.read_file(asked.card, file, asked.config.data)})
        names = [file.stem]
    else:
        splits = loading.load(asked.card, asked.config.data, needs_train=False)
        wanted = dict.fromkeys(["validation", *splits.evaluations(asked.card)])
        names = [name for name in wanted if name in splits.sets]
    made = made_with(record, asked, started, splits, file=file, changes=changes)
    path = results.place(folder, output, made)
    run = _scored(asked, folder)
    scores, sections = _scored_again(run, folder, splits, names, against_start=file is None)
    if not first_process():
        return {}
    own = None if path == folder / METRICS else made
    metrics = results.write_scores(path, run, with_average(scores, run.card), made_with=own, **sections)
    for line in results.difference_lines(made):
        say(line)
    say(f"Scores are in {path}, predictions in {results.predictions_of(path)}")
    return metrics


def measure(
    model: Path, folder: Path, *, overrides: tuple[str, ...] = (), trust: bool = False
) -> dict[str, dict[str, Any]]:
    """Drift and retention of any model folder, against the model that a run started from; nothing is written.

    Args:
        model: weights for the task of the run, such as a mean of several; the tokenizer is beside them
        folder: of the run; its own model need not be there

    Returns:
        sections of metrics.json: "drift" and, with data.also, "retention"
    """
    run = _scored(run_config.load(folder, overrides, trust=trust, build_terms=False), model)
    splits = loading.load(run.card, run.config.data, needs_train=False)
    return _scored_again(run, folder, splits, splits.also, against_start=True, rescore_start=bool(overrides))[1]


def _scored_again(
    run: Run, folder: Path, splits: Splits, names: Sequence[str], *, against_start: bool, rescore_start: bool = True
) -> tuple[dict[str, Scored], dict[str, Any]]:
    """The scores of the model of `run`, and how it differs from the one that the run of a folder started from.

    The starting model is loaded first and once: two models are in memory, and never three.

    Args:
        against_start: also measure drift and retention
        rescore_start: score the starting model on data.also and data.corpora again; else run.json has its numbers
    """
    launch.check_environment(run.config.optimisation.precision)
    check_precision(run.config.optimisation.precision)
    config, record = run.config, RunRecord.read(folder)
    tokenizer = models.load_tokenizer(config, trust=run.trust)
    started = run_config.load(folder, trust=run.trust, build_terms=False)
    start, before = None, dict[str, Mapping[str, Any]]()
    others = [*splits.also, *splits.corpora] if config.evaluation.retention else []
    if against_start and (config.evaluation.drift_examples or others):
        try:
            start = starting_model.rebuild(started, tokenizer, "" if record is None else record.start)
        except BadInput as error:
            warn(f"drift and retention are not measured again: {error}")
    with tempfile.TemporaryDirectory() as scratch:
        if start is not None and others and starting_model.knows_tasks(started, start):
            stored = {} if record is None or rescore_start else record.retention
            loaded = LoadedRun(run, splits, tokenizer, start)
            before = _scores_of_start(loaded, {name: scored["metrics"] for name, scored in stored.items()}, scratch)
        model = models.load_model(config, run.card, tokenizer, trust=run.trust, trained=True)
        loaded = LoadedRun(run, splits, tokenizer, model)
        trainer = make_trainer(loaded, Path(scratch))
        scores = {name: evaluate(trainer, run, tokenizer, splits.sets[name], name) for name in names}
        texts = {name: _score_other(trainer, loaded, name) for name in splits.corpora if name in before}
        monitor = DriftMonitor(trainer, tokenizer, splits.sets.get("validation"), lambda: start)
        sections = {} if start is None else _against_start(monitor, {**scores, **texts}, before, run.card.score)
    return scores, sections


def _scores_of_start(
    loaded: LoadedRun, known: dict[str, Mapping[str, Any]], scratch: str
) -> dict[str, Mapping[str, Any]]:
    """The numbers of a starting model on every task of data.also, and every text of data.corpora, that is not known."""
    run, splits = loaded.run, loaded.splits
    if run.card.kind == "generation":
        models.set_generation(loaded.model, run.config)
    trainer, numbers = make_trainer(loaded, Path(scratch)), dict(known)
    for name in (name for name in (*splits.also, *splits.corpora) if name not in known):
        numbers[name] = _score_other(trainer, loaded, name, untrained=True).metrics
    return numbers
