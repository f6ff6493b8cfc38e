"""Noise in text: characters and words that are swapped, dropped, added or repeated.

What happens to a text depends on the text, the seed and the rate alone, so that every model is asked the same. What a
low rate hits, a higher one hits too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import partial

CHARACTERS = ("swap", "drop", "insert", "repeat")
WORDS = ("swap", "drop", "repeat")


def characters(text: str, rate: float, seed: int = 0, ways: Sequence[str] = CHARACTERS) -> str:
    """Hit every character that is no space with probability `rate`, in one of the ways, chosen at random.

    swap: with its neighbour in the word. insert: a letter of the same text comes after it.

    >>> characters("the cat sat on the mat", 0.2, seed=1)
    'et cat sat ono the mat'
    """
    rng = _rng("characters", seed, ways, text)
    letters = sorted({char for char in text if char.isalpha()}) or ["x"]
    plan = [(rng.random(), rng.choice(ways), rng.choice(letters)) for _ in text]
    found: list[str] = []
    place = 0
    while place < len(text):
        char, (chance, way, letter) = text[place], plan[place]
        following = text[place + 1 : place + 2]
        if chance >= rate or char.isspace():
            found.append(char)
        elif way == "swap" and following.strip():
            found += [following, char]
            place += 1
        elif way == "swap":  # the last of a word changes places with the one before
            found.insert(len(found) - (1 if found and not found[-1].isspace() else 0), char)
        elif way != "drop":
            found += [char, letter if way == "insert" else char]
        place += 1
    return _never_empty("".join(found), text)


def words(text: str, rate: float, seed: int = 0, ways: Sequence[str] = WORDS) -> str:
    """Hit every word with probability `rate`, in one of the ways, chosen at random; swap: with the next word."""
    rng = _rng("words", seed, ways, text)
    pieces = [*re.split(r"(\s+)", text), ""]
    tokens, gaps = pieces[::2], pieces[1::2]  # and what follows each
    plan = [(rng.random(), rng.choice(ways)) for _ in tokens]
    found: list[str] = []
    place = 0
    while place < len(tokens):
        token, gap, (chance, way) = tokens[place], gaps[place], plan[place]
        if chance >= rate or not token:
            found += [token, gap]
        elif way == "swap" and place + 1 < len(tokens):
            found += [tokens[place + 1], gap, token, gaps[place + 1]]
            place += 1
        elif way == "swap":
            found += [token, gap]
        elif way == "repeat":
            found += [token, " ", token, gap]
        place += 1
    return _never_empty("".join(found), text)


def shuffled(text: str, seed: int = 0) -> str:
    """The same words in another order."""
    pieces = re.split(r"(\s+)", text)
    places = [place for place in range(0, len(pieces), 2) if pieces[place]]
    order = list(places)
    _rng("shuffled", seed, (), text).shuffle(order)
    found = list(pieces)
    for place, other in zip(places, order, strict=True):
        found[place] = pieces[other]
    return "".join(found)


def _rng(kind: str, seed: int, ways: Sequence[str], text: str) -> random.Random:
    return random.Random(f"{kind} {seed} {' '.join(ways)} {text}")


def _never_empty(found: str, text: str) -> str:
    """A text of which nothing is left stays as it was."""
    return found if found.strip() else text


KINDS: dict[str, Callable[[str, float, int], str]] = {
    "characters": characters,
    "words": words,
    **{f"character-{way}": partial(characters, ways=(way,)) for way in CHARACTERS},
    **{f"word-{way}": partial(words, ways=(way,)) for way in WORDS},
}
"""By the names that the command knows; the first two mix all ways."""
