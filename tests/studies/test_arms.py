"""Free arms in the verdict: in every table, in Holm's family, and the sentence on what a term is worth beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seqreg.errors import BadInput
from seqreg.metrics import statistics
from seqreg.studies.common.findings import Finding
from seqreg.studies.compare import power, results, significance, study
from seqreg.studies.compare.conclusions import CHANGES, judge
from seqreg.studies.compare.report import report
from seqreg.workbench.text.atomic_files import REMOVED
from tests.helpers.fake_comparison import comparison

PRETRAINED = ("model.name=some/model",)
ARMS = ("wise", "ema", "soup")


def judged(folder: Path, shifts: dict[str, float], **options: Any) -> Finding:
    comparison(folder, shifts, arms=ARMS, settings=PRETRAINED, curves=False, **options)
    return judge(folder)


def sentence(finding: Finding, begin: str) -> str:
    (line,) = [line for line in finding.summary if line.startswith(begin)]
    return line


@pytest.mark.parametrize("kind", ["texts", "classes"])
def test_arms_are_methods_in_every_table_and_tested_ones_in_the_family(kind: str, tmp_path: Path) -> None:
    finding = judged(tmp_path, {"r3f": 8.0, "wise": 1.0, "ema": 0.0, "soup": 2.0}, kind=kind, seeds="6", examples=200)
    values = finding.values
    assert values["tests"] == 3  # r3f, wise, ema: a soup is not tested
    assert list(values["methods"]) == ["baseline", "r3f", *ARMS]
    for table in finding.tables[:3]:
        assert [row[0] for row in table.rows if row[0] != "before training"] == ["baseline", "r3f", *ARMS]
    ps = {name: values["methods"][name]["difference"]["p"] for name in ("r3f", "wise", "ema")}
    holm = statistics.holm(list(ps.values()))
    assert [values["methods"][name]["holm"] for name in ps] == pytest.approx(holm)
    soup = values["methods"]["soup"]
    assert (soup["n"], soup["sd"], soup["holm"], soup["difference"]["p"]) == (1, None, None, None)
    assert "described and not tested" in sentence(finding, "soup has")
    assert "significant" not in sentence(finding, "soup has")
    assert finding.tables[0].rows[-1][-1].startswith("one model: not tested")
    changes = next(table for table in finding.tables if table.title == CHANGES)
    assert changes.rows[2][1:] == ["--arm wise", "not trained: seqreg soup --interpolate best of baseline"]
    assert "making and scoring" in finding.tables[1].title
    assert "only the body is interpolated" in sentence(finding, "wise: shares")


def test_a_term_that_does_not_beat_the_best_free_arm_is_told_so(tmp_path: Path) -> None:
    finding = judged(tmp_path / "a", {"r3f": 4.0, "wise": 9.0, "ema": 0.0, "soup": 1.0}, seeds="6")
    assert "The best free arm by validation is wise" in "\n".join(finding.summary)
    assert sentence(finding, "r3f is significantly better than baseline")
    assert sentence(finding, "r3f is significantly worse than the best free arm: -")
    finding = judged(tmp_path / "b", {"r3f": 9.0, "wise": 2.0, "ema": 0.0, "soup": 1.0}, seeds="6")
    assert sentence(finding, "r3f beats the best free arm: +")
    finding = judged(tmp_path / "c", {"r3f": 2.4, "wise": 2.0, "ema": 0.0, "soup": 1.0}, seeds="6")
    assert not [line for line in finding.summary if line.startswith("r3f beats")]
    finding = judged(tmp_path / "d", {"r3f": 5.0, "wise": 0.0, "ema": 0.0, "soup": 9.0}, seeds="6")
    assert "one model is not tested" in sentence(finding, "r3f does not beat the best free arm: -")
    finding = judged(tmp_path / "e", {"r3f": 9.0, "wise": 2.0, "ema": 0.0, "soup": 1.0}, seeds="3")
    assert "p =" not in sentence(finding, "r3f has a better mean than the best free arm: +")  # too few seeds


def test_the_best_free_arm_is_chosen_by_validation_alone(tmp_path: Path) -> None:
    comparison(tmp_path, {"r3f": 1.0, "wise": 9.0, "ema": 0.0}, arms=("wise", "ema"), settings=PRETRAINED, curves=False)
    for path in tmp_path.glob("ema/seed-*/metrics.json"):
        metrics = json.loads(path.read_text())
        metrics["scores"]["validation"]["score"] = 99.0
        path.write_text(json.dumps(metrics))
    assert significance.against_free_arms(results.load(tmp_path))["arm"] == "ema"


def test_the_search_is_in_the_verdict_the_page_and_the_export(tmp_path: Path) -> None:
    finding = judged(tmp_path, {"r3f": 1.0, "wise": 0.0, "ema": 0.0, "soup": 0.0}, search=8, seeds="5")
    said = sentence(finding, "Every trained method had at most 8 trials on the validation set")
    assert "terms.r3f.weight 0.1, 0.5, 1, 5" in sentence(finding, "r3f tried optimisation.learning_rate")
    assert "100001" in said
    assert "test sets were not scored" in said
    table = next(table for table in finding.tables if table.title.startswith("Trials of the search"))
    assert [row[0] for row in table.rows] == ["baseline"] * 4 + ["r3f"] * 8
    assert [row[-1] for row in table.rows] == [*[""] * 3, "chosen", *[""] * 7, "chosen"]
    assert finding.values["search"]["scores"] == {
        "baseline": [50.0 + place for place in range(4)], "r3f": [50.0 + place for place in range(8)]
    }  # fmt: skip
    page, text = (report([tmp_path], markdown=markdown).read_text() for markdown in (False, True))
    for shown in (page, text):
        assert "Trials of the search" in shown
        assert "best free arm" in shown
        assert "--search 8" in shown
        assert "--arm wise --arm ema --arm soup" in shown


def test_an_arm_of_other_runs_than_those_that_are_there_is_refused(tmp_path: Path) -> None:
    comparison(tmp_path, {"r3f": 1.0, "ema": 0.0}, arms=("ema",), seeds="2", curves=False)
    path = tmp_path / "ema" / "seed-1" / "run.json"
    record = json.loads(path.read_text())
    record["settings"]["soup.runs"] = ["another"]
    path.write_text(json.dumps(record))
    with pytest.raises(Exception, match="was made of other runs than those that are in"):
        results.load(tmp_path)


def test_the_sd_of_a_plan_is_that_of_finished_baselines(tmp_path: Path) -> None:
    plan = comparison(tmp_path, {"r3f": 1.0}, seeds="5", curves=False)
    spread = power.spread_of_seeds(plan, tmp_path, None)
    scores = [json.loads(path.read_text()) for path in tmp_path.glob("baseline/*/metrics.json")]
    by_hand = statistics.summary([metrics["scores"]["test"]["score"] for metrics in scores]).sd
    assert spread.sd == pytest.approx(by_hand)
    assert "of 5 finished runs of baseline" in spread.source
    assert power.spread_of_seeds(plan, tmp_path, 2.0).sd == 2.0
    assert power.spread_of_seeds(plan, tmp_path / "none", None).source.startswith("an assumption")


def test_a_plan_of_soups_alone_tests_nothing(tmp_path: Path) -> None:
    plan = comparison(tmp_path, {"soup": 1.0}, arms=("soup",), settings=PRETRAINED, seeds="2", curves=False)
    numbers = power.preview(plan, tmp_path / "new", texts=False)
    assert (numbers["tests"], numbers["smallest_difference"]) == (0, None)
    assert significance.measure(results.load(tmp_path))["chance"] == "seeds alone"


def test_arms_of_models_that_were_removed_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    plan = comparison(tmp_path, {"wise": 1.0}, arms=("wise",), settings=PRETRAINED, seeds="2", curves=False)
    study._check_sources(plan, tmp_path)  # the arm is finished
    (tmp_path / "baseline" / "seed-1" / REMOVED).write_text("")
    study._check_sources(plan, tmp_path)
    larger = replace(plan, methods=[*plan.methods, "ema"], arms=["wise", "ema"])
    with pytest.raises(BadInput, match="--arm ema: the model of baseline, seed 1 was not kept"):
        study._check_sources(larger, tmp_path)


def test_two_arms_cannot_be_chosen_between_by_what_judges_them(tmp_path: Path) -> None:
    plan = comparison(tmp_path, {"ema": 0.0, "soup": 0.0}, arms=("ema", "soup"), settings=PRETRAINED, curves=False)
    study._check_choosing(plan, ["test"])
    study._check_choosing(replace(plan, arms=["ema"]), ["validation"])
    with pytest.raises(BadInput, match="--arm ema --arm soup: the task is judged by its validation set"):
        study._check_choosing(plan, ["validation"])
