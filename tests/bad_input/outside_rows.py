"""The machine around a run: disks, signals, the network, the locale. Most cases are tests of their own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from seqreg.workbench import predict
from tests.bad_input.table import elsewhere, refused, row, tiny

RELIABILITY = "tests/workbench/test_reliability.py::"

for number, title, promise, does, test in (
    (16, "NaN or infinity in the logits", "P", "handled", "test_p4"),
    (17, "NaN in one term", "P", "handled", "test_p4_term"),
    (64, "another world size when resuming", "P", "refused", "test_p6"),
    (65, "other settings when resuming", "P", "refused", "test_p6"),
    (66, "an output folder that is a file, not empty or not writable", "E", "refused", "test_p7"),
    (67, "a full disk", "P", "handled", "test_p7"),
    (68, "kill -9 in a save; torn or changed checkpoints", "P", "handled", "test_p2"),
    (69, "SIGTERM and SIGINT", "P", "handled", "test_p5"),
    (70, "two processes in one output folder", "E", "refused", "test_p8"),
    (71, "curves that cannot be written", "W", "warned", "test_p9"),
):
    elsewhere(number, title, promise, does, f"{RELIABILITY}{test}")  # type: ignore[arg-type]


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
    around = {**os.environ, **plain, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def seqreg(*words: str, text: str = "") -> bytes:
        command = [sys.executable, "-m", "seqreg.cli", *words]
        done = subprocess.run(command, cwd=folder, env=around, input=text.encode(), capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    seqreg(*words)
    assert (folder / "run" / "metrics.json").is_file()
    with mock.patch("sys.stdout", io.TextIOWrapper(written := io.BytesIO(), "ascii")) as out:
        predict._write(predict._standard(out), {}, {"prediction": "дом"}, False)
    assert written.getvalue() == "дом\n".encode()
    assert seqreg("predict", "run", "-", text="дом стоит\nein Häuschen\n").count(b"\n") == 2
