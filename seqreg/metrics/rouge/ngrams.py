"""N-grams of many texts of token ids at once: which they are, and how many two texts share.

A bag is a sorted array of keys, one for every n-gram of every text; a key is the number of the text and that of the
n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_LARGEST = 1 << 62
BREAK = -1  # before every sentence, where sentences count; no token has this number


@dataclass(frozen=True)
class Texts:
    """Texts of token ids, one after the other.

    Args:
        tokens: of all texts      # [all]
        owners: the number of the text of every token      # [all]
        sizes: how many tokens every text has      # [texts]
    """

    tokens: Ints
    owners: Ints
    sizes: Ints

    @classmethod
    def of(cls, tokens: Ints, sizes: Ints) -> Texts:
        return cls(tokens, np.repeat(np.arange(len(sizes)), sizes), sizes)

    @classmethod
    def joined(cls, parts: Sequence[Texts]) -> Texts:
        return cls.of(np.concatenate([part.tokens for part in parts]), np.concatenate([part.sizes for part in parts]))

    def take(self, texts: Ints) -> Texts:
        """Some of the texts, in their order."""
        chosen = np.zeros(len(self.sizes), bool)
        chosen[texts] = True
        return Texts.of(self.tokens[chosen[self.owners]], self.sizes[chosen])

    def only(self, chosen: NDArray[np.bool_]) -> Texts:
        """Some of the tokens, of as many texts."""
        owners = self.owners[chosen]
        return Texts(self.tokens[chosen], owners, np.bincount(owners, minlength=len(self.sizes)))

    def without_breaks(self) -> Texts:
        return self.only(self.tokens != BREAK)

    def windows(self, n: int) -> Ints:
        """How many n-grams every text has."""
        return np.maximum(self.sizes - n + 1, 0)


def bags(texts: Sequence[Texts], n: int) -> tuple[list[Ints], int]:
    """The keys of all n-grams of several sets of texts, sorted, and the divisor that gives the number of the text."""
    tokens = np.concatenate([some.tokens for some in texts])
    words, last = int(tokens.max(initial=0)) + 1, max(len(some.sizes) for some in texts)
    grams, base = tokens, words
    for start in range(1, n):
        if base * words * last >= _LARGEST:
            grams, base = _renumbered(grams)
        grams = grams * words + np.roll(tokens, -start)  # those that cross the end of a text are left out below
        base *= words
    if base * last >= _LARGEST:
        grams, base = _renumbered(grams)
    cuts = np.cumsum([0, *(len(some.tokens) for some in texts)])
    keys = []
    for some, start in zip(texts, cuts, strict=False):
        whole = max(len(some.tokens) - n + 1, 0)
        inside = some.owners[:whole] == some.owners[n - 1 :][:whole]
        key = some.owners[:whole] * base + grams[start : start + whole]
        keys.append(np.sort(key[inside]))
    return keys, base


def _renumbered(grams: Ints) -> tuple[Ints, int]:
    """The same n-grams by smaller numbers."""
    distinct, numbers = np.unique(grams, return_inverse=True)
    return numbers.astype(np.int64), len(distinct)


def shared(first: Texts, second: Texts, n: int) -> Ints:
    """How many n-grams each text shares with its counterpart, each as often as it is in both.      [texts]"""
    both, base = bags([first, second], n)
    (grams, often), (others, as_often) = map(_counted, both)
    place, there = _found(grams, others)
    hits = np.minimum(often[there], as_often[place[there]])
    return np.bincount(grams[there] // base, hits, len(first.sizes)).astype(np.int64)


def distinct(texts: Texts, n: int) -> Ints:
    """How many different n-grams every text has.      [texts]"""
    (keys,), base = bags([texts], n)
    return np.bincount(_counted(keys)[0] // base, minlength=len(texts.sizes))


def absent(texts: Texts, sources: Texts, n: int) -> Ints:
    """How many n-grams of every text its source does not have.      [texts]"""
    (keys, known), base = bags([texts, sources], n)
    _, there = _found(keys, known)
    return np.bincount(keys[~there] // base, minlength=len(texts.sizes))


def _counted(keys: Ints) -> tuple[Ints, Ints]:
    """The different ones of sorted keys, and how often each is there."""
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[begins], np.diff(begins, append=len(keys))


def _found(wanted: Ints, keys: Ints) -> tuple[Ints, NDArray[Any]]:
    """Where each is in sorted keys, and whether it is."""
    if not len(keys):
        return np.zeros_like(wanted), np.zeros(len(wanted), bool)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return place, keys[place] == wanted
