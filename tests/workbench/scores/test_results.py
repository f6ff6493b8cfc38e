"""What the files and tables of a run say about its scores."""

from __future__ import annotations

from typing import Any

import pytest

from seqreg.workbench.scores.results import nothing_learned, score_lines


def metrics(after: float | None, before: float | None, key: str = "rougeL", split: str = "test") -> dict[str, Any]:
    """The contents of a metrics.json."""
    start = {} if before is None else {"before": {key: before, "intervals": {}, "signature": ""}}
    scores = {name: {key: after, "intervals": {}, "signature": ""} for name in ("validation", split)}
    return {"metric": key, "scores": {**start, **scores}}


@pytest.mark.parametrize(
    ("after", "before", "key", "said"),
    [
        (12.5, 10.0, "rougeL", ""),
        (12.5, None, "rougeL", ""),
        (None, 10.0, "rougeL", ""),
        (10.0, 10.0, "rougeL", "rougeL is 10.00 after training and was 10.00 before"),
        (9.5, 10.0, "rougeL", "rougeL is 9.50 after training and was 10.00 before"),
        (0.0, None, "rougeL", "rougeL is 0.00, the worst that there is"),
        (0.0, 0.0, "bleu", "bleu is 0.00, the worst that there is"),
        (30.0, 40.0, "cer", ""),
        (50.0, 40.0, "cer", "cer is 50.00 after training and was 40.00 before"),
        (120.0, 300.0, "wer", "wer is 120.00, the worst that there is"),
        (0.0, -3.0, "matthews", ""),
        (55.0, 60.0, "accuracy", "accuracy is 55.00 after training and was 60.00 before"),
    ],
)
def test_a_run_says_where_nothing_was_learned(after: float | None, before: float | None, key: str, said: str) -> None:
    assert nothing_learned(metrics(after, before, key)) == (said and f"nothing was learned: {said}")


def test_the_card_of_a_run_begins_with_what_was_not_learned() -> None:
    assert score_lines(metrics(9.5, 10.0))[0].startswith("**Nothing was learned: rougeL is 9.50")
    assert score_lines(metrics(12.5, 10.0))[0].startswith("| split |")
