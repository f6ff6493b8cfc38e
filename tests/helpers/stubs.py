"""A model-free Forward, and terms that exist only in tests."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from seqreg import Forward, Pass, PassRequest, PerturbationSite


class Played(Forward):
    """Plays back given logits, pass after pass."""

    def __init__(self, *logits: Tensor, embeds: Tensor | None = None) -> None:
        self.logits, self.passes = logits, 0
        self.module, self.sites, self.embeds = nn.Module(), {"encoder": PerturbationSite()}, embeds

    def run(self, request: PassRequest) -> Pass:
        self.passes += 1
        embeds: dict[Any, Tensor] = {} if self.embeds is None else {("encoder", "embedding"): self.embeds}
        return Pass(self.logits[self.passes - 1], embeds)
