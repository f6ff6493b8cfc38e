"""Tiny random models of every architecture that seqreg promises to work with, and padded batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

VOCAB, PAD, BOS, EOS = 48, 1, 0, 2
_ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_bart = dict(
    vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, **_ids,
)  # fmt: skip
_bert = dict(
    vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=64, **_ids,
)  # fmt: skip
_t5: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2,
    pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
)  # fmt: skip


def _seq2seq(config: type, model: type, **settings: Any) -> Callable[..., Any]:
    return lambda **extra: model(config(**{**_bart, "decoder_start_token_id": EOS, **settings, **extra}))


def _encoder(config: type, model: type, **settings: Any) -> Callable[..., Any]:
    return lambda **extra: model(config(**{**_bert, "num_labels": 3, **settings, **extra}))


def _prophetnet(**extra: Any) -> Any:
    dropout = extra.pop("dropout", 0.1)
    return hf.ProphetNetForConditionalGeneration(
        hf.ProphetNetConfig(
            vocab_size=VOCAB, hidden_size=16, num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=2,
            num_decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, ngram=2,
            num_buckets=8, relative_max_distance=16, decoder_start_token_id=EOS, dropout=dropout,
            attention_dropout=dropout, activation_dropout=dropout, **{"disable_ngram_loss": True, **_ids, **extra},
        )
    )  # fmt: skip


def _bert2bert(**extra: Any) -> Any:
    encoder = hf.BertConfig(**_bert, **extra)
    decoder = hf.BertConfig(**_bert, **extra, is_decoder=True, add_cross_attention=True)
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = BOS, PAD, EOS
    return hf.EncoderDecoderModel(config)


def _decoder(config: type, model: type, **settings: Any) -> Callable[..., Any]:
    return lambda **extra: model(config(**{"vocab_size": VOCAB, **_ids, **settings, **extra}))


SEQ2SEQ: dict[str, Callable[..., Any]] = {
    "bart": _seq2seq(hf.BartConfig, hf.BartForConditionalGeneration),
    "mbart": _seq2seq(hf.MBartConfig, hf.MBartForConditionalGeneration, scale_embedding=True),
    "pegasus": _seq2seq(hf.PegasusConfig, hf.PegasusForConditionalGeneration, scale_embedding=True),
    "marian": _seq2seq(hf.MarianConfig, hf.MarianMTModel, scale_embedding=True, decoder_vocab_size=VOCAB),
    "t5": lambda **extra: hf.T5ForConditionalGeneration(hf.T5Config(**{**_t5, **extra})),
    "led": _seq2seq(
        hf.LEDConfig, hf.LEDForConditionalGeneration, attention_window=[4], max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "prophetnet": _prophetnet,
    "m2m100": _seq2seq(  # its default layerdrop of 0.05 is a case of its own
        hf.M2M100Config, hf.M2M100ForConditionalGeneration, scale_embedding=True, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    "bert2bert": _bert2bert,
}  # fmt: skip
CLASSIFIERS: dict[str, Callable[..., Any]] = {
    "roberta": _encoder(hf.RobertaConfig, hf.RobertaForSequenceClassification, max_position_embeddings=66),
    "xlm_r": _encoder(hf.XLMRobertaConfig, hf.XLMRobertaForSequenceClassification, max_position_embeddings=66),
    "bert": _encoder(hf.BertConfig, hf.BertForSequenceClassification),
    "deberta_v2": _encoder(
        hf.DebertaV2Config, hf.DebertaV2ForSequenceClassification, relative_attention=True, max_relative_positions=16,
        pos_att_type=["p2c", "c2p"], pooler_hidden_size=16,
    ),
    "electra": _encoder(hf.ElectraConfig, hf.ElectraForSequenceClassification, embedding_size=16),
    "modernbert": _encoder(
        hf.ModernBertConfig, hf.ModernBertForSequenceClassification, cls_token_id=BOS, sep_token_id=EOS,
        local_attention=8, global_attn_every_n_layers=1, attention_dropout=0.1, embedding_dropout=0.1,
    ),
    "bart_classifier": _seq2seq(hf.BartConfig, hf.BartForSequenceClassification, num_labels=3),
    "t5_classifier": lambda **extra: hf.T5ForSequenceClassification(hf.T5Config(**{**_t5, "num_labels": 3, **extra})),
}  # fmt: skip
CAUSAL: dict[str, Callable[..., Any]] = {
    "opt": _decoder(
        hf.OPTConfig, hf.OPTForCausalLM, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    ),
    "llama": _decoder(
        hf.LlamaConfig, hf.LlamaForCausalLM, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, attention_dropout=0.1,
    ),
    "gpt2": _decoder(hf.GPT2Config, hf.GPT2LMHeadModel, n_embd=16, n_layer=1, n_head=2, n_positions=64),
}  # fmt: skip
MODELS = {**SEQ2SEQ, **CLASSIFIERS, **CAUSAL}
SCALED = ("mbart", "pegasus", "marian", "m2m100")


def make(name: str, *, seed: int = 0, spread: float = 4.0, **extra: Any) -> Any:
    """A model in training mode whose weights are enlarged, so that its outputs depend on its inputs."""
    torch.manual_seed(seed)
    model = MODELS[name](**extra)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    return model.train()


def dropout_off(model: Any) -> Any:
    """The model in training mode with every dropout probability 0."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", module)):  # ProphetNet reads its configuration while it runs
            for key, value in list(vars(owner).items()):
                if "drop" in key and isinstance(value, float):
                    setattr(owner, key, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def batch(name: str, *, rows: int = 3, pad: int = 0, seed: int = 1) -> dict[str, Tensor]:
    """Rows of unequal length; `pad` further columns of padding on source and labels change nothing that counts."""
    generator = torch.Generator().manual_seed(seed)
    t5 = name.startswith("t5")
    padding, eos = (0, 1) if t5 else (PAD, EOS)
    lengths = [8 - 2 * (row % 3) for row in range(rows)]
    ids = torch.full((rows, 8 + pad), padding)
    mask = torch.zeros(rows, 8 + pad, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(4, VOCAB, (length,), generator=generator)
        ids[row, length - 1] = eos
        mask[row, :length] = 1
    result = {"input_ids": ids, "attention_mask": mask}
    if name in CLASSIFIERS:
        result["labels"] = torch.arange(rows) % 3
    elif name in CAUSAL:
        result["labels"] = ids.masked_fill(mask == 0, -100)
    else:
        own = name == "prophetnet"  # every logit of ProphetNet depends on the width of the target, mask or no mask
        labels = torch.full((rows, 6 if own else 6 + pad), -100)
        for row in range(rows):
            length = 6 - row % 3
            labels[row, :length] = torch.randint(4, VOCAB, (length,), generator=generator)
            labels[row, length - 1] = eos
        result["labels"] = labels
    return result
