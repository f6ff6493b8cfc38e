"""A term of your own: a frozen dataclass whose fields are its settings.

python examples/own_term.py facebook/bart-base
"""

import sys
from dataclasses import dataclass

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from seqreg import Cost, Criterion, Evaluation, Term
from seqreg.integrations.hf import context


@dataclass(frozen=True, kw_only=True)
class ConfidencePenalty(Term):
    """The negative entropy of every prediction (Pereyra et al., arXiv 1701.06548): no extra pass."""

    weight: float = 0.1

    @property
    def cost(self) -> Cost:
        return Cost(forwards=0, backwards=0)

    def __call__(self, ctx: Evaluation) -> torch.Tensor:
        logp = ctx.clean.logits.log_softmax(-1)
        return ctx.reduce((logp.exp() * logp).sum(-1))  # the one reduction: padding and accumulation never count


def main(name: str, steps: int = 5) -> list[float]:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    batch = tokenizer(["the cat sat on the mat"], text_target=["the cat sat"], return_tensors="pt")
    criterion, optimizer = Criterion(ConfidencePenalty()), torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    model.train()
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
