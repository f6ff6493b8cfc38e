"""The models and batches that `python -m benchmarks steps` measure on: random weights, random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

Kind = Literal["seq2seq", "causal", "classifier"]


@dataclass(frozen=True)
class Size:
    """A model, and a batch for it.

    Args:
        layers: of the encoder and of the decoder; of the only stack where there is one
        classes: size of the vocabulary
        source: tokens of an example that have no label; of a classifier, all
        target: tokens of an example that have one
        together: processes that fit into 16 GB side by side
        kind: a BART, a Llama or a RoBERTa with three classes
        hidden: width inside the feed-forward blocks; four times the width by default
        key_heads: heads of keys and values of a Llama; as many as heads by default
        large: leave out what takes a quarter of an hour for a step
    """

    width: int
    layers: int
    heads: int
    classes: int
    source: int
    target: int
    rows: int
    together: int
    kind: Kind = "seq2seq"
    hidden: int | None = None
    key_heads: int | None = None
    large: bool = False

    def model(self) -> Any:
        torch.manual_seed(0)
        return {"seq2seq": self._bart, "causal": self._llama, "classifier": self._roberta}[self.kind]().train()

    def batch(self, padding: float = 0.0) -> dict[str, torch.Tensor]:
        """Random tokens.

        Args:
            padding: the share of the targets that is padding
        """
        drawn = torch.Generator().manual_seed(1)
        source, labels = (
            torch.randint(4, self.classes, (self.rows, length), generator=drawn)
            for length in (self.source, self.target)
        )
        labels[:, self.target - round(padding * self.target) :] = -100
        if self.kind == "causal":
            source = torch.cat([source, labels.clamp_min(0)], 1)
            labels = torch.cat([source[:, : self.source].new_full((self.rows, self.source), -100), labels], 1)
        if self.kind == "classifier":
            labels = torch.randint(3, (self.rows,), generator=drawn)
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": labels}

    @property
    def _ffn(self) -> int:
        return self.hidden or 4 * self.width

    def _bart(self) -> BartForConditionalGeneration:
        config = BartConfig(
            vocab_size=self.classes, d_model=self.width, max_position_embeddings=max(self.source, self.target),
            encoder_layers=self.layers, encoder_attention_heads=self.heads, encoder_ffn_dim=self._ffn,
            decoder_layers=self.layers, decoder_attention_heads=self.heads, decoder_ffn_dim=self._ffn,
            dropout=0.1, attention_dropout=0.0, activation_dropout=0.0,
        )  # fmt: skip
        return BartForConditionalGeneration(config)

    def _llama(self) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=self.classes, hidden_size=self.width, num_hidden_layers=self.layers, intermediate_size=self._ffn,
            num_attention_heads=self.heads, num_key_value_heads=self.key_heads or self.heads,
            max_position_embeddings=self.source + self.target, tie_word_embeddings=True,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def _roberta(self) -> RobertaForSequenceClassification:
        config = RobertaConfig(
            vocab_size=self.classes, hidden_size=self.width, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, intermediate_size=self._ffn, num_labels=3,
            max_position_embeddings=self.source + 2, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        return RobertaForSequenceClassification(config)


SIZES = {
    "tiny": Size(width=128, layers=3, heads=4, classes=2000, source=64, target=24, rows=4, together=8),
    "small": Size(width=256, layers=3, heads=4, classes=50265, source=128, target=48, rows=8, together=7),
    "long": Size(width=256, layers=6, heads=4, classes=50265, source=1024, target=64, rows=2, together=5),
    "bart-base": Size(
        width=768, layers=6, heads=12, classes=50265, source=256, target=64, rows=4, together=4, large=True
    ),
    "causal": Size(  # SmolLM-135M
        width=576, layers=30, heads=9, classes=49152, source=0, target=256, rows=2, together=4, large=True,
        kind="causal", hidden=1536, key_heads=3,
    ),
    "classifier": Size(  # RoBERTa-base
        width=768, layers=12, heads=12, classes=50265, source=128, target=0, rows=8, together=4, large=True,
        kind="classifier",
    ),
}  # fmt: skip
