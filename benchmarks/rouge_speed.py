"""How fast `seqreg.metrics.rouge.score` is, beside rouge-score, on summaries of CNN/DailyMail's size."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from random import Random
from statistics import median

from seqreg.errors import BadInput
from seqreg.metrics.rouge.score import KINDS, RougeReport, rouge
from seqreg.metrics.rouge.tokens import stem_of

_ENDINGS = ("", "", "", "", "s", "s", "ed", "ing", "er", "ly", "ation", "ness", "ful", "ize")


def compare(
    pairs: int = 11490,
    words: tuple[int, int] = (60, 50),
    seed: int = 0,
    progress: bool = False,
    *,
    sample: int = 300,
    rounds: int = 3,
) -> dict[str, float]:
    """CPU seconds that rouge-score and ours take for the same corpus, with stemming, and how many times faster ours is.

    rouge-score scores `sample` pairs a round, and its time is scaled up to `pairs`; ours scores all of them and also
    computes intervals and counts. The two take turns, and the median of the rounds counts. Ours forgets its stems
    before every turn.

    Args:
        words: mean words of a prediction and of a reference

    Returns:
        `reference_seconds` (scaled), `seconds`, `ratio`, `pairs`, `sample`, and `equal`:
        1.0 if all numbers of the sample agree to the last bit
    """
    if pairs < 1 or sample < 1 or rounds < 1:
        raise BadInput(f"pairs={pairs}, sample={sample}, rounds={rounds}: each must be 1 or more")
    from rouge_score.rouge_scorer import RougeScorer

    predictions, references = corpus(pairs, words, seed)
    sample = min(sample, pairs)
    scorer = RougeScorer(list(KINDS), use_stemmer=True)

    def ours() -> RougeReport:
        stem_of.cache_clear()
        return rouge(predictions, references, split="newline", progress=progress)

    def theirs() -> list[list[tuple[float, ...]]]:
        scored = [scorer.score(references[i], predictions[i]) for i in range(sample)]
        return [[tuple(one[kind]) for one in scored] for kind in KINDS]

    rouge(["warm up"], ["warming up"])  # imports the stemmer
    turns = [[_seconds(theirs), _seconds(ours)] for _ in range(rounds)]  # [rounds, 2]
    reference, seconds = (median(times) for times in zip(*turns, strict=True))
    reference *= pairs / sample
    found = ours().scores
    equal = [[tuple(row) for row in found[kind][:sample].tolist()] for kind in KINDS] == theirs()
    return {
        "pairs": pairs,
        "sample": sample,
        "reference_seconds": reference,
        "seconds": seconds,
        "ratio": reference / seconds,
        "equal": float(equal),
    }


def corpus(pairs: int, words: tuple[int, int], seed: int) -> tuple[list[str], list[str]]:
    """Predictions and references of three or four lines, words by Zipf's law, about a third taken from the other."""
    random = Random(seed)
    vocabulary = [spoken_word(random, rank) for rank in range(30_000)]
    weights = list(accumulate(1 / (rank + 2.7) for rank in range(len(vocabulary))))

    def text(size: int, other: list[str]) -> list[str]:
        size = max(4, round(random.gauss(size, size / 4)))
        drawn = random.choices(vocabulary, cum_weights=weights, k=size)
        return [
            other[place] if place < len(other) and random.random() < 0.35 else drawn[place] for place in range(size)
        ]

    def lines(tokens: list[str]) -> str:
        count = random.choice((3, 4))
        cuts = [len(tokens) * place // count for place in range(count + 1)]
        return "\n".join(" ".join(tokens[a:b]).capitalize() + " ." for a, b in pairwise(cuts))

    wanted = [text(words[1], []) for _ in range(pairs)]
    predicted = [text(words[0], other) for other in wanted]
    return [lines(tokens) for tokens in predicted], [lines(tokens) for tokens in wanted]


def spoken_word(random: Random, rank: int) -> str:
    """A word that can be spoken; frequent ones are short, rare ones carry endings that a stemmer knows."""
    syllables = 1 if rank < 150 else random.choice((1, 2, 2, 3))
    spoken = "".join(random.choice("bcdfghlmnprstvw") + random.choice("aeiou") for _ in range(syllables))
    return spoken + random.choice("nrstl") + (random.choice(_ENDINGS) if rank >= 150 else "")


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
