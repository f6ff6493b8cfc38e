"""One optimizer step of a seq2seq model has the same loss and gradient however it is cut into micro-batches."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, BartConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config

SIZES = {"d_model": 16, "vocab_size": 40}
CONFIGS = {
    "bart": BartConfig(
        **SIZES, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0,
    ),
    "t5": T5Config(**SIZES, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0),
}  # fmt: skip


def one_step(config, folder, batch, cuts):
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    rows = [{"input_ids": torch.arange(4, 10) + row, "labels": torch.arange(4, 12) + row} for row in range(8)]
    for row in range(8):
        rows[row]["labels"][row + 1 :] = -100
    arguments = Seq2SeqTrainingArguments(
        folder, per_device_train_batch_size=batch, gradient_accumulation_steps=cuts, max_steps=1, logging_steps=1,
        learning_rate=0.0, report_to="none", use_cpu=True, save_strategy="no",
    )  # fmt: skip
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows)
    trainer.train()
    log = trainer.state.log_history[0]
    return log["loss"], float(log["grad_norm"])


@pytest.mark.parametrize("kind", CONFIGS)
def test_accumulation_keeps_loss_and_gradient(kind, tmp_path):
    whole = one_step(CONFIGS[kind], tmp_path, batch=8, cuts=1)
    cut = one_step(CONFIGS[kind], tmp_path, batch=2, cuts=4)
    assert cut == pytest.approx(whole, rel=1e-4)
