"""A head and a loss of your own, in a Trainer: a score of every text, by the Huber loss.

python examples/own_head.py FacebookAI/roberta-base
"""

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

from seqreg import Context, Criterion, attach
from seqreg.integrations.module import loss_context
from seqreg.terms.r3f import R3F

TEXTS, SCORES = ["the cat sat on the mat", "the dog ran", "it was not a bird"], [1.0, 0.2, -0.7]


class Scorer(nn.Module):
    """An encoder of transformers below two layers of one's own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(name)
        width = self.encoder.config.hidden_size
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, scores: Tensor | None = None) -> Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(states[:, 0])  # type: ignore[no-any-return]


def build_context(model: Any, batch: Any, **options: Any) -> Context:
    """What a Trainer asks for: the context of one batch; `options` are the step, and what the step averages over."""
    inner = getattr(model, "module", model)  # inside DistributedDataParallel
    return loss_context(
        model,
        lambda: model(**batch),
        lambda outputs: functional.huber_loss(outputs.squeeze(-1), batch["scores"], reduction="none"),
        mask=torch.ones_like(batch["scores"]),
        embedding=inner.encoder.get_input_embeddings(),
        token_mask=batch["attention_mask"],
        **options,
    )


def main(name: str, steps: int = 5) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = [{**tokenizer(text), "scores": score} for text, score in zip(TEXTS, SCORES, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no"
        )
        collate = DataCollatorWithPadding(tokenizer)
        trainer = Trainer(Scorer(name), arguments, data_collator=collate, train_dataset=rows)
        term = R3F(weight=0.1, scale=0.1, relative=True, divergence="mse")
        attach(trainer, Criterion(term), build_context=build_context)
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    main(*sys.argv[1:2])
