"""Every study of research/studies runs, as a toy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from research import archive as archived
from research import measurements, page, study_file
from research import study as studies
from research.study_file import StudyStep
from seqreg.studies.compare.conclusions import judge
from tests.research import toy_study
from tests.research.test_study import NAMES, first_method_alone, run_toy


@pytest.mark.parametrize("name", [name for name in NAMES if "small" in study_file.read(name).sizes])
def test_every_study_runs_as_a_toy(name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds of tiny models, the baseline and one method, every step; then its archive and its page."""
    toy_study.in_this_process(monkeypatch)
    study = first_method_alone(study_file.read(name))
    steps = [step.updated(options=_cheap(step), cycles=1) for step in study.steps]
    study = study.updated(steps=steps)
    run = run_toy(name, study, place, tmp_path / "out")
    found = page.results(archived.pack(run), study, judge)
    shown = page.page(found, f"{name}.png")
    for result in found.steps:
        assert result.left_out is None or study.left_out(result.step, "small"), f"{result.step.name}: {result.left_out}"
        assert result.step.command in ("train", "compare") or result.means, result.step.name
        if result.step.judged:
            names = list(result.means or {})
            assert any(measurements.is_one(name, result.step.judged) for name in names), names
        assert result.step.command == "train" or f"## {result.step.heading}" in shown
    page.draw(found, tmp_path / "figure.png")


def test_zero_shot_runs_as_a_toy_in_all_languages(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the paper's size alone: a tiny model and made-up pairs stand in for it."""
    toy_study.in_this_process(monkeypatch)
    files = toy_study.xnli(tmp_path / "xnli")
    study, settings = first_method_alone(study_file.read("zero_shot")), [f"model.name={place / 'models' / 'bert-mini'}"]
    run = studies.make(
        "zero_shot", study, models=None, data=None, output=tmp_path / "out", size="paper", seeds=[1, 2],
        settings=[*toy_study.SHORT, *settings, f"data.path={files}", "checkpoints.save_steps=0"],
    )  # fmt: skip
    studies.run(run)
    found = page.results(archived.pack(run), study, judge)
    assert found.steps[0].finding is not None
    assert "r3f" in page.page(found, "zero_shot.png")
    scores = json.loads((tmp_path / "out" / "xnli" / "r3f" / "seed-2" / "metrics.json").read_text())["scores"]
    assert {"test", "test_fr", "test_ur"} < scores.keys()


def _cheap(step: StudyStep) -> list[str]:
    options = {"probe": ["--examples", "20"], "chain": ["--examples", "20"], "calibrate": ["--limit", "20"]}
    if step.command == "robustness":
        return [*step.options, "--limit", "8"]
    return options.get(step.command, step.options)
