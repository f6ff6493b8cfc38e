"""What settings are called elsewhere: hints for names of other libraries, and names that seqreg itself has retired."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALIASES = {
    "optimisation": ("training", "train", "trainer", "optimization", "training_args"),
    "optimisation.learning_rate": ("lr", "max_lr", "peak_lr"),
    "optimisation.max_steps": ("num_steps", "total_steps", "num_training_steps", "max_updates", "steps"),
    "optimisation.num_train_epochs": ("num_epochs", "max_epochs", "epoch", "epochs"),
    "optimisation.per_device_train_batch_size": ("train_batch_size", "batch", "bs", "batch_size"),
    "optimisation.gradient_accumulation_steps": (
        "accumulate_grad_batches", "gradient_accumulation", "grad_accum", "update_freq", "accumulation",
    ),
    "optimisation.warmup_steps": ("warmup_ratio", "num_warmup_steps", "warmup_updates", "warmup"),
    "optimisation.lr_scheduler_type": ("lr_scheduler", "scheduler", "lr_schedule", "schedule"),
    "optimisation.optim": ("optimiser", "optimizer"),
    "optimisation.adam_beta1": ("betas", "adam_betas", "beta1"),
    "optimisation.adam_beta2": ("beta2",),
    "optimisation.adam_epsilon": ("adam_eps", "eps", "epsilon"),
    "optimisation.weight_decay": ("wd",),
    "optimisation.max_grad_norm": ("clip_norm", "grad_clip", "gradient_clipping", "gradient_clip_val"),
    "optimisation.precision": ("bf16", "fp16", "fp32", "dtype", "torch_dtype", "mixed_precision", "amp"),
    "optimisation.gradient_checkpointing": ("checkpointing",),
    "model": ("network", "net"),
    "model.name": ("model.path", "model_name_or_path", "name_or_path", "model_name", "pretrained", "from_pretrained"),
    "model.tokenizer": ("tokenizer_name",),
    "model.target_tokenizer": ("tokenizer_target", "decoder_tokenizer"),
    "model.architecture": ("model_type", "arch"),
    "model.settings": ("model.config", "config_overrides", "model_kwargs"),
    "model.lora.r": ("model.lora.rank", "lora_r", "lora_rank"),
    "model.lora.lora_alpha": ("model.lora.alpha",),
    "model.lora.lora_dropout": ("model.lora.dropout",),
    "model.lora.target_modules": ("lora_target_modules",),
    "model.lora.modules_to_save": ("lora_modules_to_save",),
    "model.vocab_size": ("vocab", "vocabulary_size", "vocabulary"),
    "data": ("dataset", "datasets"),
    "data.subset": ("dataset_config_name", "config_name"),
    "data.revision": ("dataset_revision",),
    "data.delimiter": ("sep", "separator"),
    "data.columns": ("text_column", "summary_column", "column_names"),
    "data.path": (
        "data.name", "data.file", "data.folder", "data.dir", "train_file", "validation_file", "test_file",
        "data_dir", "dataset_name", "data_path", "data.train",
    ),
    "data.max_source_length": (
        "max_seq_length", "max_input_length", "model_max_length", "max_source",
    ),
    "data.max_target_length": ("max_target",),
    "data.source_prefix": ("prefix",),
    "data.limit": ("max_train_samples", "max_eval_samples", "max_predict_samples", "max_samples"),
    "data.dataloader_num_workers": ("num_workers", "workers"),
    "data.group_by_length": ("length_column_name",),
    "data.packing": ("sample_packing", "packing_strategy", "multipack"),
    "loss.label_smoothing": ("label_smoothing_factor", "smoothing"),
    "loss.loss": ("loss_type", "use_dft_loss", "loss.name", "loss.type"),
    "terms": ("term", "regularizers", "regularizer"),
    "terms.neftune.alpha": ("neftune_noise_alpha",),
    "generation": ("gen", "generate", "decoding"),
    "generation.num_beams": ("generation_num_beams", "beams", "beam", "beam_size"),
    "generation.max_length": ("generation_max_length", "max_new_tokens", "val_max_target_length", "gen_max_length"),
    "generation.min_length": ("generation_min_length", "min_new_tokens"),
    "generation.length_penalty": ("lenpen",),
    "evaluation": ("eval", "validation"),
    "evaluation.per_device_eval_batch_size": ("eval_batch_size",),
    "evaluation.eval_steps": ("eval_strategy", "evaluation_strategy", "eval_every"),
    "evaluation.load_best_model_at_end": ("metric_for_best_model",),
    "logging.logging_steps": ("log_every", "log_interval"),
    "logging.report_to": ("loggers", "tracker", "trackers"),
    "evaluation.early_stopping_patience": ("early_stopping", "patience"),
    "generation.do_sample": ("sample", "sampling"),
    "checkpoints": ("checkpoint", "saving"),
    "checkpoints.save_steps": ("save_strategy", "save_every"),
    "checkpoints.save_total_limit": ("keep",),
    "seed": ("random_seed", "data_seed", "seeds"),
    "output": ("output_dir", "output_folder", "out", "out_dir", "save_dir"),
    "data.train_fraction": (),
    "evaluation.eval_before_training": ("eval_on_start",),
}  # fmt: skip
"""Our key -> words for it, for a hint. A word with a dot in it is a whole key; any other may follow any section."""
_MEANT = {key.rpartition(".")[2]: key for key in ALIASES if "." in key}  # in another section, or in none
_MEANT |= {word: key for key, words in ALIASES.items() for word in words}

RETIRED_TASKS = {"newsroom": "synthetic_news", "newsroom_people": "synthetic_news_people"}
"""Names of task cards from before, and what they are called now. They are still read."""

RETIRED = {
    "optimisation.steps": "max_steps",
    "optimisation.epochs": "num_train_epochs",
    "optimisation.batch_size": "per_device_train_batch_size",
    "optimisation.accumulation": "gradient_accumulation_steps",
    "optimisation.warmup": "warmup_steps",
    "optimisation.schedule": "lr_scheduler_type",
    "optimisation.optimizer": "optim",
    "optimisation.epsilon": "adam_epsilon",
    "optimisation.clip": "max_grad_norm",
    "optimisation.checkpointing": "gradient_checkpointing",
    "optimisation.patience": "nonfinite_patience",
    "data.share": "train_fraction",
    "data.group": "group_by_length",
    "data.most_empty": "max_empty_fraction",
    "data.max_source": "max_source_length",
    "data.max_target": "max_target_length",
    "data.workers": "dataloader_num_workers",
    "data.prefix": "source_prefix",
    "evaluation.every": "eval_steps",
    "evaluation.before": "eval_before_training",
    "evaluation.best": "load_best_model_at_end",
    "evaluation.batch_size": "per_device_eval_batch_size",
    "logging.every": "logging_steps",
    "checkpoints.every": "save_steps",
    "checkpoints.minutes": "save_minutes",
    "checkpoints.keep": "save_total_limit",
    "model.vocabulary": "vocab_size",
    "terms.r3f.rows": "example_fraction",
    "terms.r3f.tokens": "token_fraction",
    **{f"data.also.{old}": new for old, new in RETIRED_TASKS.items()},
}
"""Keys from before seqreg used transformers' names, and what the last part is called now. They are still read."""

