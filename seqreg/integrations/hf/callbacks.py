"""Callbacks of the trainers, around an optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from seqreg.errors import BadInput
from seqreg.selective_update import Update

if TYPE_CHECKING:
    from seqreg.integrations.hf.trainer import RegularizedTrainer


class CheckedStep(TrainerCallback):
    """Look at a step before it is made: the criterion must have computed its loss, of at least one label.

    A step without a label is skipped: the optimizer must not move by its momentum and weight decay alone.
    """

    def __init__(self, trainer: RegularizedTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.trainer.losses_of_step:
            name = type(self.trainer).__name__
            raise BadInput(f"{name}: a step was made without the criterion: compute_loss does not call super()'s")
        if self.trainer.unlearnable and self.trainer.accelerator.scaler is None:  # a scaler wants to see gradients
            for parameter in model.parameters():
                parameter.grad = None


class UpdateCallback(TrainerCallback):
    """Call an update before and after the optimizer's step."""

    def __init__(self, trainer: RegularizedTrainer, update: Update) -> None:
        self.trainer, self.update = trainer, update

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self.trainer.begin_update(self.update, train_dataloader)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.update.before(list(model.parameters()))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.update.after(list(model.parameters()))
