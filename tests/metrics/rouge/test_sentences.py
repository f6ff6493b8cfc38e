"""Our own sentence splitter, on what makes splitters fail."""

# ruff: noqa: RUF001 - quotation marks of all kinds

from __future__ import annotations

import time

import pytest

from seqreg.metrics.rouge.sentences import by_newline, by_rules


@pytest.mark.parametrize(
    "text",
    [
        "It rained.|We left.",
        "Really?!|Yes!|No.",
        "Mr. Smith met Dr. J. R. Jones at 10 St. James St. in Paris.|He left.",
        "It fell 3.5 percent to $1.20.|Shares of Acme Inc. rose.|Apple Inc.|The next line.",
        "He came at 5 p.m. Monday.|She left at 6 a.m.|The U.S. Army and the U.N. Council met in the U.S.|It rained.",
        '"Why?" she asked.|"Go away!" he said.|"I will."|She stayed.',
        "“Why?” she asked.|‘Never.’|He (a doctor.) laughed.|(He left.)|She stayed.",
        "Well ... maybe.|I wonder...|Perhaps not… or so.|Yes.",
        "See Fig. 3 and No. 5, pp. 3-4, e.g. Smith et al. 2019, i.e. this.|No.|That is all.",
        "1. Open the door.|2. Close it.",
        "the cat sat .|the dog ran .|mr. jones slept ?|yes .",
        'well ... maybe.|he said "why?" and left.|(so it was!)|yes.',
        "the cat sat. the dog ran.".replace(". t", ".|t"),
        "so do you and I.|The end.",
        "Visit example.com.|Then read a.b.org/x.html for more.",
        "Ph.D. students work.|In 1999.|2000 was better.",
        "東京は夜の七時。|「そうですか？」|はい！",
        "यह एक वाक्य है।|यह दूसरा है।",
        "¿Qué pasa?|¡Nada!|Élan vital.|Über alles.",
        "First line without a stop|second line",
        "No stop at the end",
    ],
)
def test_rules(text: str) -> None:
    wide = any(mark in text for mark in "。।")
    parts = text.split("|")
    assert by_rules(("\n" if "without a stop" in text else "" if wide else " ").join(parts)) == parts


def test_nothing_is_lost_or_kept_empty() -> None:
    assert by_rules("") == by_rules(" \n\n ") == []
    text = "A. B! C?\n\n...  D."
    assert "".join(by_rules(text)).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert by_newline("a\n\n b\n") == ["a", " b"]


@pytest.mark.parametrize("text", ["." * 200_000, ". " * 50_000, "a." * 100_000, '."' * 100_000, "Mr. " * 50_000])
def test_time_is_linear(text: str) -> None:
    start = time.process_time()
    by_rules(text + "x")
    assert time.process_time() - start < 3
