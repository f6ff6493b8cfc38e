"""Runs that are disturbed, and what is left of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from tests import faults
from tests.helpers import forked_process

TERMS, SETTINGS = faults.TERMS, faults.SETTINGS
TIMES = ("seconds", "runtime", "per_second")


def log(folder: Path) -> str:
    """Everything that the run in a folder has printed, on one line."""
    path = folder.with_suffix(".log")
    return " ".join(path.read_text().split()) if path.exists() else ""


def same(folder: Path, *further: str, terms: tuple[str, ...] = TERMS) -> forked_process.Command:
    return forked_process.train(folder, *SETTINGS, *further, terms=terms)


def killed_at(folder: Path, step: int, *settings: str, terms: tuple[str, ...] = TERMS) -> Path:
    """A run that was killed, by SIGKILL, as soon as it had the checkpoint of a step."""
    command = forked_process.train(folder, *settings, terms=terms)
    assert command.until((folder / f"checkpoint-{step}").exists), log(folder)
    assert command.kill() == -signal.SIGKILL
    return folder


def numbers(found: Any) -> Any:
    """The same without what depends on the clock and on the run's name."""
    if isinstance(found, dict):
        kept = {key: value for key, value in found.items() if not key.endswith(TIMES)}
        return {key: numbers(value) for key, value in kept.items() if key != "best_model_checkpoint"}
    return [numbers(one) for one in found] if isinstance(found, list) else found


def metrics(folder: Path) -> Any:
    return numbers(json.loads((folder / "metrics.json").read_text()))


def history(folder: Path, step: int) -> Any:
    return numbers(json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"])


def one_line(command: forked_process.Command, *pieces: str) -> None:
    lines = [line for line in command.log.read_text().splitlines() if line.startswith("seqreg: ")]
    lines = [line for line in lines if not line.startswith("seqreg: warning: ")]
    assert len(lines) == 1, command.text()
    assert all(piece in lines[0] for piece in pieces), lines[0]
    assert "Traceback" not in command.text()
