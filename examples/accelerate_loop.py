"""Accelerate, with gradient accumulation that is exact: the gradient does not depend on how a batch is cut.

accelerate launch examples/accelerate_loop.py facebook/bart-base
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

from seqreg import Criterion
from seqreg.integrations.hf import optimizer_steps
from seqreg.terms.r3f import R3F

SOURCES = ["the cat sat on the mat and then it ran", "the dog ran over the hill", "a bird sang", "it was not a dog"]
TARGETS = ["the cat ran", "the dog ran over the hill", "a bird", "not a dog"]


def main(name: str, epochs: int = 3) -> list[float]:
    accelerator = Accelerator()
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    rows = [dict(tokenizer(source, text_target=target)) for source, target in zip(SOURCES, TARGETS, strict=True)]
    loader = DataLoader(rows, batch_size=1, collate_fn=DataCollatorForSeq2Seq(tokenizer, model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    criterion, losses, first = Criterion(R3F(weight=0.1)), [], 0
    model.train()
    for _ in range(epochs):
        for step, contexts in optimizer_steps(model, loader, 3, accelerator=accelerator, first=first):
            reports = []
            for ctx in contexts:  # three micro-batches, then what is left; their losses add up to that of the step
                reports.append(criterion(ctx))
                accelerator.backward(reports[-1].total)
            optimizer.step()
            optimizer.zero_grad()
            first = step + 1
        losses.append(sum(report.total.item() for report in reports))
        accelerator.print(f"step {step}: {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
