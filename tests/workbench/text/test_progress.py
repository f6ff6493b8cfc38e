"""What a run shows while it runs."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from seqreg.workbench.text import progress


def trained(monkeypatch: pytest.MonkeyPatch, *, terminal: bool, steps: int = 40, first: int = 0) -> str:
    """What is shown of a run of so many steps that logs every tenth, is evaluated once, and takes no time."""
    text, now = io.StringIO(), [0.0]
    shown = Console(file=text, force_terminal=terminal, width=100, color_system=None)
    monkeypatch.setattr(progress, "console", shown)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bars, args, control = progress.Bars(), SimpleNamespace(), SimpleNamespace()
    state = SimpleNamespace(is_world_process_zero=True, max_steps=steps, global_step=first)
    bars.on_train_begin(args, state, control)
    for step in range(first + 1, steps + 1):
        now[0] += 0.5
        state.global_step = step
        bars.on_step_end(args, state, control)
        if step % 10 == 0:
            bars.on_log(args, state, control, {"loss": 3.89112, "part/base": 3.8896, "part/smart": 2.131e-6})
            bars.progress.refresh()
        if step == 20:
            for _ in range(4):
                now[0] += 20
                bars.on_prediction_step(args, state, control, eval_dataloader=[0] * 4)
                bars.progress.refresh()
            bars.on_evaluate(args, state, control, {"eval_score": 12.5})
    bars.on_train_end(args, state, control)
    return text.getvalue()


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = trained(monkeypatch, terminal=False).splitlines()
    assert lines[0] == (
        "  training: step 10 of 40 (25%)  loss 3.891 = base 3.89 + smart 2.131e-06  2 step/s, 0:00:15 left"
    )
    assert "  evaluating: batch 3 of 4 (75%)  20 s/batch, 0:00:20 left" in lines, "a line in half a minute"
    assert "  evaluating: batch 2 of 4 (50%)  20 s/batch, 0:00:40 left" not in lines
    assert "  step 20  validation score 12.50" in lines
    assert lines[-1].startswith("  training: step 40 of 40 (100%)  loss 3.891")
    assert not lines[-1].endswith("left")
    assert [line.split()[0] for line in lines] == [*["training:"] * 2, "evaluating:", "step", *["training:"] * 2]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = trained(monkeypatch, terminal=True)
    assert re.search(r"training ━.*25% 10/40 +2 step/s, 0:00:15 left", text)
    assert "  loss 3.891 = base 3.89 + smart 2.131e-06" in text
    assert re.search(r"evaluating ━.*75% +3/4 +20 s/batch, 0:00:20 left", text)
    assert "training: step 40 of 40 (100%)  loss 3.891" in text


def test_a_resumed_training_is_timed_from_where_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = trained(monkeypatch, terminal=False, steps=130, first=100).splitlines()
    assert lines[0].startswith("  training: step 110 of 130 (85%)")
    assert lines[0].endswith("2 step/s, 0:00:10 left")


def test_a_short_training_shows_its_parts(tmp_path: Path) -> None:
    from seqreg.workbench.config import run_config
    from seqreg.workbench.run import train

    settings: list[Any] = ["optimisation.max_steps=7", "optimisation.warmup_steps=1", "logging.logging_steps=50"]
    run = run_config.resolve("quickstart", overrides=settings)
    assert train.arguments(run.config, tmp_path, seq2seq=True).logging_steps == 7
