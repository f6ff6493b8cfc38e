"""Scores of generated texts: those of sacrebleu, rouge-score and torchmetrics, against one reference and several."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from torchmetrics.functional.text import char_error_rate, word_error_rate

from seqreg.metrics import texts
from seqreg.metrics.edit_distance import edit_distance
from seqreg.metrics.rouge.score import rouge

WORDS = "the a cat dog sat lay on under mat rug, today. ran quickly over Über naïve 3 houses".split()


def sentences(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(count)]


def changed(text: str, rng: random.Random) -> str:
    """A text of which some words are others."""
    return " ".join(rng.choice(WORDS) if rng.random() < 0.3 else word for word in text.split())


def data(most: int, count: int = 120) -> tuple[list[str], list[list[str]]]:
    """Predictions, and up to `most` references for each: some near, some far."""
    rng, predictions = random.Random(most), sentences(count)
    return predictions, [[changed(text, rng) for _ in range(rng.randint(1, most))] for text in predictions]


@functools.cache
def slow_distance(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    if not one or not other:
        return len(one) + len(other)
    rest = slow_distance(one[1:], other[1:]) + (one[0] != other[0])
    return min(rest, slow_distance(one[1:], other) + 1, slow_distance(one, other[1:]) + 1)


def test_rouge_of_several_references_is_that_of_rouge_score_to_the_last_bit() -> None:
    predictions, references = data(4)
    kinds = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    scorer = RougeScorer(kinds, use_stemmer=True)
    wanted = [scorer.score_multi(several, text) for text, several in zip(predictions, references, strict=True)]
    report = rouge(predictions, references, sources=sentences(120, 1), split="newline")
    for kind in kinds:
        assert np.array_equal(report.scores[kind], np.array([tuple(scores[kind]) for scores in wanted]))
    first = rouge(predictions, [several[0] for several in references], sources=sentences(120, 1), split="newline")
    assert report.counts == first.counts  # of the predictions, which are counted once each
    assert report.signature == f"{first.signature}|nrefs=var"
    assert report.means["rougeL"] > first.means["rougeL"]


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("metric", ["bleu", "chrf"])
def test_bleu_and_chrf_are_those_of_sacrebleu(metric: str, most: int) -> None:
    predictions, references = data(most)
    scorer = BLEU() if metric == "bleu" else CHRF()
    columns = [[several[n] if n < len(several) else None for several in references] for n in range(most)]
    oracle = scorer.corpus_score(predictions, columns)  # type: ignore[arg-type]
    scores = texts.score(metric, predictions, references)
    assert 100 * scores.means[metric] == pytest.approx(oracle.score, abs=1e-9)
    assert scores.signature == f"{metric}|{scorer.get_signature()}"
    assert scores.intervals[metric][0] < scores.means[metric] < scores.intervals[metric][1]


def test_error_rates_are_all_edits_over_all_references() -> None:
    predictions, references = data(1)
    first = [several[0] for several in references]
    for metric, oracle in (("cer", char_error_rate), ("wer", word_error_rate)):
        scores = texts.score(metric, predictions, references)
        assert scores.means[metric] == pytest.approx(float(oracle(predictions, first)), abs=1e-6)
    edits = [slow_distance(tuple(a.split()), tuple(b.split())) for a, b in zip(predictions, first, strict=True)]
    assert scores.columns["wer_edits"].tolist() == edits
    assert scores.columns["wer"].tolist() == [n / len(text.split()) for n, text in zip(edits, first, strict=True)]
    assert texts.score("cer", ["", "x"], [[""], [""]]).means == {"cer": 1.0}  # of an empty reference


def test_of_several_references_the_nearest_counts() -> None:
    predictions, references = data(3)
    edits = texts.score("wer", predictions, references).columns["wer_edits"]
    pairs = zip(predictions, references, strict=True)
    assert edits.tolist() == [min(edit_distance(a.split(), b.split()) for b in several) for a, several in pairs]
    tied = texts.score("cer", ["ab"], [["a", "abc"]])  # one edit each: the longer one
    assert tied.columns["cer_length"].tolist() == [3]
    exact = texts.score("exact_match", ["b", "c"], [["a", "b"], ["a", "b"]])
    assert (exact.means["exact_match"], exact.columns["exact_match"].tolist()) == (0.5, [1.0, 0.0])


@pytest.mark.parametrize("metric", ["bleu", "chrf", "cer", "wer"])
def test_pseudovalues_have_the_score_as_their_mean_and_its_standard_error(metric: str) -> None:
    predictions, references = data(2, count=400)
    scores = texts.score(metric, predictions, references, confidence=0.6826895)
    values = scores.columns[f"{metric}{texts.PSEUDOVALUE}"]
    assert values.mean() == pytest.approx(scores.means[metric], abs=1e-9)
    low, high = scores.intervals[metric]  # of the bootstrap: about one standard error to either side
    assert values.std(ddof=1) / len(values) ** 0.5 == pytest.approx((high - low) / 2, rel=0.1)
    assert texts.score(metric, ["a b c d e"], [["a b c d e"]]).columns[f"{metric}{texts.PSEUDOVALUE}"].shape == (1,)


def test_what_is_too_long_depends_on_the_metric() -> None:
    assert texts.too_long(["bleu", "exact_match"], "a " * 50_000) == ""
    assert texts.too_long(["wer"], "a " * 50_000) == "50,000 words: wer compares at most 40,000"
    assert "ROUGE compares at most" in texts.too_long(["rouge"], "a " * 50_000)


@pytest.mark.parametrize("metric", texts.METRICS)
def test_likeness_is_between_0_and_1_and_1_for_what_is_the_same(metric: str) -> None:
    predictions, references = data(2)
    values = texts.likeness(metric, predictions, references)
    assert len(values) == len(predictions)
    assert values.min() >= 0
    assert values.max() <= 1
    same = texts.likeness(metric, ["a cat sat on the mat"], [["no", "a cat sat on the mat"]])
    assert same == pytest.approx([1.0])
