"""Progress of a run: bars on a terminal; elsewhere lines, with percentage, rate and time left."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn
from rich.text import Text
from transformers import TrainerCallback

from seqreg.criterion import shown
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import console

SECONDS = 30.0
"""Where there is no terminal, at most this often a line that says nothing but how far it is."""


def pace(done: float, total: float | None, seconds: float, unit: str) -> str:
    """Rate and time left, of what is `done` since it was begun so many `seconds` ago.

    >>> pace(20, 120, 10, "step"), pace(1, 3, 10, "batch"), pace(5, None, 1, "example"), pace(0, 3, 1, "step")
    ('2 step/s, 0:00:50 left', '10 s/batch, 0:00:20 left', '5 example/s', '')
    """
    if done <= 0 or seconds <= 0:
        return ""
    rate = done / seconds
    shown = f"{rate:.3g} {unit}/s" if rate >= 1 else f"{1 / rate:.3g} s/{unit}"
    if total is None or done >= total:
        return shown
    return f"{shown}, {timedelta(seconds=round((total - done) / rate))} left"


def columns() -> tuple[ProgressColumn, ...]:
    """What, a bar, percentage, count, rate and time left."""
    return (
        TextColumn("{task.description}"), BarColumn(None), TaskProgressColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}", markup=False),
    )  # fmt: skip


class Bar:
    """A progress bar for one piece of work.

    Args:
        what: a word for it, such as "training"
        unit: what is counted, such as "step"
        begun: how much was done before
        progress: to be shown in, on a terminal
    """

    def __init__(self, progress: Progress, what: str, total: int | None, unit: str, begun: int = 0) -> None:
        self.progress, self.what, self.total, self.unit = progress, what, total, unit
        self.begun = self.done = begun
        self.start = self.reported = time.monotonic()
        self.task = progress.add_task(what, total=total, completed=begun, pace="")

    @property
    def pace(self) -> str:
        left = None if self.total is None else self.total - self.begun
        return pace(self.done - self.begun, left, time.monotonic() - self.start, self.unit)

    def at(self, done: int) -> None:
        """So much is done now."""
        self.done = done
        self.progress.update(self.task, completed=done, pace=self.pace)
        if not console.is_terminal and time.monotonic() - self.reported > SECONDS:
            self.say()

    def say(self, note: str = "") -> None:
        """A line about how far it is."""
        self.reported = time.monotonic()
        share = f" of {self.total} ({self.done / self.total:.0%})" if self.total else ""
        words = [f"  {self.what}: {self.unit} {self.done}{share}", note, self.pace]
        console.print("  ".join(word for word in words if word), soft_wrap=True)

    def end(self) -> None:
        self.progress.remove_task(self.task)


class _NotedProgress(Progress):
    """Bars above a line of text."""

    note = ""

    def get_renderables(self) -> Any:
        yield self.make_tasks_table(self.tasks)
        if self.note and self.tasks:
            line: RenderableType = Text(f"  {self.note}", style="dim", no_wrap=True, overflow="ellipsis")
            yield line


class Bars(TrainerCallback):
    """A bar for training, one for every evaluation, and the parts of the loss in a line.

    Args:
        score: what the score that decides between checkpoints is called
    """

    def __init__(self, score: str = "score") -> None:
        self.score = score
        self.progress = _NotedProgress(*columns(), console=console, disable=not console.is_terminal, transient=True)
        self.training: Bar | None = None
        self.evaluating: Bar | None = None
        self.reported = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.progress.start()
            self.training = Bar(self.progress, "training", state.max_steps, "step", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training is not None:
            self.training.at(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.training is None or not logs:
            return
        if "train_loss" in logs and not self.reported:  # shorter than logging.logging_steps
            self.training.say(f"loss {logs['train_loss']:.4g} on average")
        if "loss" in logs:
            self.reported, self.progress.note = True, plain(shown(logs["loss"], logs))
            if not console.is_terminal:
                self.training.say(self.progress.note)

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero or eval_dataloader is None:
            return
        if self.evaluating is None:
            self.progress.start()
            self.evaluating = Bar(self.progress, "evaluating", len(eval_dataloader), "batch", 1)  # the first is done
        else:
            self.evaluating.at(self.evaluating.done + 1)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self._evaluated()
        if self.training is not None and metrics and "eval_score" in metrics:
            console.print(f"  step {state.global_step}  validation {self.score} {metrics['eval_score']:.2f}")

    def on_predict(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluated()
        if self.training is None:
            self.progress.stop()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.training is not None:
            if console.is_terminal:  # what stays when the bar is gone
                self.training.say(self.progress.note)
            self.training.end()
            self.training = None
            self.progress.stop()

    def _evaluated(self) -> None:
        if self.evaluating is not None:
            if self.training is not None:  # whose rate is that of its steps
                self.training.start += time.monotonic() - self.evaluating.start
                self.training.reported = time.monotonic()
            self.evaluating.end()
            self.evaluating = None
