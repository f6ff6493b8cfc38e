"""What the methods wrote, side by side, with what differs from the reference marked."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from seqreg.studies.compare.results import Gathered

Piece = tuple[str, bool]
"""Some words, and whether they differ."""


@dataclass(frozen=True)
class Output:
    """One text of a method, in pieces, with its score."""

    method: str
    seed: int
    pieces: list[Piece]
    score: float


@dataclass(frozen=True)
class Sample:
    """One example, and what every method and seed made of it."""

    index: int
    reference: str
    outputs: list[Output]


def marked(text: str, reference: str) -> list[Piece]:
    """A text in pieces: words in the order of the reference, and words that are not.

    >>> marked("the cat sat", "the dog sat")
    [('the ', False), ('cat ', True), ('sat', False)]
    """
    words, wanted = (re.findall(r"\S+\s*", one) for one in (text, reference))
    plain = [[word.strip().lower() for word in one] for one in (words, wanted)]
    found = difflib.SequenceMatcher(None, plain[0], plain[1], autojunk=False)
    return [("".join(words[a:b]), kind != "equal") for kind, a, b, _, _ in found.get_opcodes() if b > a]


def samples(found: Gathered, count: int = 8) -> list[Sample]:
    """Half of them the first examples, half those on which the methods' first seed differs most."""
    if not found.texts:
        return []
    methods = [method for method in found.methods.values() if method.rows]
    firsts = [next(iter(method.rows.values())) for method in methods]
    places = range(len(firsts[0]))
    spread = [
        max(rows[i][found.metric] for rows in firsts) - min(rows[i][found.metric] for rows in firsts) for i in places
    ]
    apart = sorted(places, key=lambda place: -spread[place])
    chosen = list(dict.fromkeys([*places[: count // 2], *apart]))[:count]
    return [_sample(found, place) for place in chosen]


def _sample(found: Gathered, place: int) -> Sample:
    methods = [method for method in found.methods.values() if method.rows]
    reference = str(next(iter(methods[0].rows.values()))[place]["reference"])
    outputs = [
        Output(method.name, seed, marked(str(rows[place]["prediction"]), reference), 100 * rows[place][found.metric])
        for method in methods
        for seed, rows in method.rows.items()
    ]
    return Sample(place, reference, outputs)
