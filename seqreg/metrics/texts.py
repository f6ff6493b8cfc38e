"""Scores of generated texts: ROUGE, BLEU, chrF, exact match and error rates, against one reference or several."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from seqreg.metrics import bootstrap
from seqreg.metrics.edit_distance import SYMBOLS, edit_counts
from seqreg.metrics.rouge import score as rouge_score
from seqreg.metrics.rouge.score import KINDS, rouge
from seqreg.metrics.rouge.tokens import Tokenizer

Array = NDArray[Any]
References = Sequence[Sequence[str]]
TextMetricName = Literal["rouge", "bleu", "chrf", "exact_match", "cer", "wer"]
Tokenize = Literal["13a", "intl", "char", "zh", "none"]
PSEUDOVALUE = "_pseudovalue"
"""The end of the column of a score that is not a mean over examples; see `CorpusScore.pseudovalues`."""


@dataclass(frozen=True)
class TextMetric:
    """What is known about a metric of generated texts.

    Args:
        title: as people write it
        score: its number that decides between models
        names: all its numbers
        corpus: it is computed from sums over all examples, and is not the mean of scores of examples
        greater_is_better: false for error rates
    """

    title: str
    score: str
    names: tuple[str, ...]
    corpus: bool = False
    greater_is_better: bool = True


METRICS: Mapping[str, TextMetric] = {
    "rouge": TextMetric("ROUGE-L", "rougeL", KINDS),
    "bleu": TextMetric("BLEU", "bleu", ("bleu",), corpus=True),
    "chrf": TextMetric("chrF", "chrf", ("chrf",), corpus=True),
    "exact_match": TextMetric("exact match", "exact_match", ("exact_match",)),
    "cer": TextMetric("character error rate", "cer", ("cer",), corpus=True, greater_is_better=False),
    "wer": TextMetric("word error rate", "wer", ("wer",), corpus=True, greater_is_better=False),
}


def greater_is_better(score: str) -> bool:
    """Whether a larger number is a better one; of any score that a run has.

    >>> greater_is_better("rougeL"), greater_is_better("cer"), greater_is_better("accuracy")
    (True, False, True)
    """
    return score not in METRICS or METRICS[score].greater_is_better


def too_long(metrics: Sequence[str], text: str, words: Tokenizer = "rouge") -> str:
    """What is too much of a reference to be compared by one of some metrics; "" if nothing is."""
    if "rouge" in metrics and (fault := rouge_score.too_long(text, words)):
        return fault
    for metric, length in (("cer", len(text)), ("wer", len(text.split()))):
        if metric in metrics and length > SYMBOLS:
            return f"{length:,} {'characters' if metric == 'cer' else 'words'}: {metric} compares at most {SYMBOLS:,}"
    return ""


@dataclass(frozen=True)
class TextScores:
    """The numbers of one metric, as fractions.

    Args:
        means: by name, over all examples
        intervals: of the same names, by the bootstrap over examples
        columns: numbers of every example, by name
        signature: all that decides the numbers
    """

    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    columns: dict[str, Array]
    signature: str


@dataclass(frozen=True)
class CorpusScore:
    """A score that is a function of sums over examples.

    Args:
        table: what is summed      # [examples, statistics]
        score: from sums to a fraction
    """

    table: Array
    score: Callable[[Array], float]

    @property
    def value(self) -> float:
        return self.score(self.table.sum(0))

    def interval(self, confidence: float, resamples: int, seed: int = 0) -> tuple[float, float]:
        """The bootstrap interval: examples are drawn, their statistics are summed, and the score is computed anew."""
        size = len(self.table)
        chosen = itertools.chain.from_iterable(bootstrap.resamples(size, resamples, np.random.default_rng(seed)))
        draws = [self.score(np.bincount(indices, minlength=size) @ self.table) for indices in chosen]
        return bootstrap.percentile_intervals(np.array([draws]), confidence)[0]

    def pseudovalues(self) -> Array:
        """A number per example, whose mean is the score, and whose standard error is the jackknife's of the score.

        With `s` the score, `s_i` the score without example i, and m their mean, it is s + (n - 1) (m - s_i). Tests that
        take means over examples can be made with these, where one example alone has no score.      [examples]
        """
        n, total = len(self.table), self.table.sum(0)
        if n < 2:
            return np.array([self.value])
        without = np.array([self.score(total - row) for row in self.table])
        values: Array = self.value + (n - 1) * (without.mean() - without)
        return values


def score(
    metric: str,
    predictions: Sequence[str],
    references: References,
    *,
    sentences: Any = "newline",
    words: Tokenizer = "rouge",
    tokenize: Tokenize = "13a",
    confidence: float = 0.95,
    resamples: int = 1000,
) -> TextScores:
    """Score predictions, each against one or several references.

    Several references: of ROUGE, for each kind, the one with the largest F counts, as in rouge-score's `score_multi`;
    BLEU and chrF are sacrebleu's with several references; a prediction matches exactly if it is one of them; edits are
    those to the nearest.

    Args:
        metric: a key of `METRICS`
        sentences, words: of ROUGE, as `split` and `tokenizer` of `rouge`
        tokenize: sacrebleu's tokenizer for BLEU
        confidence, resamples: of the intervals

    Example:
        >>> scores = score("cer", ["kitten", "cat"], [["sitting"], ["cat", "cats"]])
        >>> round(scores.means["cer"], 3), scores.columns["cer_edits"].tolist()
        (0.3, [3, 0])
    """
    options: dict[str, Any] = {"confidence": confidence, "resamples": resamples}
    if metric == "rouge":
        report = rouge(predictions, references, split=sentences, tokenizer=words, **options)
        columns = {kind: scores[:, 2] for kind, scores in report.scores.items()}
        return TextScores(report.means, report.intervals, columns, report.signature)
    if metric == "exact_match":
        return _exact_match(predictions, references, **options)
    if metric in ("bleu", "chrf"):
        corpus, signature = _sacrebleu(metric, predictions, references, tokenize)
        columns = {}
    else:
        corpus = _error_rate(predictions, references, words=metric == "wer")
        signature = f"{metric}|nrefs={nrefs(references)}"
        edits, lengths = corpus.table.T
        columns = {metric: edits / np.maximum(lengths, 1), f"{metric}_edits": edits, f"{metric}_length": lengths}
    columns[f"{metric}{PSEUDOVALUE}"] = corpus.pseudovalues()
    return TextScores({metric: corpus.value}, {metric: corpus.interval(**options)}, columns, signature)


LIKENESS = {
    "rouge": "ROUGE-L", "bleu": "sentence chrF", "chrf": "sentence chrF", "exact_match": "exact match",
    "cer": "1 - character error rate", "wer": "1 - word error rate",
}  # fmt: skip
"""What `likeness` is for every metric."""


def likeness(
    metric: str, texts: Sequence[str], references: References, sentences: Any = "newline", words: Tokenizer = "rouge"
) -> Array:
    """How like its references every single text is, from 0 to 1: `LIKENESS`.

    BLEU of one sentence is nearly always 0 or smoothed, so texts of such a task are compared by chrF. An error rate
    above 1 counts as 1.

    >>> likeness("cer", ["abc", "x"], [["abd"], ["abc"]]).round(3).tolist()
    [0.667, 0.0]
    """
    if metric in ("bleu", "chrf"):
        from sacrebleu.metrics.chrf import CHRF

        scorer = CHRF()
        pairs = zip(texts, references, strict=True)
        return np.array([scorer.sentence_score(text, list(several)).score / 100 for text, several in pairs])
    if metric == "rouge":
        options: dict[str, Any] = {"split": sentences, "tokenizer": words, "resamples": 1}
        return rouge(texts, references, kinds=["rougeL"], **options).scores["rougeL"][:, 2]
    column = score(metric, texts, references, resamples=1).columns[metric]
    return column if METRICS[metric].greater_is_better else 1 - np.minimum(column, 1.0)


def nrefs(references: References) -> str:
    """How many references an example has, in sacrebleu's words: "var" where that differs."""
    sizes = {len(several) for several in references}
    return str(sizes.pop()) if len(sizes) == 1 else "var"


