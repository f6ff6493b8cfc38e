"""A sample of `python -m tests.nightly.kills`: commands that are killed at a file operation, and run again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_killed_command_is_finished_by_the_same_command() -> None:
    """In a process of its own, whose forks import nothing."""
    words = ["-m", "tests.nightly.kills", "--most", "3", "predict", "export", "soup --overwrite", "new-task"]
    result = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    said = result.stdout.splitlines()[-1]
    assert re.fullmatch(r"(1[0-9]) kills: 0 stuck, 0 lost, 0 foreign files touched", said), result.stdout
    assert result.returncode == 0
