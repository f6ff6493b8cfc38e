"""Accelerate for the data and the processes, FSDP2 for the weights, on CPUs and GPUs.

torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py facebook/bart-base
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

from seqreg import Criterion
from seqreg.integrations.hf import optimizer_steps, shard
from seqreg.terms.r3f import R3F

SOURCES = ["the cat sat on the mat and then it ran", "the dog ran over the hill", "a bird sang", "it was not a dog"]
TARGETS = ["the cat ran", "the dog ran over the hill", "a bird", "not a dog"]


def main(name: str, epochs: int = 3) -> list[float]:
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())  # explicit, or processes on CPUs are no group
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    model = shard(model.to(accelerator.device))  # not `prepare`, which takes DDP for FSDP on CPUs
    rows = [dict(tokenizer(source, text_target=target)) for source, target in zip(SOURCES, TARGETS, strict=True)]
    loader = accelerator.prepare(DataLoader(rows, batch_size=1, collate_fn=DataCollatorForSeq2Seq(tokenizer, model)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    criterion, losses, first = Criterion(R3F(weight=0.1)), [], 0
    model.train()
    for _ in range(epochs):
        for step, contexts in optimizer_steps(model, loader, 2, accelerator=accelerator, first=first):
            total = torch.zeros((), device=accelerator.device)
            for ctx in contexts:
                report = criterion(ctx)
                report.total.backward()
                total += report.total.detach()
            optimizer.step()
            optimizer.zero_grad()
            first = step + 1
        losses.append(float(accelerator.reduce(total, "mean")))  # every rank has its share of the loss, times the ranks
        accelerator.print(f"step {step}: {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
