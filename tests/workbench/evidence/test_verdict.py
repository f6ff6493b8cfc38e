"""Verdicts: numbers as they were made, words that are earned."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from seqreg.errors import BadInput
from seqreg.metrics import statistics
from seqreg.workbench.evidence import verdict
from seqreg.workbench.evidence.findings import FOLDER, Finding
from seqreg.workbench.evidence.gather import _split, gather
from tests.workbench.evidence import made


def about(finding: Finding, name: str) -> str:
    return next(one for one in finding.summary if one.startswith(f"{name} "))


def by_example(folder: Path) -> np.ndarray:
    """ROUGE-L in percent, [seeds, examples], straight from the files."""
    files = [(folder / f"seed-{seed}" / "predictions.jsonl").read_text().splitlines() for seed in range(1, 6)]
    return 100 * np.array([[json.loads(line)["rougeL"] for line in lines] for lines in files])


def test_differences_are_found_and_none_is_made_up(tmp_path: Path) -> None:
    made.comparison(tmp_path, {"r3f": 4.0, "smart": 0.0, "rdrop": -4.0}, curves=False)
    finding = verdict.judge(tmp_path)
    assert about(finding, "r3f").startswith("r3f is significantly better than baseline: +")
    assert about(finding, "rdrop").startswith("rdrop is significantly worse than baseline: -")
    assert about(finding, "smart").startswith("smart is not shown to differ from baseline: ")
    assert "1.50 times the training time" in about(finding, "smart")
    kept = Finding.read(tmp_path / FOLDER / "compare.json")
    assert json.dumps(asdict(kept)) == json.dumps(asdict(finding))


def test_numbers_are_those_of_the_statistics(tmp_path: Path) -> None:
    made.comparison(tmp_path, {"r3f": 1.0, "smart": 0.5}, curves=False)
    values = verdict.judge(tmp_path).values
    scores = {name: by_example(tmp_path / name) for name in ("baseline", "r3f", "smart")}
    tests = [
        statistics.two_level(scores["baseline"], scores[name], resamples=19_999) for name in ("r3f", "smart")
    ]  # fmt: skip
    corrected = statistics.holm([one.p for one in tests])
    for name, one, p in zip(("r3f", "smart"), tests, corrected, strict=True):
        found = values["methods"][name]
        assert found["difference"]["difference"] == pytest.approx(one.difference)
        assert (found["difference"]["p"], found["holm"]) == (one.p, p)
        assert found["mean"] == pytest.approx(scores[name].mean(), abs=1e-4)
        assert found["time"] == 1.5


@pytest.mark.parametrize(("seeds", "more"), [("1", 3), ("2", 2), ("3", 1)])
def test_too_few_seeds_never_give_the_word(seeds: str, more: int, tmp_path: Path) -> None:
    made.comparison(tmp_path, {"r3f": 30.0}, seeds=seeds, curves=False)
    finding = verdict.judge(tmp_path)
    assert "significant" not in json.dumps([finding.summary, [table.rows for table in finding.tables]])
    said = about(finding, "r3f")
    assert "not enough seeds for a verdict" in said
    assert f"{verdict.seeds_of(more)} more needed (--extend --seeds 4)" in said


def test_failures_are_counted_and_quoted(tmp_path: Path) -> None:
    made.comparison(tmp_path, {"r3f": 4.0}, failed=(("r3f", 2), ("r3f", 4)), curves=False)
    finding = verdict.judge(tmp_path)
    said = next(one for one in finding.summary if "failed" in one)
    assert said.startswith("2 of 5 trainings of r3f failed, the first with seed 2 and exit code 3: seqreg: 3 steps")
    row = next(row for row in finding.tables[0].rows if row[0] == "r3f")
    assert row[1:3] == [3, 2]
    assert "With 3 seeds" in about(finding, "r3f")
    assert "1 seed more needed (--extend --seeds 6)" in about(finding, "r3f")


def test_accuracies_are_tested_over_seeds(tmp_path: Path) -> None:
    made.comparison(tmp_path, {"r3f": 25.0}, kind="classes", examples=200)
    found = gather(tmp_path)
    values = verdict.judge(tmp_path).values
    assert (values["metric"], found.texts) == ("accuracy", False)
    expected = statistics.welch(*(list(found.scores(name).values()) for name in ("baseline", "r3f")))
    assert values["methods"]["r3f"]["difference"]["p"] == expected.p
    assert values["methods"]["r3f"]["difference"]["test"] == "Welch"
    said = found.methods["r3f"].rows
    pairs = [(a, b) for a in said for b in said if a < b]
    same = [
        np.mean([x["prediction"] == y["prediction"] for x, y in zip(said[a], said[b], strict=True)]) for a, b in pairs
    ]
    assert values["methods"]["r3f"]["agreement"]["equal"] == pytest.approx(100 * np.mean(same))


def test_unfinished_and_extended_comparisons_say_so(tmp_path: Path) -> None:
    chosen = made.comparison(tmp_path, {"r3f": 4.0}, curves=False)
    for job in chosen.jobs(tmp_path)[-4:]:
        (job.folder / "run.json").unlink()
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "extended": [{"seeds": [1, 2], "methods": []}]}))
    summary = verdict.judge(tmp_path).summary
    assert summary[0] == "Preliminary: 4 of 10 trainings are not finished."
    assert "1 seed more needed (the same command goes on with them)" in summary[2]
    assert any("added after a first look (seeds: 2 to 5)" in one for one in summary)


def test_runs_on_other_examples_are_refused(tmp_path: Path) -> None:
    made.comparison(tmp_path, {"r3f": 4.0}, seeds="2", curves=False)
    path = tmp_path / "r3f" / "seed-2" / "predictions.jsonl"
    path.write_text(path.read_text().replace("again 3", "again 4"))
    with pytest.raises(BadInput, match="r3f, seed 2 was scored on other examples"):
        verdict.judge(tmp_path)


def test_folders_that_are_no_comparison_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"not a comparison of seqreg: it has no comparison\.json"):
        gather(tmp_path)
    (tmp_path / "comparison.json").write_text('{"recipe": 1}')
    with pytest.raises(BadInput, match="cannot be read"):
        gather(tmp_path)


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    made.comparison(tmp_path, {"r3f": 4.0, "smart": -4.0}, curves=False)
    console = Console(width=80, file=io.StringIO())
    console.print(verdict.shown(verdict.judge(tmp_path).values))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert not any("…" in line for line in lines)
    assert sum(line.startswith("│") for line in lines) == 3  # one line a method


def test_the_split_that_is_compared() -> None:
    assert _split({"before": {}, "validation": {}, "test": {}}, texts=True) == "test"
    assert _split({"validation": {}, "mismatched": {}, "average": {}}, texts=False) == "average"
    assert _split({"before": {}, "validation": {}}, texts=False) == "validation"
