"""Terms of your own: frozen dataclasses whose fields are their settings. One has no pass, one an adversarial one.

python examples/own_term.py facebook/bart-base
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from seqreg import Ascent, Consistency, Cost, Criterion, Evaluation, Pass, Passes, Term
from seqreg.integrations.hf import context
from seqreg.objective import BaseLoss


@dataclass(frozen=True, kw_only=True)
class ConfidencePenalty(Term):
    """The negative entropy of every prediction (Pereyra et al., arXiv 1701.06548): no extra pass."""

    weight: float = 0.1

    @property
    def cost(self) -> Cost:
        return Cost(forwards=0, backwards=0)

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> torch.Tensor:
        logp = ctx.clean.logits.log_softmax(-1)
        return ctx.reduce((logp.exp() * logp).sum(-1))  # the one reduction: padding and accumulation never count


@dataclass(frozen=True, kw_only=True)
class WorstCase(Term):
    """The output should be the same at a nearby input where the task loss is high: one adversarial pass."""

    weight: float = 0.1
    attack: Ascent = Ascent(radius=0.05, step_size=0.05)  # in YAML: attack: {steps: 2}

    @property
    def cost(self) -> Cost:
        return Cost(forwards=self.attack.steps + 1, backwards=self.attack.steps + 1)

    def declare(self, ctx: Evaluation) -> Passes:
        return Passes(self.attack.extra_pass(ctx, lambda view: BaseLoss(view).sum(ctx, ctx.mask)))

    def loss(self, ctx: Evaluation, passes: Sequence[Pass]) -> Consistency:
        return Consistency(ctx.clean, passes[0])


def main(name: str, steps: int = 5) -> list[float]:
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    batch = tokenizer(["the cat sat on the mat"], text_target=["the cat sat"], return_tensors="pt")
    criterion, optimizer = Criterion(ConfidencePenalty(), WorstCase()), torch.optim.AdamW(model.parameters(), lr=1e-3)
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
