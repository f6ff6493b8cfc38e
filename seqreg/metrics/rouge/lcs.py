"""Longest common subsequences for ROUGE-L and ROUGE-Lsum, of many pairs at once.

The table of the usual dynamic program is kept one column at a time, as bits: bit i is 0 where cell i+1 is one more than
cell i (Hyyrö 2004, "Bit-parallel LCS-length computation revisited"). The columns of all pairs of a batch are one int,
pair after pair. The bit of a BREAK, between pairs and before every sentence, is cleared and takes up the carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from seqreg.metrics.rouge import ngrams
from seqreg.metrics.rouge.ngrams import BREAK, Ints, Texts

_FLIPPED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_CELLS = 1 << 22  # of all tables of a batch, a bit each
_NO_TOKEN = -2


def lcs_lengths(references: Texts, predictions: Texts) -> Ints:
    """The length of the longest common subsequence of every pair of texts without a BREAK.      [texts]"""
    lengths = np.zeros(len(references.sizes), np.int64)
    starts = np.cumsum(predictions.sizes) - predictions.sizes
    for pairs, wanted, tokens in _batches(references, predictions, starts, predictions.sizes):
        *_, (_, column) = _table(wanted, tokens)
        lengths[pairs] = (_cells(column, wanted, "little") < (wanted >= 0)).sum(axis=1)
    return lengths


def union_hits(references: Texts, predictions: Texts) -> Ints:
    """Hits of rougeLsum: the words of `_union_lcs`, none more often than the prediction has it.      [texts]"""
    taken = np.zeros(len(references.tokens), bool)
    breaks = np.flatnonzero(predictions.tokens == BREAK)
    sizes = np.diff(breaks, append=len(predictions.tokens)) - 1
    firsts = np.cumsum(references.sizes) - references.sizes
    for pairs, wanted, tokens in _batches(references, predictions, breaks + 1, sizes):
        rows, places = np.nonzero(_union_lcs(wanted, tokens))
        taken[firsts[pairs[rows]] + places] = True
    return ngrams.shared(references.only(taken), predictions.without_breaks(), 1)


def _union_lcs(wanted: Ints, tokens: Ints) -> NDArray[np.bool_]:
    """Which words of every reference are in an LCS of their sentence with the prediction's.      [pairs, width]

    Of several longest subsequences the one counts that rouge-score reads from its table. From the last cell (i, j) it
    takes a match; else it goes one column back where t[i][j-1] > t[i-1][j], and one row up where not. Without a match
    t[i][j] is the larger of these two, so the test says t[i][j] > t[i-1][j], which is a bit of column j. The way up a
    column therefore ends at its highest match or step.

    Here the first word is at the highest bit, so that a subtraction finds the next match or step of every sentence.
    """
    table = list(_table(wanted, tokens))
    inside = _int(wanted >= 0, "big")
    breaks = _int(wanted < 0, "big")
    last = inside & ~(inside << 1)  # word of every sentence
    left, union = inside, 0
    for matches, column in reversed(table):
        matches, column = _flip(matches, wanted), _flip(column, wanted)
        stops = (matches | (column ^ inside)) & left | breaks
        place = stops & ~(stops - last)  # the break before a sentence where it has no stop
        union |= place & matches
        left &= ~((place - last) | (place & matches))
    return _cells(union, wanted, "big")


def _table(wanted: Ints, tokens: Ints) -> Iterator[tuple[int, int]]:
    """For every token of the predictions, in turn, where it matches and the column."""
    inside = column = _int(wanted >= 0, "little")
    present = (tokens != _NO_TOKEN).sum(axis=0)
    for place, rows in enumerate(present.tolist()):
        matches = _int(wanted[:rows] == tokens[:rows, place, None], "little")
        steps = column & matches
        column = ((column + steps) | (column - steps)) & inside
        yield matches, column


def _batches(references: Texts, predictions: Texts, starts: Ints, sizes: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Pairs of a reference and a run of tokens of its prediction, of like size.

    Yields:
        the numbers of the texts; the references, filled up with BREAK; the runs, the longest first, filled up in front
    """
    runs = np.flatnonzero(sizes)
    runs = runs[references.sizes[predictions.owners[starts[runs]]] > 0]
    pairs = predictions.owners[starts[runs]]
    widths = references.sizes[pairs]
    alike = np.ceil(4 * np.log2(widths))
    order = np.lexsort((-sizes[runs], alike))
    firsts = np.cumsum(references.sizes) - references.sizes
    cuts = np.flatnonzero(np.diff(alike[order], prepend=-1, append=-1))
    for start, stop in pairwise(cuts.tolist()):
        width = (int(widths[order[start:stop]].max()) // 8 + 1) * 8  # whole bytes, with at least one BREAK
        while start < stop:
            steps = int(sizes[runs[order[start]]])
            chosen = order[start : min(stop, start + max(1, _CELLS // (width * steps)))]
            start += len(chosen)
            owners, run = pairs[chosen], runs[chosen]
            wanted = _filled(references.tokens, firsts[owners], 0, references.sizes[owners], width, BREAK)
            tokens = _filled(predictions.tokens, starts[run], sizes[run] - steps, sizes[run], steps, _NO_TOKEN)
            yield owners, wanted, tokens


def _filled(tokens: Ints, starts: Ints, shift: Ints | int, sizes: Ints, width: int, fill: int) -> Ints:
    """Runs of tokens as rows, filled up.      [rows, width]"""
    places = np.arange(width) + np.reshape(shift, (-1, 1))
    inside = (places >= 0) & (places < sizes[:, None])
    return np.where(inside, tokens[np.where(inside, places + starts[:, None], 0)], fill).astype(np.int32)


def _int(cells: NDArray[np.bool_], order: Literal["little", "big"]) -> int:
    return int.from_bytes(np.packbits(cells, bitorder=order).tobytes(), order)


def _cells(bits: int, like: Ints, order: Literal["little", "big"]) -> NDArray[np.bool_]:
    data = np.frombuffer(bits.to_bytes(like.size // 8, order), np.uint8)
    return np.unpackbits(data, bitorder=order).reshape(like.shape).astype(bool)


def _flip(bits: int, like: Ints) -> int:
    """The first bit last."""
    return int.from_bytes(bits.to_bytes(like.size // 8, "little").translate(_FLIPPED), "big")
