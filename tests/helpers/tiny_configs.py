"""A tiny configuration of any model type that transformers knows, made by shrinking every size that its class has."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING

VOCAB, PAD, BOS, EOS = 96, 1, 2, 3
WIDTH, HEADS = 32, 4

_SIZES: dict[int, str] = {
    WIDTH: """hidden_size d_model n_embd emb_dim dim dim_model embedding_size embedding_dim word_embed_proj_dim
        input_embedding_size output_embedding_size backbone_hidden_size true_hidden_size pooler_hidden_size
        d_latents prediction_head_size lru_width attention_hidden_size entity_emb_size bottleneck_size
        pronunciation_embed_dim shape_embed_dim ple_embed_dim qformer_hidden_size""",
    64: """intermediate_size d_ff d_inner dff dim_ff encoder_ffn_dim decoder_ffn_dim ffn_dim ffn_hidden_size hidden_dim
        n_inner feed_forward_size moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size
        intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size moe_shared_expert_intermediate_size
        mamba_d_ssm speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim prompt_mid_dim
        moe_latent_size""",
    HEADS: """num_attention_heads encoder_attention_heads decoder_attention_heads attention_heads n_head n_heads
        num_heads num_encoder_attention_heads num_decoder_attention_heads num_self_attention_heads
        num_cross_attention_heads swa_num_attention_heads mamba_n_heads mamba_num_heads n_mamba_heads linear_num_heads
        index_n_heads
        speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads
        linear_num_value_heads num_local_experts num_experts n_routed_experts moe_num_experts
        intermediate_groups q_groups k_groups v_groups output_groups post_attention_groups prompt_length
        moe_num_primary_experts expert_num""",
    2: """num_key_value_heads swa_num_key_value_heads num_hidden_layers num_layers n_layer n_layers encoder_layers
        decoder_layers num_encoder_layers num_decoder_layers linear_num_key_heads num_experts_per_tok moe_k moe_topk
        num_experts_per_token moe_top_k top_k_experts num_sparse_encoder_layers num_sparse_decoder_layers
        speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_kv_heads
        num_self_attends_per_block zero_expert_num num_random_blocks num_key_value_groups
        num_feedforward_networks type_vocab_size hash_code_len num_hash""",
    8: """head_dim d_head d_kv attention_head_size v_head_dim qk_nope_head_dim qk_rope_head_dim qk_head_dim kv_channels
        swa_head_dim global_head_dim index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim dim_head
        hidden_size_per_layer_input laurel_rank adapter_rank gated_norm_rank mamba_d_state mamba_d_head mamba_head_dim
        state_size ssm_state_size index_topk d_rel o_lora_rank router_hidden_size rotary_dim mamba_dt_rank
        num_landmarks num_global_tokens hc_lowrank num_latents centroid_intermediate_top_k num_centroids
        intra_bottleneck_size embedding_rank expert_capacity zaya_mlp_expansion coordinate_size""",
    16: """kv_lora_rank q_lora_rank sliding_window sliding_window_size local_attention attention_chunk_size window_size
        attention_window_size chunk_size mamba_chunk_size keep_window_size block_size global_block_size local_radius
        max_2d_position_embeddings compress_rate index_block_size position_bias_num_buckets floor_scale
        num_hash_buckets dim_model_base""",
    VOCAB: """vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input entity_vocab_size
        pronunciation_vocab_size shape_vocab_size t2u_vocab_size char_vocab_size decoder_vocab_size
        segment_means_seq_len""",
    128: """max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length context_length
        max_encoder_position_embeddings max_decoder_position_embeddings max_target_positions max_source_positions
        position_bias_max_distance original_max_position_embeddings t2u_max_position_embeddings rel_extent""",
    1: """n_group topk_group n_groups mamba_n_groups max_window_layers num_nextn_predict_layers n_shared_experts
        num_shared_experts first_k_dense_replace num_kv_shared_layers num_dense_layers moe_layer_start_index
        num_codebooks encoder_sparse_step decoder_sparse_step o_groups""",
}  # fmt: skip
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}
IDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS,
       "mask_token_id": 4, "cls_token_id": BOS, "sep_token_id": EOS, "eod_token_id": EOS, "text_pad_token_id": PAD,
       "forced_eos_token_id": None, "forced_bos_token_id": None}  # fmt: skip

ALWAYS = ("num_key_value_heads", "head_dim", "num_experts_per_tok", "n_routed_experts", "num_hidden_layers")
"""Sizes that are given even where the class has none by default."""

_mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_d_state": 8}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {**_mamba, "attn_layer_indices": [1]},
    "falcon_h1": {**_mamba, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_mamba, "layer_types": ["mamba", "attention"]},
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8},
    "reformer": {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (16, 16)},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"num_hidden_layers": 3, "n_mamba_heads": 2},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "num_hidden_layers": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_expand": 2,
        "hybrid_layer_ids": [1],
    },
    "led": {"attention_window": 8},
    "longformer": {"attention_window": 8},
    "longt5": {"decoder_start_token_id": PAD},
    "switch_transformers": {
        "decoder_start_token_id": PAD,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "t5": {"decoder_start_token_id": PAD},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 4},
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 5, "shape_size": 6},
    "nystromformer": {"num_landmarks": 16, "segment_means_seq_len": 16, "conv_kernel_size": 3},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v4": {"num_hidden_layers": 4},
    "flint": {"num_hidden_layers": 4},
    "gemma4_text": {"num_hidden_layers": 6},
    "gemma4_unified_text": {"num_hidden_layers": 6},
    "cohere_compass_text": {"num_hidden_layers": 4},
    "esm": {"pad_token_id": PAD, "mask_token_id": 4, "vocab_size": VOCAB},
    "esmc": {"num_key_value_heads": HEADS},
    "xlstm": {"chunk_size": 16, "hidden_size": 64, "embedding_dim": 64},
    "moshi": {"audio_vocab_size": 32},
}
"""Settings of single model types, on top of the sizes."""


def tiny(model_type: str, **settings: Any) -> Any:
    """A tiny configuration.

    Args:
        settings: on top, where the class has them (num_labels always)
    """
    kind = CONFIG_MAPPING[model_type]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given: dict[str, Any] = {}
    for name, size in {**SIZES, **IDS}.items():
        if name in fields and (fields[name].default is not None or name in IDS or name in ALWAYS):
            given[name] = size
    parts = getattr(kind, "sub_configs", {})
    default = kind() if parts else None
    for name in parts:
        model_type_of = getattr(getattr(default, name, None), "model_type", "")
        if model_type_of in CONFIG_MAPPING:
            given[name] = tiny(model_type_of).to_dict()
    if "kv_lora_rank" in fields:  # latent attention has as many heads of keys and values
        given["num_key_value_heads"] = HEADS
    given |= {name: value for name, value in settings.items() if name in fields or name == "num_labels"}
    given |= OWN.get(model_type, {})
    return kind(**given)
