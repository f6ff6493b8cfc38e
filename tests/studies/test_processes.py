"""Commands that are forks of a process with all imports done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqreg.studies.common.processes import ForkedCommand
from tests.helpers.forked_process import TINY, weights


def test_exit_codes_and_output_are_those_of_the_command(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ForkedCommand(["show", "r3f"], log).wait() == 0
    assert "2008.03156" in log.read_text()
    assert ForkedCommand(["train", "quickstart", "sed=1"], log).wait() == 2
    assert log.read_text().endswith("seqreg: command line: sed=1: unknown key; did you mean 'seed'?\n")


def test_a_signal_ends_it_and_a_run_says_how_to_resume(tmp_path: Path) -> None:
    log, output = tmp_path / "log", tmp_path / "run"
    words = ["train", "quickstart", *TINY, "optimisation.max_steps=100000", f"output={output}"]
    command, end = ForkedCommand(words, log), time.monotonic() + 100
    while "training: step" not in (log.read_text() if log.exists() else "") and time.monotonic() < end:
        assert command.poll() is None
        time.sleep(0.05)
    command.terminate()
    assert command.wait() == 128 + signal.SIGTERM
    assert "run the same command to resume" in log.read_text()


def test_commands_are_forks_of_one_process_in_sessions_of_their_own(tmp_path: Path) -> None:
    words = ["train", "quickstart", *TINY, "optimisation.max_steps=100000"]
    commands = [ForkedCommand([*words, f"output={tmp_path / name}"], tmp_path / f"{name}.log") for name in "ab"]
    try:
        end = time.monotonic() + 100
        while not all((tmp_path / f"{name}.log").exists() for name in "ab") and time.monotonic() < end:
            time.sleep(0.01)
        numbers = [command.pid for command in commands]
        parents = {Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1] for number in numbers}
        assert len(parents) == 1
        assert parents != {str(os.getpid())}
        while any(os.getsid(number) != number for number in numbers) and time.monotonic() < end:
            time.sleep(0.01)
        assert [os.getsid(number) for number in numbers] == numbers
    finally:
        for command in commands:
            command.terminate()
            command.wait()


@pytest.mark.slow
def test_weights_are_those_of_a_command_of_its_own(tmp_path: Path) -> None:
    words = ["train", "quickstart", *TINY, "optimisation.max_steps=4", "--terms", "r3f"]
    assert ForkedCommand([*words, f"output={tmp_path / 'fork'}"], tmp_path / "log").wait() == 0
    subprocess.run([sys.executable, "-m", "seqreg", *words, f"output={tmp_path / 'own'}"], check=True)
    assert weights(tmp_path / "fork") == weights(tmp_path / "own")
