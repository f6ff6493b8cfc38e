"""Scores of tagged words: precision, recall and F of entities and of words, and accuracy."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from seqreg.metrics.texts import PSEUDOVALUE, CorpusScore, TextMetric, TextScores

Array = NDArray[Any]
TagMetricName = Literal["entity_f1", "token_f5", "token_accuracy"]
OUTSIDE = "O"
"""The tag of words that belong to no entity."""
NO_TAG = "-"
"""What a word is predicted to be that the model did not see, where there is no `OUTSIDE`."""
PREFIXES = ("B", "I", "E", "S")

METRICS: Mapping[str, TextMetric] = {
    "entity_f1": TextMetric("entity F1", "entity_f1", ("entity_f1", "entity_precision", "entity_recall"), corpus=True),
    "token_f5": TextMetric("token F5", "token_f5", ("token_f5",), corpus=True),
    "token_accuracy": TextMetric("token accuracy", "token_accuracy", ("token_accuracy",), corpus=True),
}


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Type, first and last word of every entity, by the rules of conlleval, for IOB1, IOB2 and IOBES.

    An entity continues where an I or E follows a B or I of its type; all other tags but O begin one.

    >>> sorted(entities("B-PER I-PER O I-LOC B-LOC".split()))
    [('LOC', 3, 3), ('LOC', 4, 4), ('PER', 0, 1)]
    """
    spans: list[tuple[str, int, int]] = []
    before, former = OUTSIDE, ""
    for place, tag in enumerate(tags):
        prefix, _, kind = tag.partition("-")
        if prefix in PREFIXES:
            continues = before in ("B", "I") and prefix in ("I", "E") and kind == former
            spans.append((kind, spans.pop()[1] if continues else place, place))
        before, former = prefix, kind
    return set(spans)


def score(
    metric: str,
    predictions: Sequence[str],
    references: Sequence[str],
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
) -> TextScores:
    """Score tags against their references, which have as many; an example is its tags, apart by spaces.

    Args:
        metric: "entity_f1", seqeval's micro average with precision and recall; "token_f5", the micro average of F with
            beta 5 over words that are not O; or "token_accuracy" over all words
        confidence, resamples: of the intervals, over examples

    Example:
        >>> score("entity_f1", ["B-PER O", "B-LOC O"], ["B-PER O", "B-LOC B-LOC"], resamples=10).means
        {'entity_f1': 0.8, 'entity_precision': 1.0, 'entity_recall': 0.6666666666666666}
    """
    pairs = [(text.split(), truth.split()) for text, truth in zip(predictions, references, strict=True)]
    means, intervals, columns = {}, {}, {}
    for name, corpus in _corpora(metric, pairs).items():
        means[name], intervals[name] = corpus.value, corpus.interval(confidence, resamples)
        columns[f"{name}{PSEUDOVALUE}"] = corpus.pseudovalues()
    return TextScores(means, intervals, columns, f"{metric}|micro")


def entity_types(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """F1 of every type of entity that is predicted or true, as a fraction.

    >>> entity_types(["B-PER O"], ["B-PER B-LOC"])
    {'LOC': 0.0, 'PER': 1.0}
    """
    sums: dict[str, Array] = {}
    for text, truth in zip(predictions, references, strict=True):
        found, wanted = entities(text.split()), entities(truth.split())
        for place, some in enumerate((found & wanted, found, wanted)):
            for kind, count in Counter(kind for kind, _, _ in some).items():
                sums.setdefault(kind, np.zeros(3, dtype=np.int64))[place] += count
    return {kind: _f(1)(sums[kind]) for kind in sorted(sums)}


def _corpora(metric: str, pairs: Sequence[tuple[list[str], list[str]]]) -> dict[str, CorpusScore]:
    """Scores by name, from what is counted in every example: hits, predicted ones and true ones."""
    if metric == "token_accuracy":
        table = np.array([[sum(map(str.__eq__, *pair)), len(pair[1])] for pair in pairs], dtype=np.int64)
        return {metric: CorpusScore(table, lambda sums: _ratio(sums[0], sums[1]))}
    if metric == "token_f5":
        return {metric: CorpusScore(np.array([_words(*pair) for pair in pairs], dtype=np.int64), _f(5))}
    found = [(entities(tags), entities(truth)) for tags, truth in pairs]
    table = np.array([[len(some & wanted), len(some), len(wanted)] for some, wanted in found], dtype=np.int64)
    return {
        "entity_f1": CorpusScore(table, _f(1)),
        "entity_precision": CorpusScore(table, lambda sums: _ratio(sums[0], sums[1])),
        "entity_recall": CorpusScore(table, lambda sums: _ratio(sums[0], sums[2])),
    }


def _words(tags: Sequence[str], truth: Sequence[str]) -> list[int]:
    hits = sum(tag == true != OUTSIDE for tag, true in zip(tags, truth, strict=True))
    return [hits, *(sum(tag != OUTSIDE for tag in some) for some in (tags, truth))]


def _f(beta: float) -> Callable[[Array], float]:
    """F of hits, predicted and true ones; 0 where there are none."""
    return lambda sums: _ratio((1 + beta**2) * sums[0], beta**2 * sums[2] + sums[1])


def _ratio(above: float, below: float) -> float:
    return float(above) / float(below) if below else 0.0


def check_labels(labels: Sequence[str]) -> str:
    """What keeps labels from being tags of entities; "" if nothing does."""
    if OUTSIDE not in labels:
        return f"no {OUTSIDE!r} among labels={list(labels)}, for words of no entity"
    for label in labels:
        prefix, dash, kind = label.partition("-")
        if label != OUTSIDE and not (prefix in PREFIXES and dash and kind):
            return f"the label {label!r}: expected {OUTSIDE}, or {', '.join(PREFIXES)} with a type, such as B-PER"
    return ""


def flat(texts: Sequence[str]) -> list[str]:
    """The tags of all words of some examples."""
    return list(itertools.chain.from_iterable(text.split() for text in texts))
