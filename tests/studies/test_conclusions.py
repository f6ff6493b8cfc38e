"""Verdicts: numbers as they were made, words that are earned."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from seqreg.errors import BadInput
from seqreg.metrics import statistics
from seqreg.studies.common.findings import FOLDER, Finding
from seqreg.studies.compare import conclusions, judgement, results
from seqreg.studies.compare import plan as comparison
from seqreg.studies.compare.significance import agreement
from seqreg.workbench.scores.results import main_split
from tests.helpers import fake_comparison


def about(finding: Finding, name: str) -> str:
    return next(one for one in finding.summary if one.startswith(f"{name} "))


def by_example(folder: Path, seeds: int = 5, without: int = 0) -> np.ndarray:
    """ROUGE-L in percent, [seeds, examples], straight from the files."""
    chosen = [seed for seed in range(1, seeds + 1) if seed != without]
    files = [(folder / f"seed-{seed}" / "predictions.jsonl").read_text().splitlines() for seed in chosen]
    return 100 * np.array([[json.loads(line)["rougeL"] for line in lines] for lines in files])


def test_differences_are_found_and_none_is_made_up(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 4.0, "smart": 0.0, "rdrop": -4.0}, curves=False)
    finding = conclusions.judge(tmp_path)
    assert about(finding, "r3f").startswith("r3f is significantly better than baseline: +")
    assert about(finding, "rdrop").startswith("rdrop is significantly worse than baseline: -")
    assert about(finding, "smart").startswith("smart is not shown to differ from baseline: ")
    assert ", at 1.50 times the CPU time of the training steps" in about(finding, "smart")
    kept = Finding.read(tmp_path / FOLDER / "compare.json")
    assert json.dumps(asdict(kept)) == json.dumps(asdict(finding))


def test_numbers_are_those_of_the_statistics(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 1.0, "smart": 0.5}, curves=False)
    values = conclusions.judge(tmp_path).values
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
    fake_comparison.comparison(tmp_path, {"r3f": 30.0}, seeds=seeds, curves=False)
    finding = conclusions.judge(tmp_path)
    assert "significant" not in json.dumps([finding.summary, [table.rows for table in finding.tables]])
    said = about(finding, "r3f")
    assert "not enough seeds for a verdict" in said
    assert f"{judgement.counted(more, 'seed')} more needed (--extend --seeds 4)" in said


def test_failures_are_counted_and_quoted(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 4.0}, failed=(("r3f", 2), ("r3f", 4)), curves=False)
    finding = conclusions.judge(tmp_path)
    said = next(one for one in finding.summary if "failed" in one)
    assert said.startswith("2 of 5 runs of r3f failed, the first with seed 2 and exit code 3: seqreg: 3 steps")
    row = next(row for row in finding.tables[0].rows if row[0] == "r3f")
    assert row[1:3] == [3, 2]
    assert "With 3 seeds" in about(finding, "r3f")
    assert "1 seed more needed (--extend --seeds 6)" in about(finding, "r3f")


def test_accuracies_are_tested_over_seeds(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 25.0}, kind="classes", examples=200)
    found = results.load(tmp_path)
    values = conclusions.judge(tmp_path).values
    assert (values["metric"], found.texts) == ("accuracy", False)
    expected = statistics.welch(*(list(found.scores(name).values()) for name in ("baseline", "r3f")))
    assert values["methods"]["r3f"]["difference"]["p"] == expected.p
    assert values["methods"]["r3f"]["difference"]["test"] == "Welch"
    said = found.methods["r3f"].predictions
    pairs = [(a, b) for a in said for b in said if a < b]
    same = [
        np.mean([x["prediction"] == y["prediction"] for x, y in zip(said[a], said[b], strict=True)]) for a, b in pairs
    ]
    assert values["methods"]["r3f"]["agreement"]["equal"] == pytest.approx(100 * np.mean(same))


def test_unfinished_and_extended_comparisons_say_so(tmp_path: Path) -> None:
    chosen = fake_comparison.comparison(tmp_path, {"r3f": 4.0}, curves=False)
    for job in chosen.jobs(tmp_path)[-4:]:
        (job.folder / "run.json").unlink()
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "extended": [{"seeds": [1, 2], "methods": []}]}))
    summary = conclusions.judge(tmp_path).summary
    assert summary[0] == "Preliminary: 4 of 10 runs are not finished."
    assert "1 seed more needed (the same command trains them)" in summary[2]
    assert any("added after a first look (seeds: 2 to 5)" in one for one in summary)


def test_runs_on_other_examples_are_refused(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 4.0}, seeds="2", curves=False)
    path = tmp_path / "r3f" / "seed-2" / "predictions.jsonl"
    path.write_text(path.read_text().replace("again 3", "again 4"))
    with pytest.raises(BadInput, match="r3f, seed 2 was scored on other examples"):
        conclusions.judge(tmp_path)


def test_folders_that_are_no_comparison_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"not a comparison of seqreg: it has no comparison\.json"):
        results.load(tmp_path)
    (tmp_path / "comparison.json").write_text('{"recipe": 1}')
    with pytest.raises(BadInput, match="cannot be read"):
        results.load(tmp_path)


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 4.0, "smart": -4.0}, curves=False)
    console = Console(width=80, file=io.StringIO())
    console.print(conclusions.verdict_table(conclusions.judge(tmp_path).values))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert not any("…" in line for line in lines)
    assert sum(line.startswith("│") for line in lines) == 4  # the starting model, and one line a method


@pytest.mark.parametrize(("start", "unlearned"), [(10.0, []), (51.0, ["baseline"]), (99.0, ["baseline", "r3f"])])
def test_methods_that_are_not_better_than_the_starting_model(
    start: float, unlearned: list[str], tmp_path: Path
) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 10.0}, curves=False)
    for path in tmp_path.glob("*/seed-*/metrics.json"):
        metrics = json.loads(path.read_text())
        metrics["scores"]["before"]["rougeL"] = start
        path.write_text(json.dumps(metrics))
    finding = conclusions.judge(tmp_path)
    said = [line.partition(":")[0] for line in finding.summary if "nothing was learned" in line]
    assert said == unlearned
    assert finding.values["headline"].startswith("Nothing was learned by") is bool(unlearned)
    assert [row[0] for row in finding.tables[0].rows] == ["before training", "baseline", "r3f"]
    assert finding.tables[0].rows[0][1:4] == [5, None, start]


def test_a_comparison_that_did_not_score_the_starting_model_has_no_row_of_it(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 10.0}, curves=False)
    for path in tmp_path.glob("*/seed-*/metrics.json"):
        metrics = json.loads(path.read_text())
        del metrics["scores"]["before"]
        path.write_text(json.dumps(metrics))
    finding = conclusions.judge(tmp_path)
    assert [row[0] for row in finding.tables[0].rows] == ["baseline", "r3f"]
    assert "nothing was learned" not in " ".join(finding.summary)


def test_the_split_that_is_compared() -> None:
    assert main_split({"before": {}, "validation": {}, "test": {}}, texts=True) == "test"
    assert main_split({"validation": {}, "mismatched": {}, "average": {}}, texts=False) == "average"
    assert main_split({"before": {}, "validation": {}}, texts=False) == "validation"


def without_scores(plan: comparison.ComparisonPlan, folder: Path, name: str) -> None:
    """As if no run of a method had begun."""
    for job in plan.jobs(folder):
        if job.method == name:
            shutil.rmtree(job.folder)


def test_a_method_that_failed_altogether_is_in_the_tables(tmp_path: Path) -> None:
    failed = tuple(("smart", seed) for seed in range(1, 6))
    fake_comparison.comparison(tmp_path, {"r3f": 4.0, "smart": 0.0}, failed=failed, curves=False)
    finding = conclusions.judge(tmp_path)
    said = next(one for one in finding.summary if one.startswith("5 of 5 runs of smart failed"))
    assert said.endswith("It has no scores.")
    quality, stability = ({row[0]: row for row in table.rows} for table in finding.tables[:2])
    assert quality["smart"][1:3] + quality["smart"][-1:] == [0, 5, "all failed"]
    assert stability["smart"][3] == "5 of 5"
    assert {len(row) for row in finding.tables[0].rows} == {len(finding.tables[0].columns)}
    assert {len(row) for row in finding.tables[1].rows} == {len(finding.tables[1].columns)}
    console = Console(width=80, file=io.StringIO())
    console.print(conclusions.verdict_table(finding.values))
    assert "failed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_baseline_that_failed_altogether_is_said(tmp_path: Path) -> None:
    fake_comparison.comparison(
        tmp_path, {"r3f": 4.0}, seeds="2", failed=(("baseline", 1), ("baseline", 2)), curves=False
    )
    with pytest.raises(
        BadInput,
        match=r"all runs of baseline failed, so nothing can be compared; .*not finite.*; seqreg compare --retry",
    ):
        conclusions.judge(tmp_path)


@pytest.mark.parametrize("gone", [(), ("smart",), ("smart", "rdrop")])
def test_tests_that_are_still_to_come_are_corrected_for(gone: tuple[str, ...], tmp_path: Path) -> None:
    """Whoever looks before all methods are through gets no smaller p than in the end."""
    plan = fake_comparison.comparison(tmp_path, {"r3f": 4.0, "smart": 0.0, "rdrop": 0.0}, curves=False)
    for name in gone:
        without_scores(plan, tmp_path, name)
    values = conclusions.judge(tmp_path).values
    found = values["methods"]["r3f"]
    assert values["tests"] == 3
    assert found["holm"] == pytest.approx(3 * found["difference"]["p"])
    assert found["reachable"] == statistics.reachable(5, 3)


def test_more_seeds_are_asked_for_in_words_that_are_accepted(tmp_path: Path) -> None:
    plan = fake_comparison.comparison(tmp_path, {"r3f": 4.0}, seeds="3,7", curves=False)
    hint = "--extend --seeds 3,7,8,9"
    assert f"({hint})" in about(conclusions.judge(tmp_path), "r3f")
    wider, _ = comparison.make("quickstart", ["r3f"], hint.split()[-1])
    assert comparison.settle(tmp_path, wider, extend=True).seeds == [3, 7, 8, 9]
    assert plan.seeds == [3, 7]


def test_a_difference_over_fewer_seeds_than_the_means_says_so(tmp_path: Path) -> None:
    fake_comparison.comparison(tmp_path, {"r3f": 4.0}, seeds="6", failed=(("r3f", 2),), curves=False)
    finding = conclusions.judge(tmp_path)
    assert "over the 5 seeds that both have" in about(finding, "r3f")
    base = np.delete(by_example(tmp_path / "baseline", 6), 1, axis=0)
    mine = by_example(tmp_path / "r3f", 6, without=2)
    assert finding.values["methods"]["r3f"]["difference"]["difference"] == pytest.approx((mine - base).mean())


def test_predictions_of_another_file_are_not_taken_for_those_of_the_scores(tmp_path: Path) -> None:
    """Every run evaluated on another file afterwards: means would be of one test set, differences of another."""
    plan = fake_comparison.comparison(tmp_path, {"r3f": 4.0}, seeds="2", curves=False)
    for job in plan.jobs(tmp_path):
        path = job.folder / "predictions.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**row, "rougeL": row["rougeL"] / 2}) + "\n" for row in rows))
    with pytest.raises(BadInput, match=r"baseline, seed 1: predictions\.jsonl has rougeL .* evaluated on another file"):
        conclusions.judge(tmp_path)


def test_scores_without_intervals_and_numbers_are_judged(tmp_path: Path) -> None:
    """`evaluation.resamples=0`, a regression: loss and seconds are no scores, and numbers are never equal."""
    plan = fake_comparison.comparison(tmp_path, {"r3f": 4.0}, kind="classes", seeds="2")
    for job in plan.jobs(tmp_path):
        metrics = json.loads((job.folder / "metrics.json").read_text())
        score = {"score": 50.0 + job.seed, "pearson": 50.0 + job.seed, "loss": 0.1, "rows": 2, "seconds": 9.5}
        metrics["scores"] = {"validation": {**score, "intervals": {}, "signature": ""}}
        (job.folder / "metrics.json").write_text(json.dumps(metrics))
        rows = [{"index": place, "prediction": 0.5 * job.seed, "reference": 1.0} for place in range(2)]
        (job.folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = conclusions.judge(tmp_path).values
    assert (values["metric"], values["others"]) == ("pearson", {})
    assert values["methods"]["r3f"]["agreement"] is None
    row = json.loads((tmp_path / FOLDER / conclusions.EXAMPLES).read_text().splitlines()[1])
    assert row == {
        "index": 1,
        "score": "prediction",
        "methods": {name: {"1": 0.5, "2": 1.0} for name in ("baseline", "r3f")},
    }


def test_what_a_launched_training_was_refused_for_is_said(tmp_path: Path) -> None:
    plan = fake_comparison.comparison(tmp_path, {"r3f": 4.0}, seeds="2", curves=False)
    job = plan.jobs(tmp_path)[-1]
    shutil.rmtree(job.folder)
    job.log.write_text("seqreg: data.path=x: no such file or folder\n")
    job.code.write_text("2\n")
    said = "1 of 4 runs are not finished; r3f, seed 2 was stopped with exit code 2: seqreg: data.path=x: no such file"
    assert said in conclusions.judge(tmp_path).summary[0]


def test_equal_texts_agree_although_they_are_empty() -> None:
    rows = {seed: [{"prediction": text} for text in ("", "a b", last)] for seed, last in ((1, "c d"), (2, "c e"))}
    found = agreement(SimpleNamespace(predictions=rows), texts=True)  # type: ignore[arg-type]
    assert found == {"equal": pytest.approx(200 / 3), "rougeL": pytest.approx(250 / 3)}


def test_only_primary_comparisons_are_tested(tmp_path: Path) -> None:
    """Holm's family is the primary comparisons; a large difference of another method is never called significant."""
    fake_comparison.comparison(tmp_path, {"r3f": 4.0, "smart": 0.3, "rdrop": -9.0}, curves=False)
    everything = conclusions.judge(tmp_path).values["methods"]
    begun = comparison.read(tmp_path)
    wanted = replace(begun, primary=["smart", "r3f"])
    with pytest.raises(BadInput, match=r"begun with other settings:\n.*primary: \[\] there(.|\n)*--extend"):
        comparison.settle(tmp_path, wanted, extend=False)
    settled = comparison.settle(tmp_path, wanted, extend=True)
    assert (settled.primary, settled.primary_late, settled.extended) == (["smart", "r3f"], True, [])
    settled.write(tmp_path)
    finding = conclusions.judge(tmp_path)
    methods = finding.values["methods"]
    corrected = statistics.holm([everything[name]["difference"]["p"] for name in ("smart", "r3f")])
    assert [methods[name]["holm"] for name in ("smart", "r3f")] == corrected
    assert (methods["rdrop"]["holm"], methods["rdrop"]["difference"]["p"], finding.values["tests"]) == (None, None, 2)
    assert about(finding, "rdrop").startswith("rdrop against baseline, described and not tested: -")
    assert not any("rdrop" in line and "significant" in line for line in finding.summary)
    assert "The primary comparisons were named after the comparison was begun." in finding.summary
    assert [row[-1] for row in finding.tables[0].rows][-1] == "described and not tested"
    out = Console(file=io.StringIO(), width=200)
    out.print(conclusions.verdict_table(finding.values))
    assert out.file.getvalue().count("not tested") == 1  # type: ignore[attr-defined]
    assert "--primary smart,r3f" in finding.command
    with pytest.raises(BadInput, match=r"--primary smrt: .* did you mean 'smart'\?"):
        comparison.make("quickstart", ["smart"], "5", primary=["smrt"])
