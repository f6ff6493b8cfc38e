"""Trainings that many tests look at."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.interrupted_runs import SETTINGS, killed_at, log, same


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert same(folder, "checkpoints.save_total_limit=9").wait() == 0, log(folder)
    return folder


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training, killed when it had the checkpoints of steps 2, 4 and 6."""
    return killed_at(tmp_path_factory.mktemp("stopped") / "run", 6, *SETTINGS, "checkpoints.save_total_limit=9")


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))
