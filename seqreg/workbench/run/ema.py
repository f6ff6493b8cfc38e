"""The exponential moving average of a run's weights: kept while it trains, saved beside its model."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from seqreg.errors import BadInput
from seqreg.overrides import KEPT, Memory, MovingAverage, trained

FILE = "ema.safetensors"
_OWNER = "optimisation.ema_decay"


class WeightEMA:
    """average <- d * average + (1 - d) * weights after every optimizer step, with d = min(decay, (1 + t) / (10 + t)).

    The bound makes the average forget the start at any length of a run: its window is about a tenth of the steps made,
    until it is that of `decay`. It draws no random number and changes no weight.
    """

    def __init__(self, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.memory: Memory = {}

    def begin(self, model: nn.Module, checkpoint: Path | None) -> None:
        """Start from the weights as they are, or from what a checkpoint holds."""
        self.memory, self.updates = {}, 0
        if checkpoint is not None:
            if not (checkpoint / FILE).is_file():
                raise BadInput(f"{checkpoint / FILE} is missing: {_OWNER} cannot be resumed without it")
            self.memory = {_OWNER: safetensors.torch.load_file(checkpoint / FILE)}
            self.updates = int(self.memory[_OWNER]["updates"])
        self._average(model)

    def update(self, model: nn.Module) -> None:
        """Count one optimizer step in."""
        self.updates += 1
        self._average(model)

    def _average(self, model: nn.Module) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        MovingAverage(decay, decay)(self.memory, _OWNER, trained(model), self.updates, module=model)

    def save(self, folder: Path) -> None:
        state = {key: value.contiguous() for key, value in self.memory[_OWNER].items()}
        safetensors.torch.save_file(state, folder / FILE)


def load(folder: Path) -> tuple[dict[str, Tensor], int]:
    """The average in the folder of a run or of a checkpoint, and the steps that are in it."""
    state = safetensors.torch.load_file(folder / FILE)
    average = {key.removeprefix(KEPT): value for key, value in state.items() if key.startswith(KEPT)}
    return average, int(state["updates"])
