"""Count the floating-point operations of one training step with each term, against the same step without.

    python tools/cost.py

Exact, and the same on every machine: a BART of 3 + 3 layers, d = 128, a vocabulary of 2000, dropout 0.1.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BartConfig, BartForConditionalGeneration

from seqreg import Criterion, build_term
from seqreg.build import term_names
from seqreg.integrations.hf import context


def step_flops(*names: str) -> int:
    """Of one forward and backward with these terms."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=2000, d_model=128, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_position_embeddings=128,
        attn_implementation="eager",
    )  # fmt: skip
    model = BartForConditionalGeneration(config).train()
    batch = {
        "input_ids": torch.randint(4, 2000, (4, 64)),
        "attention_mask": torch.ones(4, 64, dtype=torch.long),
        "labels": torch.randint(4, 2000, (4, 24)),
    }
    with FlopCounterMode(display=False) as counter:
        Criterion(*map(build_term, names), label_smoothing=0.1)(context(model, batch, step=0)).total.backward()
    return int(counter.get_total_flops())


def ratios() -> dict[str, float]:
    """The step with each term over the step without."""
    plain = step_flops()
    return {name: step_flops(name) / plain for name in term_names()}


if __name__ == "__main__":
    for name, ratio in ratios().items():
        print(f"{name:10s} {ratio:.2f}x")
