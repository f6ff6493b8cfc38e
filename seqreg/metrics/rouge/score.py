"""ROUGE: the numbers of rouge-score to the last bit, many times faster, with intervals and a signature.

Every kind of ROUGE comes down to three whole numbers: hits, size of the prediction, size of the reference. Precision is
hits / predicted, recall is hits / wanted.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqreg.errors import BadInput, nearest
from seqreg.metrics.bootstrap import percentile_intervals, resampled_means
from seqreg.metrics.rouge import ngrams
from seqreg.metrics.rouge.lcs import lcs_lengths, union_hits
from seqreg.metrics.rouge.ngrams import Ints, Texts
from seqreg.metrics.rouge.sentences import SPLITS, Split, choose_split
from seqreg.metrics.rouge.tokens import TOKENIZERS, WORDS, Tokenizer, Vocabulary, loses_script

Scores = NDArray[np.float64]

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_ALL_KINDS = (*(f"rouge{n}" for n in range(1, 10)), "rougeL", "rougeLsum")
_RESAMPLES = 100_000
_PAIRS = 4096  # that are compared at once
_TEXT, _TOKENS, _WORD = 1_000_000, 40_000, 50_000  # characters, words of a text, and characters of a word


@dataclass(frozen=True)
class RougeReport:
    """The result of `rouge`.

    Attributes:
        scores: of every kind, precision, recall and F of every example       # [n, 3]
        means: of every kind, the mean F, from 0 to 1
        intervals: of every kind, the bootstrap percentile interval of the mean F
        signature: all that decides the numbers
        counts: `gen_len`, mean tokens of a prediction; `repetition`, share of trigrams that a prediction has already
            used, mean over predictions; `empty`, predictions without a token; with sources also `novelty`, share of
            bigrams that are not in the source, mean over predictions with at least two tokens
    """

    scores: dict[str, Scores]
    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    signature: str
    counts: dict[str, float]

    def __str__(self) -> str:
        lines = [
            f"{kind:<10}{100 * mean:6.2f}  [{100 * self.intervals[kind][0]:.2f}, {100 * self.intervals[kind][1]:.2f}]"
            for kind, mean in self.means.items()
        ]
        return "\n".join([*lines, self.signature])


def rouge(
    predictions: Iterable[str],
    references: Iterable[str | Sequence[str]],
    *,
    sources: Iterable[str] | None = None,
    kinds: Sequence[str] = KINDS,
    stem: bool = True,
    split: Split = "auto",
    tokenizer: Tokenizer = "rouge",
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    progress: bool = False,
) -> RougeReport:
    """ROUGE of predictions against one reference each, or several.

    Of several references, for each kind, the first with the largest F counts, as in rouge-score's `score_multi`.

    Args:
        references: a text per prediction, or a list of them
        sources: the texts that the predictions were made from, for `counts["novelty"]`
        kinds: of rouge1 to rouge9, rougeL and rougeLsum
        stem: Porter's stems of words of more than three characters, as is usual for ROUGE
        split: how rougeLsum finds sentences: "newline", "punkt" (nltk's, where its data is installed), "rules" (our
            own), or "auto": newline if a text has several lines, else punkt if installed, else rules
        tokenizer: "rouge" (a-z and 0-9, as rouge-score) or "unicode" (every script)
        confidence: of the intervals
        resamples: of the bootstrap
        seed: of the bootstrap; no other random state is read or changed
        progress: show a bar

    Example:
        >>> report = rouge(["a cat sat on the mat"], ["the cat sat on a mat"], split="newline")
        >>> {kind: round(mean, 3) for kind, mean in report.means.items()}
        {'rouge1': 1.0, 'rouge2': 0.4, 'rougeL': 0.667, 'rougeLsum': 0.667}
    """
    from tqdm.auto import tqdm

    kinds = _check_options(kinds, split, tokenizer, confidence, resamples, seed)
    several, sizes = _several(references)
    texts = {"predictions": predictions, "references": several} | ({} if sources is None else {"sources": sources})
    checked = {name: _texts(name, values, tokenizer) for name, values in texts.items()}
    lengths = {name: len(sizes if name == "references" else values) for name, values in checked.items()}
    for name, length in lengths.items():
        if length != lengths["predictions"]:
            raise BadInput(f"{lengths['predictions']} predictions but {length} {name}: give one of {name} a prediction")
    owners = np.repeat(np.arange(len(sizes)), sizes)  # the prediction of every reference
    pairs = [(checked["predictions"][owner], text) for owner, text in zip(owners, checked["references"], strict=True)]
    if tokenizer == "rouge":
        _warn_of_scripts(pairs)
    lsum = "rougeLsum" in kinds
    every = itertools.chain(checked["predictions"], checked["references"])
    used, splitter = choose_split(split, every) if lsum else ("none", _unsplit)
    vocabulary = Vocabulary(tokenizer, stem)
    parts: list[tuple[Texts, Texts]] = []
    hits: dict[str, list[Ints]] = {kind: [] for kind in kinds}
    with tqdm(desc="ROUGE", total=len(pairs), unit="pair", disable=not progress) as bar:
        for start in range(0, len(pairs), _PAIRS):
            both = list(zip(*pairs[start : start + _PAIRS], strict=True))
            prediction, reference = (vocabulary.encode(list(map(splitter, some))) for some in both)
            parts.append((prediction.without_breaks(), reference.without_breaks()))
            for kind in kinds:
                if kind == "rougeLsum":
                    hits[kind].append(union_hits(reference, prediction))
                elif kind == "rougeL":
                    hits[kind].append(lcs_lengths(*parts[-1]))
                else:
                    hits[kind].append(ngrams.shared(*parts[-1], int(kind[5:])))
            bar.update(len(both[0]))
    first, second = map(Texts.joined, zip(*parts, strict=True))
    starts = np.cumsum([0, *sizes[:-1]])
    scores = {}
    for kind in kinds:
        n = int(kind[5:]) if kind[5:].isdecimal() else 1
        of_pairs = _scores(np.concatenate(hits[kind]), first.windows(n), second.windows(n))
        scores[kind] = _best(of_pairs, starts, sizes)
    examples = first.take(starts)
    known = None if sources is None else vocabulary.encode([[source] for source in checked["sources"]]).without_breaks()
    means = resampled_means(np.stack([scores[kind][:, 2] for kind in kinds]), resamples, np.random.default_rng(seed))
    return RougeReport(
        scores=scores,
        means={kind: float(scores[kind][:, 2].mean()) for kind in kinds},
        intervals=dict(zip(kinds, percentile_intervals(means, confidence), strict=True)),
        signature=f"rouge|v={version('rouge-score')}|stem={'yes' if stem else 'no'}|split={used}|tokenizer={tokenizer}"
        + ("" if max(sizes) == 1 else f"|nrefs={max(sizes) if len(set(sizes)) == 1 else 'var'}"),
        counts=_summary(examples, known),
    )


def _several(references: Iterable[str | Sequence[str]]) -> tuple[Any, list[int]]:
    """All references one after the other, and how many every example has."""
    if isinstance(references, (str, bytes)) or not isinstance(references, Iterable):
        return references, []  # `_texts` says what is wrong with it
    listed = list(references)
    groups = [list(some) if isinstance(some, (list, tuple)) else [some] for some in listed]
    for place, group in enumerate(groups):
        if not group:
            raise BadInput(f"references[{place}] is an empty list: expected at least one reference")
    return list(itertools.chain.from_iterable(groups)), [len(group) for group in groups]


def _best(scores: Scores, starts: NDArray[Any], sizes: Sequence[int]) -> Scores:
    """Of the references of every example the first with the largest F.      [pairs, 3] -> [examples, 3]"""
    if len(scores) == len(starts):
        return scores
    chosen = [start + int(scores[start : start + size, 2].argmax()) for start, size in zip(starts, sizes, strict=True)]
    return scores[chosen]


def _scores(hits: Ints, predicted: Ints, wanted: Ints) -> Scores:
    """Precision, recall and F, in rouge-score's order of operations.      [n, 3]"""
    precision, recall = hits / np.maximum(predicted, 1), hits / np.maximum(wanted, 1)
    total = precision + recall
    f = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
    return np.stack([precision, recall, f], axis=1)


