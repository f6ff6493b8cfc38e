"""Running means of the parts of the loss, for the log."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from seqreg.criterion import Criterion, LossReport


class Window:
    """Parts of the loss since the last log, weighted exactly as the Trainer's own `loss`, so that they add up."""

    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion
        self.sums: dict[str, Tensor] = {}
        self.steps: dict[str, float] = defaultdict(float)

    def add(self, report: LossReport, share: float) -> None:
        """Add one micro-batch, which is `share` of an optimizer step."""
        for prefix, numbers in (("part", report.parts), ("task", report.tasks), ("value", report.values)):
            for name, number in numbers.items():
                key = f"{prefix}/{name}"
                self.sums[key] = self.sums.get(key, torch.zeros_like(number)) + number
                self.steps[key] += share
        for name, weight in report.weights.items():
            key = f"weight/{name}"
            self.sums[key] = self.sums.get(key, torch.tensor(0.0)) + weight * share
        self.steps["all"] += share

    def flush(self, accelerator: Any) -> dict[str, float]:
        """Means over the window and over the ranks: parts and weights over all steps, values over active ones."""
        names = [term.name for term in self.criterion.terms]
        kinds = ("part", "task", "value", "weight")
        fixed = ["part/base", "part/aux_loss", "value/nll"]
        keys = [*fixed, *(f"{kind}/{name}" for name in names for kind in kinds)]
        keys = [f"{key}{stream}" for key in keys for stream in ("", ".replay", ".unlabelled")]
        keys = [key for key in keys if key in self.sums]
        if not keys:
            return {}
        steps = [self.steps[key] if key.startswith("value/") else self.steps["all"] for key in keys]
        means = torch.stack([self.sums[key].float().to(accelerator.device) for key in keys])
        means = accelerator.reduce(means / torch.tensor(steps, device=accelerator.device), "mean")
        self.sums, self.steps = {}, defaultdict(float)
        return dict(zip(keys, means.tolist(), strict=True))
