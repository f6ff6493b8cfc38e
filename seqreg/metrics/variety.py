"""How varied predictions are: a model that says one thing about everything has collapsed, whatever its score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

VARIETY = ("distinct", "most_common", "distinct_references", "most_common_reference", "spread", "collapsed")
"""Names of all numbers that are found here."""

_SAME_TEXT, _SAME_CLASS, _DISTINCT, _SPREAD = 0.5, 0.1, 0.1, 0.01
"""Predictions have collapsed below these shares of the references' variety."""


def variety(predictions: Sequence[Hashable], references: Sequence[Hashable], *, texts: bool) -> dict[str, float]:
    """Shares in percent: of distinct predictions, of the most common one, and the same of the references.

    `collapsed` is 1 if, of what varies in the references, little is left in the predictions: the share outside the most
    common one is at most half of the references' for texts and a tenth for classes, or the number of distinct ones
    beyond the first is at most a tenth of theirs. References that are all the same ask for nothing.

    >>> found = variety(["a", "a", "a", "b"], ["a", "b", "c", "d"], texts=True)
    >>> found["distinct"], found["most_common"], found["most_common_reference"], found["collapsed"]
    (50.0, 75.0, 25.0, 1.0)
    >>> variety([1, 1, 1, 0], [1, 0, 1, 0], texts=False)["collapsed"]
    0.0
    """
    rows = len(predictions)
    said, truth = Counter(predictions), Counter(references)
    most, most_true = (max(found.values(), default=0) for found in (said, truth))
    same = (rows - most) <= (_SAME_TEXT if texts else _SAME_CLASS) * (rows - most_true)
    few = len(said) - 1 <= _DISTINCT * (len(truth) - 1)
    return {
        "distinct": 100 * len(said) / rows, "most_common": 100 * most / rows,
        "distinct_references": 100 * len(truth) / rows, "most_common_reference": 100 * most_true / rows,
        "collapsed": float(len(truth) > 1 and (same or few)),
    }  # fmt: skip


def spread(predictions: Any, references: Any) -> dict[str, float]:
    """The standard deviation of predicted numbers in percent of the references'; collapsed below one percent.

    >>> spread([2.0, 2.0, 2.0], [1.0, 2.0, 3.0])
    {'spread': 0.0, 'collapsed': 1.0}
    """
    said, truth = float(np.std(predictions)), float(np.std(references))
    return {"spread": 100 * said / truth if truth else 100.0, "collapsed": float(said < _SPREAD * truth)}


def collapse(found: dict[str, float], rows: int) -> str:
    """What has collapsed, in a few words; "" if nothing has."""
    if not found.get("collapsed"):
        return ""
    if "spread" in found:
        return f"the predicted numbers hardly differ: their sd is {found['spread']:.2g}% of the references'"
    count = round(found["distinct"] * rows / 100)
    return (
        f"{count} distinct prediction{'s' if count != 1 else ''} for {rows} examples, the most common one for "
        f"{found['most_common']:.0f}% of them (of the references: {found['most_common_reference']:.0f}%)"
    )
