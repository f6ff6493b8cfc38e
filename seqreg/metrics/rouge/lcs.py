"""N-gram and LCS counts of ROUGE, on texts of token ids: a text is a list of sentences.

Every kind of ROUGE comes down to three whole numbers: hits, size of the prediction, size of the reference. Precision is
hits / predicted, recall is hits / wanted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain

Sentence = list[int]
Text = list[Sentence]
Counts = list[int]  # hits, predicted, wanted of every kind, then the EXTRAS
EXTRAS = ("tokens", "trigrams", "distinct trigrams", "bigrams", "bigrams that the source does not have")
BREAK = -1  # between sentences; no token has this number


def ngrams(tokens: Sequence[int], n: int) -> Iterator[Hashable]:
    """The n-grams in order; the tokens themselves where n is 1."""
    return iter(tokens) if n == 1 else zip(*(tokens[start:] for start in range(n)), strict=False)


def overlap(first: Iterable[Hashable], second: Iterable[Hashable]) -> int:
    """How many items two bags share, each as often as it is in both."""
    first, second = list(first), list(second)
    distinct = set(first)
    if len(distinct) == len(first):  # nothing twice: a set will do, and most bags of bigrams are such
        return len(distinct.intersection(second))
    left: dict[Hashable, int] = {}
    for item in second:
        left[item] = left.get(item, 0) + 1
    hits = 0
    for item in first:
        remaining = left.get(item)
        if remaining:
            left[item] = remaining - 1
            hits += 1
    return hits


def joined(text: Text) -> Sentence:
    """All tokens of a text, with a BREAK after every sentence."""
    tokens: Sentence = []
    for sentence in text:
        tokens += sentence
        tokens.append(BREAK)
    return tokens


def places(tokens: Sequence[int]) -> dict[int, int]:
    """For every token the set of its positions, as the bits of an int."""
    masks: dict[int, int] = {}
    bit = 1
    for token in tokens:
        masks[token] = masks.get(token, 0) | bit
        bit <<= 1
    return masks


def lcs_length(masks: dict[int, int], size: int, other: Sequence[int]) -> int:
    """Length of the longest common subsequence of a text of `size` tokens, given as its `places`, and another.

    The table of the usual dynamic program is kept one column at a time, as bits: bit i is 0 where cell i+1 is one more
    than cell i (Hyyrö 2004, "Bit-parallel LCS-length computation revisited").
    """
    full = (1 << size) - 1
    column = full
    for token in other:
        if token in masks:
            steps = column & masks[token]
            column = (column + steps) | (column - steps)
    return size - (column & full).bit_count()


def union_lcs(masks: dict[int, int], fields: Sequence[int], prediction: Text) -> int:
    """Positions of the reference that are in an LCS of their sentence with a sentence of the prediction, as bits.

    The reference comes as its `places`; `fields` has the positions of each of its sentences. One pass fills the tables
    of all of them: the bit between two sentences is cleared, so that it takes up the carry.

    Of several longest subsequences the one counts that rouge-score reads from its table. From the last cell (i, j) it
    takes a match; else it goes one column back where t[i][j-1] > t[i-1][j], and one row up where not. Without a match
    t[i][j] is the larger of these two, so the test says t[i][j] > t[i-1][j], which is a bit of column j. The way up a
    column therefore ends at its highest match or step: one look a column.
    """
    inside, union = sum(fields), 0
    for sentence in prediction:
        column, known = inside, True
        columns: list[tuple[int, int]] = []  # of every token: where it matches, where it matches or the column steps
        for token in sentence:
            matches = masks.get(token, 0)
            if matches:
                steps = column & matches
                column = ((column + steps) | (column - steps)) & inside
                columns.append((matches, matches | (column ^ inside)))
                known = False
            elif not known:  # of the same column again, a second look changes nothing
                columns.append((0, column ^ inside))
                known = True
        columns.reverse()
        for below in fields:
            left = (below & ~column).bit_count()  # the length of the LCS
            for matches, stops in columns if left else ():
                top = 1 << ((stops & below).bit_length() - 1)
                if matches & top:
                    union |= top
                    below &= top - 1
                    left -= 1
                    if not left:
                        break
                else:
                    below &= 2 * top - 1
    return union


def union_hits(masks: dict[int, int], wanted: Sequence[int], prediction: Text, predicted: Sequence[int]) -> int:
    """Hits of rougeLsum: the words at the places of `union_lcs`, none more often than the prediction has it."""
    fields, start = [], 0
    for place, token in enumerate(wanted):
        if token == BREAK:
            fields.append((1 << place) - (1 << start))
            start = place + 1
    union = union_lcs(masks, fields, prediction)
    taken = []
    while union:
        place = union.bit_length() - 1
        taken.append(wanted[place])
        union ^= 1 << place
    return overlap(taken, predicted)


def count(prediction: Text, reference: Text, source: Sentence, kinds: Sequence[str]) -> Counts:
    """All the numbers of one example."""
    predicted, wanted = list(chain.from_iterable(prediction)), list(chain.from_iterable(reference))
    broken = joined(reference)
    masks = places(broken) if "rougeL" in kinds or "rougeLsum" in kinds else {}
    counts: Counts = []
    for kind in kinds:
        if kind == "rougeL":
            counts += lcs_length(masks, len(broken), predicted), len(predicted), len(wanted)
        elif kind == "rougeLsum":
            counts += union_hits(masks, broken, prediction, predicted), len(predicted), len(wanted)
        else:
            n = int(kind[5:])
            hits = overlap(ngrams(predicted, n), ngrams(wanted, n))
            counts += hits, max(len(predicted) - n + 1, 0), max(len(wanted) - n + 1, 0)
    trigrams, bigrams = max(len(predicted) - 2, 0), max(len(predicted) - 1, 0)
    counts += len(predicted), trigrams, len(set(ngrams(predicted, 3)))
    known = set(ngrams(source, 2))
    counts += bigrams, sum([pair not in known for pair in ngrams(predicted, 2)]) if source else bigrams
    return counts
