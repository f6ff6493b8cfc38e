"""Longest common subsequences for ROUGE-L and ROUGE-Lsum, on texts of token ids: a text is a list of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

Sentence = list[int]
Text = list[Sentence]
BREAK = -1  # between sentences; no token has this number


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


def union_hits(masks: dict[int, int], wanted: Sequence[int], reference: Text, prediction: Text) -> int:
    """Hits of rougeLsum: the words at the places of `union_lcs`, none more often than the prediction has it.

    Args:
        masks: the `places` of `wanted`, which is the reference, `joined`
    """
    fields, start = [], 0
    for sentence in reference:
        end = start + len(sentence)
        fields.append((1 << end) - (1 << start))
        start = end + 1
    union = union_lcs(masks, fields, prediction)
    often: dict[int, int] = {}
    while union:
        place = union.bit_length() - 1
        often[wanted[place]] = often.get(wanted[place], 0) + 1
        union ^= 1 << place
    hits = len(often)  # each is in the prediction once at least
    if any(count > 1 for count in often.values()):
        predicted = list(chain.from_iterable(prediction))
        hits += sum(min(count, predicted.count(token)) - 1 for token, count in often.items() if count > 1)
    return hits
