"""What ROUGE counts, on texts that are already numbers: a token is an int, a text a list of sentences.

This file is also the program that a worker process runs (see `workers.py`). It therefore imports nothing but the
standard library's smallest parts, and starts in about 10 ms.

Every kind of ROUGE comes down to three whole numbers: hits, size of the prediction, size of the reference. Precision is
hits / predicted, recall is hits / wanted.
"""

from __future__ import annotations

import marshal
import sys
from itertools import chain

TYPE_CHECKING = False  # as in typing, which takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence
    from typing import IO, Any

Sentence = list[int]
Text = list[Sentence]
Example = tuple[Text, Text, Sentence]  # prediction, reference, source
Row = list[int]  # hits, predicted, wanted of every kind, then tokens, trigrams, distinct trigrams, bigrams, new bigrams

EXTRAS = 5  # the last five numbers of a Row


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


def places(tokens: Sequence[int]) -> dict[int, int]:
    """For every token the set of its positions, as the bits of an int."""
    masks: dict[int, int] = {}
    bit = 1
    for token in tokens:
        masks[token] = masks.get(token, 0) | bit
        bit <<= 1
    return masks


def lcs_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common subsequence.

    The table of the usual dynamic program is kept one column at a time, as bits: bit i is 0 where cell i+1 is one more
    than cell i (Hyyrö 2004, "Bit-parallel LCS-length computation revisited").
    """
    masks = places(first)
    full = (1 << len(first)) - 1
    column = full
    for token in second:
        if token in masks:
            steps = column & masks[token]
            column = (column + steps) | (column - steps)
    return len(first) - (column & full).bit_count()


def lcs_places(masks: dict[int, int], size: int, other: Sequence[int]) -> int:
    """The positions of a longest common subsequence in a sentence, as the bits of an int.

    The sentence comes as its `places` and its size. Of several longest subsequences this is the one that rouge-score
    reads from its table. From the last cell (i, j) it takes a match; else it goes one column back where t[i][j-1] >
    t[i-1][j], and one row up where not. Without a match t[i][j] is the larger of these two, so the test says
    t[i][j] > t[i-1][j], which is a bit of column j. The way up a column ends at the highest match or step
    below: one look a column.
    """
    full = (1 << size) - 1
    column = full
    columns: list[tuple[int, int]] = []  # of every token: where it matches, where the column steps up
    for token in other:
        matches = masks.get(token, 0)
        if matches:
            steps = column & matches
            column = ((column + steps) | (column - steps)) & full
        elif columns and not columns[-1][0]:
            continue  # the same column again, and a second look at it changes nothing
        columns.append((matches, column ^ full))
    found, below = 0, full
    for matches, steps in reversed(columns):
        stops = (matches | steps) & below
        if not stops:
            break
        bit = 1 << (stops.bit_length() - 1)
        if matches & bit:
            found |= bit
            below = bit - 1
        else:
            below = (bit << 1) - 1
    return found


def only_place(matches: int, last: bool) -> int:
    """`lcs_places` where one word of the other sentence matches: the first match, or the last if it is the `last` word.

    After the word's own column every column steps up at the first match, and the way back goes through there.
    """
    return 1 << (matches.bit_length() - 1) if last else matches & -matches


def union_hits(prediction: Text, reference: Text, predicted: Sequence[int]) -> int:
    """Hits of rougeLsum: words of the reference in its LCS with any sentence of the prediction, no word too often."""
    taken: list[int] = []
    present = set(predicted)
    for sentence in reference:
        if present.isdisjoint(sentence):
            continue
        masks, size, union = places(sentence), len(sentence), 0
        for other in prediction:
            shared = [token for token in other if token in masks]
            if len(shared) > 1:
                union |= lcs_places(masks, size, other)
            elif shared:
                union |= only_place(masks[shared[0]], other[-1] == shared[0])
        while union:
            size = union.bit_length() - 1
            taken.append(sentence[size])
            union ^= 1 << size
    return overlap(taken, predicted)


def count(example: Example, kinds: Sequence[str]) -> Row:
    """All the numbers of one example."""
    prediction, reference, source = example
    predicted, wanted = list(chain.from_iterable(prediction)), list(chain.from_iterable(reference))
    row: Row = []
    for kind in kinds:
        if kind == "rougeL":
            row += lcs_length(wanted, predicted), len(predicted), len(wanted)
        elif kind == "rougeLsum":
            row += union_hits(prediction, reference, predicted), len(predicted), len(wanted)
        else:
            n = int(kind[5:])
            hits = overlap(ngrams(predicted, n), ngrams(wanted, n))
            row += hits, max(len(predicted) - n + 1, 0), max(len(wanted) - n + 1, 0)
    trigrams, bigrams = max(len(predicted) - 2, 0), max(len(predicted) - 1, 0)
    row += len(predicted), trigrams, len(set(ngrams(predicted, 3)))
    known = set(ngrams(source, 2))
    row += bigrams, sum([pair not in known for pair in ngrams(predicted, 2)]) if source else bigrams
    return row


def count_all(examples: Iterable[Example], kinds: Sequence[str]) -> list[Row]:
    return [count(example, kinds) for example in examples]


def send(values: Any, sink: IO[bytes]) -> None:
    """Writes plain values (lists, tuples, ints, strings) after their length."""
    data = marshal.dumps(values)
    sink.write(len(data).to_bytes(8, "little") + data)
    sink.flush()


def receive(source: IO[bytes]) -> Any:
    """Reads what `send` wrote; EOFError at the end."""
    size = source.read(8)
    if len(size) < 8:
        raise EOFError
    return marshal.loads(source.read(int.from_bytes(size, "little")))


def serve() -> None:
    """A worker: answers (examples, kinds) with rows, in order, until its input ends."""
    while True:
        try:
            examples, kinds = receive(sys.stdin.buffer)
            send(count_all(examples, kinds), sys.stdout.buffer)
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            return


if __name__ == "__main__":
    serve()
