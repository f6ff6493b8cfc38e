"""Findings are written and read without loss."""

from pathlib import Path

import pytest

from seqreg.errors import BadInput
from seqreg.studies.common.findings import FOLDER, Finding, Table, findings

FOUND = Finding(
    "calibrate", "Calibration", "seqreg calibrate runs/x", ["ECE 0.1 → 0.02"], [Table("t", ["a", "b"], [["x", 0.5]])],
    ["calibrate.svg"], {"ece": 0.1},
)  # fmt: skip


def test_a_finding_comes_back_as_it_was(tmp_path: Path) -> None:
    FOUND.write(tmp_path / FOLDER)
    assert findings(tmp_path) == [FOUND]
    assert findings(tmp_path / "nothing") == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "x.json").write_text('{"kind": "x"}')
    with pytest.raises(BadInput, match=r"x\.json: is not a finding"):
        findings(tmp_path)


def test_what_was_not_written_to_its_end_is_left_out(tmp_path: Path) -> None:
    FOUND.write(tmp_path / FOLDER)
    (tmp_path / FOLDER / ".tmp-probe.json").write_text('{"kind": "pro')
    assert findings(tmp_path) == [FOUND]
