"""The comparison with rouge-score says what it measured."""

from __future__ import annotations

import pytest

from benchmarks.rouge_speed import compare, corpus
from seqreg.errors import BadInput


def test_compare() -> None:
    found = compare(pairs=120, sample=60, rounds=1)
    assert found["equal"] == 1.0
    assert (found["pairs"], found["sample"]) == (120, 60)
    assert found["ratio"] == found["reference_seconds"] / found["seconds"] > 1.5
    with pytest.raises(BadInput, match="pairs=0"):
        compare(pairs=0)


def test_corpus_is_of_the_size_asked_for() -> None:
    predictions, references = corpus(200, (60, 50), 0)
    assert corpus(200, (60, 50), 0) == (predictions, references) != corpus(200, (60, 50), 1)
    for texts, words in ((predictions, 60), (references, 50)):
        assert {len(text.splitlines()) for text in texts} == {3, 4}
        assert sum(len(text.replace(".", "").split()) for text in texts) / 200 == pytest.approx(words, rel=0.1)
