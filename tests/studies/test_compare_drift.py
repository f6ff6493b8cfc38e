"""Drift and retention in a comparison: means and intervals over seeds, in every output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from seqreg.errors import BadInput
from seqreg.studies.common.findings import FOLDER
from seqreg.studies.compare import conclusions, drift
from seqreg.studies.compare.report import report
from tests.helpers import fake_comparison
from tests.helpers.tiny_tasks import seqreg

DRIFTS = {"baseline": [0.2, 0.25, 0.3], "r3f": [0.1, 0.11, 0.13]}
LOSSES = {"baseline": [3.0, 3.1, 3.3], "r3f": [2.4, 2.5, 2.45]}


def add(folder: Path, kl: float, loss: float) -> None:
    """Drift and retention, as a run would have written them."""
    path = folder / "metrics.json"
    section = {"kl_trained_start": kl, "kl_start_trained": 2 * kl, "weight_distance": 0.01, "cka": None, "examples": 9}
    kept = {"old <task>": {"loss": {"before": 2.0, "after": loss}, "rougeL": {"before": None, "after": 30.0}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "drift": section, "retention": kept}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with numbers, and one whose runs are of a version that had none."""
    folder = tmp_path_factory.mktemp("drift") / "c"
    fake_comparison.comparison(folder, {"r3f": 1.0, "smart": 0.0}, seeds="3", curves=False)
    for method, values in DRIFTS.items():
        for seed, (kl, loss) in enumerate(zip(values, LOSSES[method], strict=True), start=1):
            add(folder / method / f"seed-{seed}", kl, loss)
    return folder


def test_numbers_are_over_seeds(folder: Path) -> None:
    measured = conclusions.judge(folder).values["drift"]
    assert list(measured) == [
        "KL(trained || start)", "KL(start || trained)", "|w - w0| / |w0|", "old <task>: loss before",
        "old <task>: loss after", "old <task>: loss change",
    ]  # fmt: skip
    assert all(list(methods) == ["baseline", "r3f"] for methods in measured.values())
    for name, values in (("KL(trained || start)", DRIFTS), ("old <task>: loss after", LOSSES)):
        for method, numbers in values.items():
            expected = stats.t.interval(0.95, 2, sum(numbers) / 3, stats.sem(numbers))
            assert measured[name][method]["mean"] == pytest.approx(sum(numbers) / 3)
            assert measured[name][method]["student"] == pytest.approx(expected)
    changed = measured["old <task>: loss change"]["r3f"]
    assert changed["mean"] == pytest.approx(sum(LOSSES["r3f"]) / 3 - 2.0)
    test = stats.ttest_rel(LOSSES["r3f"], LOSSES["baseline"])  # the same seeds: paired, and described alone
    assert changed["difference"]["interval"] == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert changed["difference"]["p"] is None
    assert json.loads((folder / FOLDER / "compare.json").read_text())["values"]["drift"]["KL(trained || start)"]


def test_only_seeds_that_both_have_are_paired_and_one_model_with_none() -> None:
    def runs(*values: float, first: int = 1) -> dict[int, dict[str, Any]]:
        return {seed: {"drift": {"cka": value}} for seed, value in enumerate(values, start=first)}

    methods = {"baseline": runs(0.1, 0.2, 0.6), "late": runs(0.3, 0.5, first=2), "soup": runs(0.7)}
    measured = drift.measure(methods, "baseline", ["soup"])["CKA to the start"]
    late, soup = measured["late"]["difference"], measured["soup"]["difference"]
    assert late["difference"] == pytest.approx((0.1 - 0.1) / 2)
    assert late["interval"] == pytest.approx(stats.t.interval(0.95, 1, 0.0, stats.sem([0.1, -0.1])))
    assert soup["difference"] == pytest.approx(0.7 - 0.3)  # the mean of the baseline, not its first seed
    assert soup["interval"] is None


def test_a_line_for_every_number_and_method(folder: Path) -> None:
    measured = conclusions.judge(folder).values["drift"]
    (table,) = drift.tables(measured, "baseline")
    both = ["KL(trained || start)", "KL(start || trained)", "|w - w0| / |w0|"]
    both += ["old <task>: loss after", "old <task>: loss change"]
    expected = [(name, method) for name in both for method in ("baseline", "r3f")]
    expected.insert(6, ("old <task>: loss before", "(start)"))  # one for all
    assert [(row[0], row[1]) for row in table.rows] == expected
    assert [row[3] for row in table.rows if row[0] == "old <task>: loss change"] == ["1.133", "0.45"]
    (short,) = drift.short_tables(measured)
    assert short.columns == ["method", *both[:3], "old <task>: loss change"]
    assert [(row[0], row[4]) for row in short.rows] == [("baseline", "1.13 ± 0.38"), ("r3f", "0.45 ± 0.12")]


def test_every_output_has_the_table(folder: Path, tmp_path: Path) -> None:
    page = report([folder], tmp_path / "page.html").read_text()
    assert '<section id="drift">' in page
    assert page.count("KL(trained || start)") == 2
    assert "old &lt;task&gt;: loss change" in page
    assert page.index('id="drift"') > page.index('id="cost"')
    markdown = report([folder], tmp_path / "page.md", markdown=True).read_text()
    latex = report([folder], tmp_path / "page.tex", latex=True).read_text()
    assert markdown.count(drift.TITLE) == latex.count(drift.TITLE) == 1
    assert "0.1133" in markdown
    assert "0.1133" in latex
    words = ["compare", "quickstart", "-t", "r3f", "-t", "smart", "--seeds", "3", "--output", folder, "--collect"]
    printed = seqreg(*words, cwd=tmp_path).stdout
    assert "Drift and retention" in printed
    assert "0.113 ± 0.038" in " ".join(printed.replace("│", " ").split())


def test_runs_without_numbers_have_no_table(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 1.0}, seeds="2", curves=False)
    finding = conclusions.judge(tmp_path)
    assert finding.values["drift"] == {}
    assert not any(table.title == drift.TITLE for table in finding.tables)
    assert 'id="drift"' not in report([tmp_path], tmp_path / "page.html").read_text()


@pytest.mark.parametrize("section", [{"drift": {"cka": "high"}}, {"retention": {"task": {"loss": {"before": 1.0}}}}])
def test_a_file_that_was_changed_is_named(section: dict[str, Any], tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 1.0}, seeds="2", curves=False)
    path = tmp_path / "r3f" / "seed-1" / "metrics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **section}))
    key = ".".join(["drift", "cka"] if "drift" in section else ["retention", "task", "loss", "after"])
    with pytest.raises(BadInput, match=f"{key}: not what seqreg writes there"):
        conclusions.judge(tmp_path)
