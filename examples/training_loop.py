"""A training loop of ten lines: a seq2seq model, R3F, and nothing else.

python examples/training_loop.py facebook/bart-base
"""

import sys

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from seqreg import Criterion
from seqreg.integrations.hf import context
from seqreg.terms.r3f import R3F

SOURCES = ["the cat sat on the mat and then it ran", "the dog ran over the hill and under the tree"]
TARGETS = ["the cat ran", "the dog ran over the hill"]


def main(name: str, steps: int = 5) -> list[float]:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    batch = tokenizer(SOURCES, text_target=TARGETS, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100

    criterion = Criterion(R3F(weight=0.1), label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    model.train()  # terms are off in evaluation mode, and from_pretrained returns a model in evaluation mode
    for step in range(steps):
        report = criterion(context(model, batch, step=step))
        report.total.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(report)
        losses.append(report.total.item())
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