def _summary(predictions: Texts, sources: Texts | None) -> dict[str, float]:
    trigrams, bigrams = predictions.windows(3), predictions.windows(2)
    summary = {
        "gen_len": float(predictions.sizes.mean()),
        "repetition": float(((trigrams - ngrams.distinct(predictions, 3)) / np.maximum(trigrams, 1)).mean()),
        "empty": float((predictions.sizes == 0).sum()),
    }
    if sources is not None:
        new, some = ngrams.absent(predictions, sources, 2), bigrams > 0
        summary["novelty"] = float((new[some] / bigrams[some]).mean()) if some.any() else 0.0
    return summary


def _unsplit(text: str) -> list[str]:
    return [text]


def _warn_of_scripts(pairs: list[tuple[str, str]]) -> None:
    lost = sum(any(map(loses_script, pair)) for pair in pairs)
    if lost:
        warnings.warn(
            f"{lost} of {len(pairs)} examples are mostly in a script that rouge-score's tokenizer drops, which "
            f"scores even identical texts 0: take tokenizer='unicode' (seqreg rouge --tokenizer unicode; words: "
            "unicode in a task card)",
            stacklevel=3,
        )


def too_long(text: str, tokenizer: Tokenizer = "rouge") -> str:
    """What is too much of a text to be compared, whose cost grows with the square of its words; "" if nothing is."""
    if len(text) <= 8000:
        return ""
    if len(text) > _TEXT:
        return f"{len(text):,} characters: ROUGE compares at most {_TEXT:,}"
    words = WORDS[tokenizer](text)
    longest = max(map(len, words), default=0)
    if longest > _WORD:
        return f"a word of {longest:,} characters: is it text? At most {_WORD:,}"
    return f"{len(words):,} words: ROUGE compares at most {_TOKENS:,}" if len(words) > _TOKENS else ""


