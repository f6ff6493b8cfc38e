"""Which scores a comparison collects: those of its runs, with the settings and the models of its runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from seqreg.cli import main as cli
from seqreg.errors import BadInput
from tests.helpers.forked_process import TINY


def seqreg(*words: object) -> str:
    return CliRunner().invoke(
        cli.app, [str(word) for word in words], catch_exceptions=False, standalone_mode=False
    ).stdout  # fmt: skip


def verdict(folder: Path, *further: str) -> str:
    settings = [*TINY, "optimisation.max_steps=12"]
    words = ["compare", "quickstart", "-t", "r3f", *settings, "--seeds", "1", "--keep-models", "all", "-o", folder]
    return seqreg(*words, "--json", *further)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared") / "all"
    verdict(folder)
    return folder


def test_scores_with_other_settings_change_no_verdict(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "all"))
    before = verdict(folder, "--collect")
    for method in ("baseline", "r3f"):
        seqreg("evaluate", folder / method / "seed-1", "generation.num_beams=4", "generation.max_length=5")
        assert len(list((folder / method / "seed-1" / "scores").glob("*.json"))) == 1
    assert verdict(folder, "--collect") == before
    seqreg("report", folder, "--markdown")
    page = (folder / "report.md").read_text()
    assert "num_beams=4" not in page


@pytest.mark.parametrize("command", ["compare", "report"])
def test_scores_of_a_model_that_changed_are_not_judged(command: str, finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "all"))
    path = folder / "r3f" / "seed-1" / "config.json"
    path.write_text(path.read_text().replace('"gelu"', '"relu"'))

    def judged(*further: str) -> Any:
        return verdict(folder, "--collect", *further) if command == "compare" else seqreg("report", folder, *further)

    with pytest.raises(BadInput, match=r"seed-1: its model is not the one that was trained: config\.json.*--trust"):
        judged()
    judged("--trust-changes")
    assert command == "compare" or (folder / "report.html").is_file()
