"""Sentence pairs and a contrastive loss: every first sentence must find its second among all of the batch.

python examples/sentence_pairs.py sentence-transformers/all-MiniLM-L6-v2
"""

import sys

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from seqreg import Criterion
from seqreg.integrations.module import loss_context
from seqreg.terms.r3f import R3F
from seqreg.terms.smart import SMART

PAIRS = [
    ("the cat sat on the mat", "a cat was on the mat"),
    ("the dog ran over the hill", "over the hill ran a dog"),
    ("the bird sang", "it was a bird and it sang"),
]


def contrastive(outputs: Tensor) -> Tensor:
    """InfoNCE: from [pairs, 2 * width] to one loss a pair, not averaged."""
    first, second = (functional.normalize(half, dim=-1) for half in outputs.chunk(2, -1))
    return functional.cross_entropy(first @ second.T / 0.05, torch.arange(len(first)), reduction="none")


def main(name: str, steps: int = 5) -> list[float]:
    model, tokenizer = AutoModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    texts = tokenizer([a for a, _ in PAIRS] + [b for _, b in PAIRS], padding=True, return_tensors="pt")

    def sentences() -> Tensor:
        """Both sentences of all pairs in one batch: the embedding is called once."""
        states, mask = model(**texts).last_hidden_state, texts["attention_mask"].unsqueeze(-1)
        pooled = (states * mask).sum(1) / mask.sum(1)
        return torch.cat(pooled.chunk(2), -1)  # [pairs, 2 * width]

    criterion = Criterion(  # outputs are numbers, not scores of classes: a divergence is the squared distance
        R3F(weight=0.1, scale=0.1, relative=True, divergence="mse"), SMART(weight=0.1, inner="mse", divergence="mse")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    model.train()
    for step in range(steps):
        ctx = loss_context(
            model,
            sentences,
            contrastive,
            mask=torch.ones(len(PAIRS)),
            embedding=model.get_input_embeddings(),
            token_mask=texts["attention_mask"],
            step=step,
        )
        report = criterion(ctx)
        report.total.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(report)
        losses.append(report.total.item())
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
