"""What a run says while it runs."""

from __future__ import annotations

import warnings
from typing import Any

import huggingface_hub
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

from seqreg.criterion import shown
from seqreg.workbench.untrusted import plain

console = Console(stderr=True, highlight=False, markup=False)
"""For everything that is not a result: standard output is for results."""


def say(text: str, style: str = "") -> None:
    """One line that stays one line, whatever is in it."""
    console.print(plain(text), style=style, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """The same for what a user should look at."""
    say(text, "yellow")


class Bars(TrainerCallback):
    """A bar for training, one for every evaluation, and the parts of the loss in a line.

    Args:
        score: what the score that decides between checkpoints is called
    """

    def __init__(self, score: str = "score") -> None:
        self.score = score
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}", style="dim", markup=False), console=console,
            disable=not console.is_terminal,
        )  # fmt: skip
        self.training: Any = None
        self.evaluating: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.progress.start()
            self.training = self.progress.add_task("training", total=state.max_steps, note="")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training is not None:
            self.progress.update(self.training, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.training is None or not logs or "loss" not in logs:
            return
        line = plain(shown(logs["loss"], logs))
        self.progress.update(self.training, note=line)
        if not console.is_terminal:
            console.print(f"  step {state.global_step:5d}  {line}")

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or eval_dataloader is None:
            return
        if self.evaluating is None:
            self.progress.start()
            self.evaluating = self.progress.add_task("evaluating", total=len(eval_dataloader), note="")
        self.progress.advance(self.evaluating)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self._evaluated()
        if self.training is not None and metrics and "eval_score" in metrics:
            console.print(f"  step {state.global_step:5d}  validation {self.score} {metrics['eval_score']:.2f}")

    def on_predict(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluated()
        if self.training is None:
            self.progress.stop()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training is not None:
            self.progress.remove_task(self.training)
            self.training = None
            self.progress.stop()

    def _evaluated(self) -> None:
        if self.evaluating is not None:
            self.progress.remove_task(self.evaluating)
            self.evaluating = None


def quiet() -> None:
    """No bars and notes of the libraries below; what matters is said by us."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    warnings.showwarning = _say


def _say(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as one line, without the code that it comes from."""
    console.print(f"seqreg: warning: {plain(message)}", soft_wrap=True)
