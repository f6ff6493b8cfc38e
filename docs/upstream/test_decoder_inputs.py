"""With label smoothing a seq2seq model is trained on its targets, also where the collator made no decoder inputs."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, BartConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
from transformers.trainer_pt_utils import LabelSmoother

SIZES = {"d_model": 16, "vocab_size": 40}
CONFIGS = {
    "bart": BartConfig(
        **SIZES, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16,
    ),
    "t5": T5Config(**SIZES, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_smoothed_loss_is_that_of_the_targets(kind, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS[kind]).eval()
    batch = {"input_ids": torch.randint(4, 40, (2, 6)), "labels": torch.randint(4, 40, (2, 6))}
    arguments = Seq2SeqTrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to="none", use_cpu=True)
    trainer = Seq2SeqTrainer(model, arguments)
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch))
        expected = LabelSmoother(epsilon=0.1)(model(**batch), batch["labels"])
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
