"""The plan of the quickstart, and its table."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from seqreg.cli import quickstart
from seqreg.errors import BadInput


def test_the_plan_is_a_pretraining_and_a_fine_tuning_for_every_method(tmp_path: Path) -> None:
    source, tuned = quickstart.plan(["optimisation.max_steps=7"], tmp_path)
    assert (source.config.output, source.config.optimisation.max_steps) == (str(tmp_path / "pretrained"), 240)
    assert [run.config.method for run in tuned] == ["baseline", "r3f"]
    for run in tuned:
        assert run.config.model.name == source.config.output
        assert run.config.model.settings == {}
        assert run.config.optimisation.max_steps == 7
        assert run.config.data.also == {"synthetic_news": None}
    _, others = quickstart.plan(["smart", "rdrop"], tmp_path)
    assert [run.config.output for run in others] == [str(tmp_path / name) for name in ("baseline", "smart", "rdrop")]


def test_settings_of_a_term_reach_the_method_that_has_it(tmp_path: Path) -> None:
    for words in (["terms.r3f.weight=0.5"], ["r3f:weight=0.5"]):
        _, (baseline, r3f) = quickstart.plan(words, tmp_path)
        assert baseline.config.terms == {}
        assert r3f.config.terms == {"r3f": {"weight": 0.5}}
    _, runs = quickstart.plan(["r3f", "r3f:weight=0.5", "strong=r3f:weight=2.0", "data.source_prefix=say: "], tmp_path)
    assert [Path(run.config.output).name for run in runs] == ["baseline", "r3f", "r3f-weight=0.5", "strong"]
    assert {run.config.data.source_prefix for run in runs} == {"say: "}
    with pytest.raises(BadInput, match="no method has the term 'smart'"):
        quickstart.plan(["terms.smart.weight=0.5"], tmp_path)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("r3", "unknown term recipe 'r3'"),
        ("sed=1", "unknown key; did you mean 'seed'"),
        ("output=x", "choose with --output FOLDER"),
        ("model.name=x", "a model and folders of its own"),
    ],
)
def test_mistakes_are_found_before_the_pretraining(word: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        quickstart.plan([word], tmp_path)


def test_the_table_has_a_line_for_every_model() -> None:
    new, old = ({f"rouge{kind}": number for kind in "12L"} for number in (80.0, 25.0))
    found = {"pretrained": {"new": None, "old": old}, "baseline": {"new": new, "old": old}}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(quickstart.score_table(found))
    old_cell, bar = "25.0 / 25.0 / 25.0".split(), "\u2502"
    lines = [line.split() for line in console.export_text().splitlines() if line.startswith(bar)]
    assert lines[0][1:-1] == ["pretrained", bar, bar, *old_cell]
    assert lines[1][1:-1] == ["baseline", bar, *"80.0 / 80.0 / 80.0".split(), bar, *old_cell]
