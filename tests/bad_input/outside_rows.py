"""The machine around a run: disks, signals, the network, the locale. Most cases are tests of their own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from seqreg.cli import predict
from tests.bad_input.table import elsewhere, refused, row, tiny

RELIABILITY = "tests/nightly/test_reliability"
RUNS = "tests/workbench/run/test_reliability_runs.py"
NOT_FINITE = f"{RELIABILITY}_faults.py::test_a_step_that_is_not_finite_is_not_applied"
ONE_TERM = f"{RELIABILITY}_faults.py::test_one_term_that_is_not_finite_is_dropped_for_the_step"
ANOTHER_WORLD = f"{RUNS}::test_other_data_and_another_world_are_refused"
OTHER_SETTINGS = f"{RUNS}::test_other_settings_are_refused_with_a_difference"
NOT_WRITABLE = f"{RELIABILITY}_faults.py::test_an_output_that_cannot_be_written_is_one_line"
FULL_DISK = f"{RELIABILITY}_faults.py::test_a_disk_that_fills_up_keeps_what_was_saved"
DAMAGED = f"{RELIABILITY}.py::test_a_damaged_checkpoint_is_named_and_passed_over"
SIGNALS = f"{RELIABILITY}_faults.py::test_a_signal_finishes_the_step_and_saves"
TWO = f"{RUNS}::test_a_second_process_is_refused_at_once"
CURVES = f"{RELIABILITY}_faults.py::test_curves_that_cannot_be_written_do_not_stop_a_run"

elsewhere(
    16, "NaN or infinity in the logits", "P", "handled", NOT_FINITE, "the step is not made; exit code 3 in the end"
)
elsewhere(17, "NaN in one term", "P", "handled", ONE_TERM, "the term is left out of the step, and counted")
elsewhere(64, "another world size when resuming", "P", "refused", ANOTHER_WORLD)
elsewhere(65, "other settings when resuming", "P", "refused", OTHER_SETTINGS, "--allow-change KEY accepts a change")
elsewhere(66, "an output that is a file, not empty or not writable", "E", "refused", NOT_WRITABLE)
elsewhere(67, "a full disk", "P", "handled", FULL_DISK, "exit code 4; the last checkpoint is whole")
elsewhere(68, "kill -9 in a save; torn or changed checkpoints", "P", "handled", DAMAGED)
elsewhere(69, "SIGTERM and SIGINT", "P", "handled", SIGNALS, "exit codes 143 and 130, after a save")
elsewhere(70, "two processes in one output folder", "E", "refused", TWO)
elsewhere(71, "curves that cannot be written", "W", "warned", CURVES, "the run continues")


@row(76, "no network, and the model or the data is not here", "E", "refused")
def _(tmp: Path) -> None:
    chosen = ["model.name=facebook/bart-large", "model.architecture=null"]
    message = r"bart-large is not on this machine .*: run `hf download facebook/bart-large` .* model.name=FOLDER"
    refused(tmp, message, *tiny(tmp, *chosen))
    refused(tmp, r"Gigaword.* cannot be had from the hub .* data.path=FOLDER", *tiny(tmp, "data.path=null"))


@row(77, "another clock, locale, letters and spaces in paths", "H", "handled")
def _(tmp: Path) -> None:
    folder = tmp / "naïve путь 東京 ☃"
    folder.mkdir()
    words = tiny(folder)
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TZ": "Pacific/Kiritimati"}
    root = Path(__file__).parents[2]
    around = {"OMP_NUM_THREADS": "1", **os.environ, **plain, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}

    def seqreg(*words: str, text: str = "") -> bytes:
        command = [sys.executable, "-m", "seqreg", *words]
        done = subprocess.run(command, cwd=folder, env=around, input=text.encode(), capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    seqreg(*words)
    assert (folder / "run" / "metrics.json").is_file()
    with mock.patch("sys.stdout", io.TextIOWrapper(written := io.BytesIO(), "ascii")) as out:
        predict._write(predict._standard(out), {}, {"prediction": "дом"}, False)
    assert written.getvalue() == "дом\n".encode()
    assert seqreg("predict", "run", "-", text="дом стоит\nein Häuschen\n").count(b"\n") == 2