def _texts(name: str, texts: Iterable[str], tokenizer: Tokenizer) -> list[str]:
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise BadInput(f"{name} is {type(texts).__name__} {texts!r:.40}: expected a list of strings, one per example")
    texts = list(texts)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadInput(f"{name}[{place}] is {text!r:.40}: expected a string ('' for an empty text)")
        if name != "sources" and (fault := too_long(text, tokenizer)):
            raise BadInput(f"{name}[{place}] has {fault}")
    if not texts:
        raise BadInput(f"{name} is empty: ROUGE needs at least one example")
    return texts


def _check_options(
    kinds: Sequence[str], split: str, tokenizer: str, confidence: float, resamples: int, seed: int
) -> tuple[str, ...]:
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not kinds or len(set(kinds)) < len(kinds):
        raise BadInput(f"kinds={kinds!r}: name each kind once, and at least one of {', '.join(KINDS)}")
    for option, name, names in (
        *(("kinds", kind, _ALL_KINDS) for kind in kinds), ("split", split, SPLITS), ("tokenizer", tokenizer, TOKENIZERS)
    ):  # fmt: skip
        if name not in names:
            raise BadInput(f"{option}={name!r} is unknown: {nearest(str(name), names)}")
    if isinstance(resamples, bool) or not isinstance(resamples, int) or not 1 <= resamples <= _RESAMPLES:
        raise BadInput(f"resamples={resamples!r}: expected a whole number from 1 to {_RESAMPLES}; 1000 is usual")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise BadInput(f"seed={seed!r}: expected a whole number from 0")
    if isinstance(confidence, bool) or not isinstance(confidence, (int, float)) or not 0 < confidence < 1:
        raise BadInput(f"confidence={confidence!r} is outside (0, 1): 0.95 is the usual value")
    return kinds
