"""Scores of tagged words, against seqeval and scikit-learn."""

from __future__ import annotations

import random

import numpy as np
import pytest

from seqreg.metrics import tags

TYPES = ("PER", "LOC", "MULTI-PART")


def _random(seed: int, prefixes: str, examples: int = 60) -> tuple[list[str], list[str]]:
    """Tags of examples, and others that agree with two in three: broken sequences are among both."""
    rng = random.Random(seed)
    known = ["O"] * len(prefixes) + [f"{prefix}-{kind}" for prefix in prefixes for kind in TYPES]
    truth = [[rng.choice(known) for _ in range(rng.randint(1, 12))] for _ in range(examples)]
    guess = [[tag if rng.random() < 0.67 else rng.choice(known) for tag in example] for example in truth]
    return [" ".join(example) for example in guess], [" ".join(example) for example in truth]


@pytest.mark.parametrize("prefixes", ["I", "BI", "BIES"])
@pytest.mark.parametrize("seed", range(5))
def test_entities_are_those_of_seqeval(prefixes: str, seed: int) -> None:
    metrics = pytest.importorskip("seqeval.metrics")
    guess, truth = _random(seed, prefixes)
    split = [text.split() for text in truth], [text.split() for text in guess]
    means = tags.score("entity_f1", guess, truth, resamples=1).means
    assert means["entity_f1"] == pytest.approx(metrics.f1_score(*split), abs=1e-12)
    assert means["entity_precision"] == pytest.approx(metrics.precision_score(*split), abs=1e-12)
    assert means["entity_recall"] == pytest.approx(metrics.recall_score(*split), abs=1e-12)
    report = metrics.classification_report(*split, output_dict=True)
    assert tags.entity_types(guess, truth) == pytest.approx({kind: report[kind]["f1-score"] for kind in TYPES})


def test_f5_of_tokens_is_the_micro_average_of_scikit_learn() -> None:
    from sklearn.metrics import fbeta_score

    guess, truth = _random(1, "BI")
    known = sorted({*tags.flat(guess), *tags.flat(truth)} - {"O"})
    expected = fbeta_score(tags.flat(truth), tags.flat(guess), beta=5, labels=known, average="micro")
    assert tags.score("token_f5", guess, truth, resamples=1).means["token_f5"] == pytest.approx(expected, abs=1e-12)


def test_accuracy_counts_words_and_not_examples() -> None:
    scores = tags.score("token_accuracy", ["A", "A B A"], ["B", "A B A"], resamples=1)
    assert scores.means["token_accuracy"] == 0.75


@pytest.mark.parametrize("metric", list(tags.METRICS))
def test_the_mean_of_pseudo_values_is_the_score_and_lies_in_its_interval(metric: str) -> None:
    guess, truth = _random(2, "BI")
    scores = tags.score(metric, guess, truth)
    assert list(scores.means) == list(tags.METRICS[metric].names)
    for name, value in scores.means.items():
        assert np.mean(scores.columns[f"{name}_pseudovalue"]) == pytest.approx(value, abs=1e-12)
        low, high = scores.intervals[name]
        assert low < value < high


def test_nothing_to_find_and_nothing_found_is_zero() -> None:
    assert tags.score("entity_f1", ["O O"], ["O O"], resamples=1).means["entity_f1"] == 0


@pytest.mark.parametrize(
    ("labels", "fault"),
    [(["B-A", "I-A"], "no 'O'"), (["O", "A"], "'A'"), (["O", "B-"], "'B-'"), (["O", "X-A"], "'X-A'")],
)
def test_labels_that_are_no_tags_of_entities_are_named(labels: list[str], fault: str) -> None:
    assert fault in tags.check_labels(labels)
    assert tags.check_labels(["O", "B-A", "I-A", "S-NAME-PART"]) == ""