RETIRED_PAIRS = {"optimisation.betas": ("adam_beta1", "adam_beta2")}
"""The same for keys whose value was a pair."""


def current(key: str) -> str:
    """What a dotted key is called now.

    >>> current("optimisation.clip"), current("seed")
    ('optimisation.max_grad_norm', 'seed')
    """
    return f"{key.rpartition('.')[0]}.{RETIRED[key]}" if key in RETIRED else key


def current_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, as the keys are called now.

    >>> current_settings({"optimisation.betas": [0.9, 0.98], "optimisation.clip": 1})
    {'optimisation.adam_beta1': 0.9, 'optimisation.adam_beta2': 0.98, 'optimisation.max_grad_norm': 1}
    """
    now: dict[str, Any] = {}
    for key, value in settings.items():
        pair = RETIRED_PAIRS.get(key)
        if pair is not None and isinstance(value, (list, tuple)) and len(value) == len(pair):
            now |= {f"{key.rpartition('.')[0]}.{name}": part for name, part in zip(pair, value, strict=True)}
        else:
            now[current(key)] = value
    return now


def meant(key: str) -> str | None:
    """The key that somebody means who writes another one.

    >>> meant("optimisation.lr"), meant("model.path"), meant("max_grad_norm"), meant("optimisation.nonsense")
    ('optimisation.learning_rate', 'model.name', 'optimisation.max_grad_norm', None)
    """
    other = _MEANT.get(key) or _MEANT.get(key.rpartition(".")[2])
    return None if other == key else other
