"""Comparisons by scores other than ROUGE: tested over seeds and examples, and which way is better."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqreg.metrics import statistics
from seqreg.studies.compare import conclusions, jobs, reader, results, study
from seqreg.studies.compare.plan import ComparisonPlan
from tests.helpers import fake_comparison


def scored_by(metric: str, folder: Path, shifts: dict[str, float]) -> tuple[ComparisonPlan, dict[str, np.ndarray]]:
    """A finished comparison as a corpus-level metric leaves it, and its values, [seeds, examples]."""
    plan = fake_comparison.comparison(folder, shifts, curves=False)
    values: dict[str, Any] = {name: [] for name in plan.methods}
    for job in plan.jobs(folder):
        path = job.folder / "predictions.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        numbers = [row["rougeL"] for row in rows]
        kept = [{key: row[key] for key in ("index", "prediction", "reference")} for row in rows]
        lines = [{**row, f"{metric}_pseudovalue": number} for row, number in zip(kept, numbers, strict=True)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        values[job.method].append(numbers)
        metrics = json.loads((job.folder / "metrics.json").read_text())
        mean = 100 * float(np.mean(numbers))
        split = {"score": mean, metric: mean, "gen_len": 3.0, "intervals": {metric: [mean - 1, mean + 1]}}
        metrics |= {"metric": metric, "scores": {"validation": split, "test": split}}
        (job.folder / "metrics.json").write_text(json.dumps(metrics))
    return plan, {name: 100 * np.array(rows) for name, rows in values.items()}


@pytest.mark.parametrize(("metric", "better", "worse"), [("bleu", "r3f", "smart"), ("cer", "smart", "r3f")])
def test_the_verdict_knows_which_way_is_better(metric: str, better: str, worse: str, tmp_path: Path) -> None:
    _, values = scored_by(metric, tmp_path, {"r3f": 4.0, "smart": -4.0})
    finding = conclusions.judge(tmp_path)
    said = {line.partition(" ")[0]: line for line in finding.summary}
    assert said[better].startswith(f"{better} is significantly better than baseline: ")
    assert said[worse].startswith(f"{worse} is significantly worse than baseline: ")
    words = {row[0]: row[-1] for row in finding.tables[0].rows}
    assert (words[better], words[worse]) == ("significantly better", "significantly worse")
    title = f"{metric} on test, in percent"
    assert finding.tables[0].title == (title if metric == "bleu" else f"{title}; lower is better")
    found = finding.values["methods"]["r3f"]["difference"]
    expected = statistics.two_level(values["baseline"], values["r3f"], resamples=19_999)
    assert (found["p"], found["test"]) == (expected.p, "two-level bootstrap")
    assert found["difference"] == pytest.approx(expected.difference)
    assert finding.values["methods"]["r3f"]["agreement"].keys() == {"equal"}  # ROUGE says nothing about symbols
    shown = reader.reader(results.load(tmp_path))
    assert shown is not None
    assert shown["examples"][0]["scores"][0][0] == pytest.approx(values["baseline"][0, 0], abs=0.05)
    (row,) = [row for row in shown["bins"] if row["name"] == better]
    assert sum(row["counts"][5:]) > sum(row["counts"][:4])  # to the right is better, whichever way the score goes


def test_the_best_model_has_the_lowest_error_rate(tmp_path: Path) -> None:
    plan, values = scored_by("cer", tmp_path, {"r3f": 1.0})
    done = [job for job in plan.jobs(tmp_path) if job.method == "r3f"]
    best = max(done, key=lambda job: math.prod(study._validation_score(job)))
    assert best.seed == 1 + int(values["r3f"].mean(1).argmin())
    assert jobs.score_in_words(best).startswith(f"cer {values['r3f'].mean(1).min():.2f} on test")


def test_the_best_single_seed_is_the_lowest_error_rate() -> None:
    methods = {"a": {"mean": 5.0, "scores": [4.0, 6.0]}, "b": {"mean": 6.0, "scores": [1.0, 11.0]}}
    assert conclusions._best_seed(methods, False) == [
        "The lowest mean is a's (5.00), the lowest single seed b's (1.00): the minimum of several seeds rewards spread."
    ]
    assert conclusions._best_seed({"a": {"mean": 5.0, "scores": [4.0, 6.0]}}, True) == []
    equal = {"a": {"mean": 4.0, "scores": [2.0, 6.0]}, "b": {"mean": 5.0, "scores": [4.0, 6.0]}}
    assert conclusions._best_seed(equal, True) == []  # the best seeds are equal
