"""Variety of predictions: a model that says one thing about everything has collapsed, whatever its score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

VARIETY = ("distinct", "most_common", "distinct_references", "most_common_reference", "spread", "collapsed")
"""Names of all numbers that are computed here."""

_SAME_TEXT, _SAME_CLASS, _DISTINCT, _SPREAD = 0.5, 0.1, 0.1, 0.01
"""Predictions have collapsed below these shares of the references' variety."""


def variety(predictions: Sequence[Hashable], references: Sequence[Hashable], *, texts: bool) -> dict[str, float]:
    """Shares in percent: of distinct predictions, of the most common one, and the same of the references.

    `collapsed` is 1 if, of what varies in the references, little is left in the predictions: the share outside the most
    common one is at most half of the references' for texts and a tenth for classes, or the number of distinct ones
    beyond the first is at most a tenth of theirs. References that are all the same ask for nothing.

    >>> shares = variety(["a", "a", "a", "b"], ["a", "b", "c", "d"], texts=True)
    >>> [shares[key] for key in ("distinct", "most_common", "most_common_reference", "collapsed")]
    [50.0, 75.0, 25.0, 1.0]
    >>> variety([1, 1, 1, 0], [1, 0, 1, 0], texts=False)["collapsed"]
    0.0
    """
    n = len(predictions)
    predicted, truth = Counter(predictions), Counter(references)
    most, most_true = (max(counts.values(), default=0) for counts in (predicted, truth))
    same = (n - most) <= (_SAME_TEXT if texts else _SAME_CLASS) * (n - most_true)
    few = len(predicted) - 1 <= _DISTINCT * (len(truth) - 1)
    return {
        "distinct": 100 * len(predicted) / n, "most_common": 100 * most / n,
        "distinct_references": 100 * len(truth) / n, "most_common_reference": 100 * most_true / n,
        "collapsed": float(len(truth) > 1 and (same or few)),
    }  # fmt: skip


def spread(predictions: Any, references: Any) -> dict[str, float]:
    """The standard deviation of predicted numbers in percent of the references'; collapsed below one percent.

    >>> spread([2.0, 2.0, 2.0], [1.0, 2.0, 3.0])
    {'spread': 0.0, 'collapsed': 1.0}
    """
    sd, truth = float(np.std(predictions)), float(np.std(references))
    return {"spread": 100 * sd / truth if truth else 100.0, "collapsed": float(sd < _SPREAD * truth)}


def collapse(metrics: dict[str, float], examples: int, what: str = "examples") -> str:
    """What has collapsed, in a few words; "" if nothing has. `what` a prediction is made for."""
    if not metrics.get("collapsed"):
        return ""
    if "spread" in metrics:
        return f"the predicted numbers hardly differ: their sd is {metrics['spread']:.2g}% of the references'"
    count = round(metrics["distinct"] * examples / 100)
    return (
        f"{count} distinct prediction{'s' if count != 1 else ''} for {examples} {what}, the most common one for "
        f"{metrics['most_common']:.0f}% of them (of the references: {metrics['most_common_reference']:.0f}%)"
    )
