"""What settings are called elsewhere, mostly in transformers' TrainingArguments: for a hint, never to be accepted."""

from __future__ import annotations

ALIASES = {
    "optimisation": ("training", "train", "trainer", "optimization", "training_args"),
    "optimisation.learning_rate": ("lr", "learning_rate", "max_lr", "peak_lr"),
    "optimisation.steps": ("max_steps", "num_steps", "total_steps", "num_training_steps", "max_updates", "steps"),
    "optimisation.epochs": ("num_train_epochs", "num_epochs", "max_epochs", "epoch", "epochs"),
    "optimisation.batch_size": ("per_device_train_batch_size", "train_batch_size", "batch", "bs", "batch_size"),
    "optimisation.accumulation": (
        "gradient_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation", "grad_accum", "update_freq",
    ),
    "optimisation.warmup": ("warmup_steps", "warmup_ratio", "num_warmup_steps", "warmup_updates", "warmup"),
    "optimisation.schedule": ("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_schedule"),
    "optimisation.optimizer": ("optim", "optimiser", "optimizer"),
    "optimisation.betas": ("adam_beta1", "adam_beta2", "adam_betas", "beta1", "beta2"),
    "optimisation.epsilon": ("adam_epsilon", "adam_eps", "eps"),
    "optimisation.weight_decay": ("wd", "weight_decay"),
    "optimisation.clip": ("max_grad_norm", "clip_norm", "grad_clip", "gradient_clipping", "gradient_clip_val"),
    "optimisation.precision": ("bf16", "fp16", "fp32", "dtype", "torch_dtype", "mixed_precision", "amp", "precision"),
    "optimisation.checkpointing": ("gradient_checkpointing",),
    "model": ("network", "net"),
    "model.name": ("model.path", "model_name_or_path", "name_or_path", "model_name", "pretrained", "from_pretrained"),
    "model.tokenizer": ("tokenizer_name", "tokenizer"),
    "model.architecture": ("model_type", "arch", "architecture"),
    "model.settings": ("model.config", "config_overrides", "model_kwargs"),
    "model.vocabulary": ("vocab_size", "vocab", "vocabulary_size"),
    "data": ("dataset", "datasets"),
    "data.path": (
        "data.name", "data.file", "data.folder", "data.dir", "train_file", "validation_file", "test_file", "data_dir",
        "dataset_name", "data_path", "data.train",
    ),
    "data.max_source": (
        "max_source_length", "max_seq_length", "max_input_length", "data.max_length", "model_max_length",
    ),
    "data.max_target": ("max_target_length",),
    "data.prefix": ("source_prefix", "prefix"),
    "data.limit": ("max_train_samples", "max_eval_samples", "max_predict_samples", "max_samples"),
    "data.workers": ("dataloader_num_workers", "num_workers", "workers"),
    "data.group": ("group_by_length", "length_column_name"),
    "loss.label_smoothing": ("label_smoothing_factor", "label_smoothing", "smoothing"),
    "terms": ("term", "regularizers", "regularizer"),
    "terms.neftune.alpha": ("neftune_noise_alpha",),
    "generation": ("gen", "generate", "decoding"),
    "generation.num_beams": ("generation_num_beams", "num_beams", "beams", "beam", "beam_size"),
    "generation.max_length": (
        "generation_max_length", "max_new_tokens", "val_max_target_length", "gen_max_length", "max_length",
    ),
    "generation.min_length": ("generation_min_length", "min_new_tokens", "min_length"),
    "generation.length_penalty": ("lenpen", "length_penalty"),
    "evaluation": ("eval", "validation"),
    "evaluation.batch_size": ("per_device_eval_batch_size", "eval_batch_size"),
    "evaluation.every": ("eval_steps", "eval_strategy", "evaluation_strategy", "eval_every"),
    "evaluation.best": ("load_best_model_at_end", "metric_for_best_model"),
    "logging.every": ("logging_steps", "log_every", "log_interval"),
    "logging.tensorboard": ("report_to", "tensorboard"),
    "checkpoints": ("checkpoint", "saving"),
    "checkpoints.every": ("save_steps", "save_strategy", "save_every"),
    "checkpoints.keep": ("save_total_limit", "keep"),
    "seed": ("random_seed", "data_seed", "seeds"),
    "output": ("output_dir", "output_folder", "out", "out_dir", "save_dir"),
}  # fmt: skip
"""Our key -> words for it. A word with a dot in it is a whole key; any other may follow any section."""
_MEANT = {word: key for key, words in ALIASES.items() for word in words}


def meant(key: str) -> str | None:
    """The key that somebody means who writes another one.

    >>> meant("optimisation.lr"), meant("model.path"), meant("max_grad_norm"), meant("optimisation.nonsense")
    ('optimisation.learning_rate', 'model.name', 'optimisation.clip', None)
    """
    found = _MEANT.get(key) or _MEANT.get(key.rpartition(".")[2])
    return None if found == key else found
