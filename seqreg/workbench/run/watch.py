"""When a training looks up from its work: for signals, and for the time."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from seqreg.errors import Interrupted


def stopped_at(step: int) -> str:
    """What a user is told whose run was stopped with a checkpoint."""
    return f"stopped at step {step} with everything saved: the same command goes on from there"


class Watch(TrainerCallback):
    """Looks up from the work after every step and every batch of an evaluation."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.began = (0.0, 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.restore()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = (time.process_time(), time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        trainer.cpu_seconds += time.process_time() - self.began[0]
        trainer.step_seconds += time.perf_counter() - self.began[1]
        if state.global_step >= state.max_steps:
            control.should_log = True  # also what is left since the last of `logging.logging_steps`
        if trainer.stopping():
            trainer._owed, control.should_evaluate = control.should_evaluate, False
            control.should_save = control.should_training_stop = True
        elif trainer.health.streak:
            control.should_save = False  # the last good checkpoint is not pushed out in bad times
        elif trainer.due():
            control.should_save = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.stopping():
            raise Interrupted(self.trainer.signals.received or 15, "stopped in an evaluation: the same command goes on")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer.stopping():
            raise Interrupted(self.trainer.signals.received or 15, stopped_at(state.global_step))
