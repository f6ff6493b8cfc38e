"""The exponential moving average of a run's weights: kept while it trains, saved beside its model."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from seqreg.errors import BadInput
from seqreg.weight_average import float_copies, is_average_of, trained_parameters, update_average

FILE = "ema.safetensors"
_UPDATES = "#updates"


class WeightEMA:
    """average <- d * average + (1 - d) * weights after every optimizer step, with d = min(decay, (1 + t) / (10 + t)).

    The bound makes the average forget the start at any length of a run: its window is about a tenth of the steps made,
    until it is that of `decay`. It draws no random number and changes no weight.
    """

    def __init__(self, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.average: dict[str, Tensor] = {}

    def begin(self, model: nn.Module, checkpoint: Path | None) -> None:
        """Start from the weights as they are, or from what a checkpoint holds."""
        if checkpoint is None:
            self.average, self.updates = float_copies(trained_parameters(model)), 0
            return
        if not (checkpoint / FILE).is_file():
            raise BadInput(f"{checkpoint / FILE} is missing: optimisation.ema_decay cannot be resumed without it")
        self.average, self.updates = load(checkpoint)
        if not is_average_of(self.average, trained_parameters(model)):
            raise BadInput(f"{checkpoint / FILE}: the average of another model")

    def update(self, model: nn.Module) -> None:
        """Count one optimizer step in."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        update_average(self.average, trained_parameters(model), decay)

    def save(self, folder: Path) -> None:
        state = {**self.average, _UPDATES: torch.tensor(self.updates)}
        safetensors.torch.save_file({key: value.contiguous() for key, value in state.items()}, folder / FILE)


def load(folder: Path) -> tuple[dict[str, Tensor], int]:
    """The average in the folder of a run or of a checkpoint, and the steps that are in it."""
    average = safetensors.torch.load_file(folder / FILE)
    return average, int(average.pop(_UPDATES))
