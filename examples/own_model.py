"""A model that is not of transformers: a `Forward` runs it, and says where its embeddings can be perturbed.

python examples/own_model.py
"""

import torch
from torch import Tensor, nn

from seqreg import Context, Criterion, Forward, Pass, PassRequest, PerturbationSite
from seqreg.terms.r3f import R3F
from seqreg.terms.smart import SMART


class Tagger(nn.Module):
    """A tag for every token."""

    def __init__(self, words: int = 100, width: int = 32, tags: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(2 * width, tags)

    def forward(self, embeds: Tensor) -> Tensor:
        scores: Tensor = self.head(self.dropout(self.lstm(embeds)[0]))
        return scores


class TaggerForward(Forward):
    """All that seqreg has to know: how to run the model with changed embeddings."""

    def __init__(self, model: Tagger, tokens: Tensor) -> None:
        self.module, self.tokens = model, tokens
        self.sites = {"encoder": PerturbationSite(mask=tokens != 0)}  # True on real tokens

    def run(self, request: PassRequest) -> Pass:
        embeds = self.module.embedding(self.tokens)
        for shift in request.shifts:
            delta = shift.delta["encoder"]
            embeds = embeds + (delta(embeds) if callable(delta) else delta)
        return Pass(self.module(embeds), {("encoder", "embedding"): embeds})


def main(steps: int = 5) -> list[float]:
    torch.manual_seed(0)
    tokens, tags = torch.randint(1, 100, (8, 10)), torch.randint(0, 5, (8, 10))
    tokens[:, 7:], tags[:, 7:] = 0, -100  # padding
    model = Tagger()
    criterion = Criterion(R3F(weight=0.5, scale=0.1), SMART(weight=0.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        report = criterion(Context(TaggerForward(model, tokens), tags, kind="tokens", step=step))
        report.total.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(report)
        losses.append(report.total.item())
    return losses


if __name__ == "__main__":
    main()
