"""The names of transformers, accelerate, TRL and torch that seqreg relies on although no one promises them.

This is where an upgrade of these libraries breaks something first: the trainers override these methods or read these
attributes to save and resume exactly, and to skip a step that is not finite. They were read in the versions below;
`tests/integrations/test_private_names.py` fails, with the name, when one is gone or takes other arguments, and when the
code uses one that is not listed here.
"""

from __future__ import annotations

READ_IN = {"transformers": "5.22.2", "accelerate": "1.15.0", "trl": "1.16.0", "torch": "2.13.0", "peft": "0.21.2"}

TRAINER_METHODS = {
    "_determine_best_metric": "metrics trial",
    "_evaluate": "trial ignore_keys_for_eval skip_scheduler",
    "_finalize_training": "trial num_train_samples start_time",
    "_get_collator_with_removed_columns": "data_collator description",
    "_get_eval_sampler": "eval_dataset",
    "_get_grad_norm": "model grad_norm",
    "_get_train_sampler": "train_dataset",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    "_issue_warnings_after_load": "load_result",
    "_load_best_model": "",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_optimizer_and_scheduler": "checkpoint",
    "_load_rng_state": "checkpoint",
    "_load_scaler": "checkpoint",
    "_maybe_log_save_evaluate": "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate",
    "_prepare_inputs": "inputs",
    "_run_epoch": "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
    "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    "_save": "output_dir state_dict",
    "_save_checkpoint": "model trial",
    "_save_optimizer_and_scheduler": "output_dir",
    "_save_rng_state": "output_dir",
    "_save_scaler": "output_dir",
    "_set_signature_columns_if_needed": "",
    "get_batch_samples": "epoch_iterator num_batches device",
    "store_flos": "",
}
"""Methods of `transformers.Trainer` with their parameters; the last two are public, and documented nowhere."""
TRAINER_ATTRIBUTES = (
    "_globalstep_last_logged", "_signature_columns", "_total_loss_scalar", "_tr_loss",
    "current_gradient_accumulation_steps", "is_distributed_loading_by_transformers",
)  # fmt: skip
"""Attributes that `transformers.Trainer` assigns."""
SFT_ATTRIBUTES = ("_metrics", "_total_train_tokens", "_tp_size", "aux_loss_enabled", "router_aux_loss_coef")
"""Attributes that TRL's `SFTTrainer` assigns: where its metrics are kept until they are logged."""
FUNCTIONS = (
    "accelerate.utils.broadcast_object_list",
    "torch.distributed.run.parse_args",
    "torch.distributed.run.run",
    "transformers.distributed.fsdp.is_fsdp_managed_module",
    "transformers.trainer_callback.TrainerState.compute_steps",
    "transformers.trainer_pt_utils.get_length_grouped_indices",
    "transformers.trainer_pt_utils.safe_globals",
)
"""Functions elsewhere that are documented nowhere."""
ASSIGNED = {
    "peft.tuners.lora.layer.LoraLayer": ("lora_A", "lora_B", "lora_dropout", "lora_variant", "scaling"),
    "torch._dynamo.eval_frame.OptimizedModule": ("_orig_mod",),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": ("_module_info",),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": (
        "fsdp_params", "gradient_divide_factor", "post_forward_mesh_info", "reshard_after_backward",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": ("_fsdp_param_groups", "_mp_policy"),
    "transformers.PreTrainedModel": ("_loss_function",),
}  # fmt: skip
"""Attributes that other classes assign, or declare: where weights in shards and heads are looked into."""
FOUND_ON = {
    "accelerate.state.GradientState": ("_set_sync_gradients",),
    "torch.Tensor": ("_base", "_version"),
    "torch.distributed.fsdp.FSDPModule": ("_get_fsdp_state",),
    "torch.nn.Module": ("_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_modules"),
    "transformers.PreTrainedConfig": ("_attn_implementation",),
}
"""Attributes that are found on a class, or on what it makes."""
MARKS = ("_is_fsdp_managed_module", "_tp_size", "ds_id", "_backward_prologue", "_backward_prologue_per_tensor")
"""What transformers and DeepSpeed leave on a module, a parameter or an engine; where one is gone, its test of engines
fails."""
