"""ROUGE: the numbers of rouge-score to the last bit, many times faster, with intervals and a signature."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from seqreg.errors import BadInput, nearest
from seqreg.metrics.counts import EXTRAS, Example, Row, count_all
from seqreg.metrics.sentences import SPLITS, Split, choose_split
from seqreg.metrics.words import TOKENIZERS, Numbers, Tokenizer, loses_script
from seqreg.metrics.workers import can_start, count_parallel, processors

Scores = NDArray[np.float64]

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_ALL_KINDS = (*(f"rouge{n}" for n in range(1, 10)), "rougeL", "rougeLsum")
_CHUNK = 128  # examples that go to a worker at once
_ENOUGH = 500_000  # characters from which workers save more than their start costs


@dataclass(frozen=True)
class RougeReport:
    """What `rouge` found.

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
    references: Iterable[str],
    *,
    sources: Iterable[str] | None = None,
    kinds: Sequence[str] = KINDS,
    stem: bool = True,
    split: Split = "auto",
    tokenizer: Tokenizer = "rouge",
    jobs: int | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    progress: bool = False,
) -> RougeReport:
    """ROUGE of predictions against one reference each.

    Args:
        sources: the texts that the predictions were made from, for `counts["novelty"]`
        kinds: of rouge1 to rouge9, rougeL and rougeLsum
        stem: Porter's stems of words of more than three characters, as is usual for ROUGE
        split: how rougeLsum finds sentences: "newline", "punkt" (nltk's, where its data is installed), "rules" (our
            own), or "auto": newline if a text has several lines, else punkt if installed, else rules
        tokenizer: "rouge" (a-z and 0-9, as rouge-score) or "unicode" (every script)
        jobs: worker processes; None takes one a processor where there is enough to do, 1 takes none
        confidence: of the intervals
        resamples: of the bootstrap
        seed: of the bootstrap; no other random state is read or changed
        progress: show a bar

    Example:
        >>> report = rouge(["a cat sat on the mat"], ["the cat sat on a mat"], split="newline")
        >>> {kind: round(mean, 3) for kind, mean in report.means.items()}
        {'rouge1': 1.0, 'rouge2': 0.4, 'rougeL': 0.667, 'rougeLsum': 0.667}
    """
    kinds = _check_options(kinds, split, tokenizer, jobs, confidence, resamples, seed)
    texts = {"predictions": _texts("predictions", predictions), "references": _texts("references", references)}
    if sources is not None:
        texts["sources"] = _texts("sources", sources)
    size = _same_length(texts)
    if tokenizer == "rouge":
        _warn_of_scripts(texts["predictions"], texts["references"])
    used, splitter = ("none", _whole) if "rougeLsum" not in kinds else choose_split(split, _first_two(texts))
    chunks = _examples(texts, Numbers(tokenizer, stem), splitter)
    rows = np.array(list(_count(chunks, kinds, _workers(jobs, texts), size, progress)), dtype=np.int64)
    scores = {kind: _scores(rows[:, 3 * place : 3 * place + 3]) for place, kind in enumerate(kinds)}
    measures = np.stack([scores[kind][:, 2] for kind in kinds])
    return RougeReport(
        scores=scores,
        means={kind: float(scores[kind][:, 2].mean()) for kind in kinds},
        intervals=dict(zip(kinds, bootstrap_intervals(measures, confidence, resamples, seed), strict=True)),
        signature=f"rouge|v={version('rouge-score')}|stem={'yes' if stem else 'no'}|split={used}|tokenizer={tokenizer}",
        counts=_summary(rows[:, -EXTRAS:], with_sources=sources is not None),
    )