def _exact_match(
    predictions: Sequence[str], references: References, *, confidence: float, resamples: int
) -> TextScores:
    same = np.array([text in several for text, several in zip(predictions, references, strict=True)], dtype=np.float64)
    draws = bootstrap.resampled_means(same[None], resamples, np.random.default_rng(0))
    interval = bootstrap.percentile_intervals(draws, confidence)[0]
    signature = f"exact_match|nrefs={nrefs(references)}"
    return TextScores({"exact_match": float(same.mean())}, {"exact_match": interval}, {"exact_match": same}, signature)


def _error_rate(predictions: Sequence[str], references: References, *, words: bool) -> CorpusScore:
    """All edits over the length of all references."""
    return CorpusScore(
        edit_counts(predictions, references, words=words), lambda sums: float(sums[0]) / max(float(sums[1]), 1.0)
    )


def _sacrebleu(
    metric: str, predictions: Sequence[str], references: References, tokenize: Tokenize
) -> tuple[CorpusScore, str]:
    """sacrebleu's statistics of every example, its score of their sums, and its signature."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    scorer: Any = BLEU(tokenize=tokenize, force=True) if metric == "bleu" else CHRF()
    streams = list(itertools.zip_longest(*references))  # None where an example has fewer references
    value = scorer.corpus_score(predictions, streams).score
    table = np.array(scorer._extract_corpus_statistics(predictions, streams), dtype=np.int64)
    corpus = CorpusScore(table, lambda sums: float(scorer._compute_score_from_stats(sums.tolist()).score) / 100)
    if abs(100 * corpus.value - value) > 1e-9:  # its statistics have no public name
        raise RuntimeError(f"sacrebleu's {metric} is {value}, and {100 * corpus.value} from its statistics")
    return corpus, f"{metric}|{scorer.get_signature()}"