def bootstrap_intervals(values: Scores, confidence: float, resamples: int, seed: int) -> list[tuple[float, float]]:
    """Percentile intervals of the mean of every row; all rows see the same resamples.      values [kinds, n]"""
    generator = np.random.default_rng(seed)
    size = values.shape[1]
    means = np.empty((len(values), resamples))
    step = max(1, 1_000_000 // size)  # so that the indices stay within a few megabytes
    for start in range(0, resamples, step):
        stop = min(start + step, resamples)
        indices = generator.integers(0, size, size=(stop - start, size), dtype=np.int32)
        for row, out in zip(values, means, strict=True):
            out[start:stop] = row[indices].mean(1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=1)
    return [(float(one), float(other)) for one, other in zip(low, high, strict=True)]


def _scores(counted: NDArray[np.int64]) -> Scores:
    """Precision, recall and F from hits, predicted, wanted: [n, 3] -> [n, 3], in rouge-score's order of operations."""
    hits, predicted, wanted = counted.T
    precision, recall = hits / np.maximum(predicted, 1), hits / np.maximum(wanted, 1)
    total = precision + recall
    f = np.divide(2 * precision * recall, total, out=np.zeros_like(total), where=total > 0)
    return np.stack([precision, recall, f], axis=1)


def _summary(extras: NDArray[np.int64], with_sources: bool) -> dict[str, float]:
    tokens, trigrams, distinct, bigrams, new = extras.T
    summary = {
        "gen_len": float(tokens.mean()),
        "repetition": float(((trigrams - distinct) / np.maximum(trigrams, 1)).mean()),
        "empty": float((tokens == 0).sum()),
    }
    if with_sources:
        some = bigrams > 0
        summary["novelty"] = float((new[some] / bigrams[some]).mean()) if some.any() else 0.0
    return summary


def _examples(
    texts: dict[str, list[str]], numbers: Numbers, splitter: Callable[[str], list[str]]
) -> Iterator[list[Example]]:
    """The texts as numbers, a chunk at a time."""
    predictions, references, sources = texts["predictions"], texts["references"], texts.get("sources")

    def sentences(text: str) -> list[list[int]]:
        return [numbers.of(sentence) for sentence in splitter(text)]

    for start in range(0, len(predictions), _CHUNK):
        places = range(start, min(start + _CHUNK, len(predictions)))
        yield [
            (sentences(predictions[i]), sentences(references[i]), numbers.of(sources[i]) if sources else [])
            for i in places
        ]


def _count(
    chunks: Iterable[list[Example]], kinds: Sequence[str], jobs: int, size: int, progress: bool
) -> Iterator[Row]:
    from tqdm.auto import tqdm

    counted = count_parallel(chunks, kinds, jobs) if jobs > 1 else (count_all(chunk, kinds) for chunk in chunks)
    with tqdm(total=size, desc="ROUGE", unit="pair", disable=not progress) as bar:
        for rows in counted:
            bar.update(len(rows))
            yield from rows


def _workers(jobs: int | None, texts: dict[str, list[str]]) -> int:
    """How many worker processes to use; 1 means none."""
    most = -(-len(texts["predictions"]) // _CHUNK)
    if jobs is None:
        enough = sum(map(len, texts["predictions"])) + sum(map(len, texts["references"])) >= _ENOUGH
        jobs = processors() if enough and can_start() else 1
    return min(jobs, most)


def _whole(text: str) -> list[str]:
    return [text]


def _first_two(texts: dict[str, list[str]]) -> Iterator[str]:
    yield from texts["predictions"]
    yield from texts["references"]


def _warn_of_scripts(predictions: list[str], references: list[str]) -> None:
    lost = sum(loses_script(one) or loses_script(other) for one, other in zip(predictions, references, strict=True))
    if lost:
        warnings.warn(
            f"{lost} of {len(predictions)} examples are mostly in a script that rouge-score's tokenizer drops, which "
            f"scores even identical texts 0: take tokenizer='unicode' (seqreg rouge --tokenizer unicode; words: "
            "unicode in a task card)",
            stacklevel=3,
        )


def _texts(name: str, texts: Iterable[str]) -> list[str]:
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise BadInput(f"{name} is {type(texts).__name__} {texts!r:.40}: expected a list of strings, one an example")
    texts = list(texts)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise BadInput(f"{name}[{place}] is {text!r:.40}: expected a string ('' for an empty text)")
    if not texts:
        raise BadInput(f"{name} is empty: ROUGE needs at least one example")
    return texts


def _same_length(texts: dict[str, list[str]]) -> int:
    size = len(texts["predictions"])
    for name, values in texts.items():
        if len(values) != size:
            raise BadInput(f"{size} predictions but {len(values)} {name}: give one of {name} a prediction")
    return size


def _check_options(
    kinds: Sequence[str], split: str, tokenizer: str, jobs: int | None, confidence: float, resamples: int, seed: int
) -> tuple[str, ...]:
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not kinds or len(set(kinds)) < len(kinds):
        raise BadInput(f"kinds={kinds!r}: name each kind once, and at least one of {', '.join(KINDS)}")
    for kind in kinds:
        _check_name("kinds", kind, _ALL_KINDS)
    _check_name("split", split, SPLITS)
    _check_name("tokenizer", tokenizer, TOKENIZERS)
    if jobs is not None and not (_is_int(jobs) and jobs >= 1):
        raise BadInput(f"jobs={jobs!r}: expected a whole number from 1, or None for one a processor")
    if not (_is_int(resamples) and resamples >= 1):
        raise BadInput(f"resamples={resamples!r}: expected a whole number from 1; 1000 is the usual value")
    if not (_is_int(seed) and seed >= 0):
        raise BadInput(f"seed={seed!r}: expected a whole number from 0")
    if isinstance(confidence, bool) or not isinstance(confidence, (int, float)) or not 0 < confidence < 1:
        raise BadInput(f"confidence={confidence!r} is outside (0, 1): 0.95 is the usual value")
    return kinds


def _check_name(option: str, name: object, names: Sequence[str]) -> None:
    if name not in names:
        raise BadInput(f"{option}={name!r} is unknown: {nearest(str(name), names)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
