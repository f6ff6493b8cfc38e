"""Noise in text."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqreg.metrics.text_noise import CHARACTERS, KINDS, WORDS, characters, shuffled, words

LONG = " ".join(f"word{index} is here," for index in range(300))
texts = st.text(alphabet="abc, \n.äß東", max_size=60)


@given(texts, st.sampled_from(sorted(KINDS)), st.floats(0, 1), st.integers(0, 5))
def test_the_same_text_seed_and_rate_give_the_same(text: str, kind: str, rate: float, seed: int) -> None:
    found = KINDS[kind](text, rate, seed)
    assert found == KINDS[kind](text, rate, seed)
    assert KINDS[kind](text, 0.0, seed) == text
    assert bool(found.strip()) == bool(text.strip())


@pytest.mark.parametrize("kind", KINDS)
def test_more_is_hit_at_a_higher_rate_and_other_seeds_hit_others(kind: str) -> None:
    noise = KINDS[kind]
    short = LONG[:900]
    kept = [difflib.SequenceMatcher(None, short, noise(short, rate, 0), False).ratio() for rate in (0.05, 0.2, 0.5)]
    assert 1 > kept[0] > kept[1] > kept[2]
    assert noise(LONG, 0.1, 0) != noise(LONG, 0.1, 1)


def test_every_way_does_what_it_says() -> None:
    letters, tokens = len(LONG.replace(" ", "")), len(LONG.split())
    for rate in (0.1, 0.5):
        dropped, repeated, added, swapped = (
            characters(LONG, rate, ways=(way,)) for way in ("drop", "repeat", "insert", "swap")
        )
        assert len(LONG) - len(dropped) == pytest.approx(rate * letters, rel=0.1)
        assert len(repeated) - len(LONG) == pytest.approx(rate * letters, rel=0.1)
        assert len(added) - len(LONG) == pytest.approx(rate * letters, rel=0.1)
        assert sorted(swapped) == sorted(LONG)
        assert [len(word) for word in swapped.split(" ")] == [len(word) for word in LONG.split(" ")]
        dropped, repeated, swapped = (words(LONG, rate, ways=(way,)) for way in ("drop", "repeat", "swap"))
        assert tokens - len(dropped.split()) == pytest.approx(rate * tokens, rel=0.15)
        assert len(repeated.split()) - tokens == pytest.approx(rate * tokens, rel=0.15)
        assert sorted(swapped.split()) == sorted(LONG.split())
        assert swapped != LONG
    assert set(CHARACTERS) == {"swap", "drop", "insert", "repeat"}
    assert set(WORDS) == {"swap", "drop", "repeat"}


def test_what_a_low_rate_drops_a_higher_one_drops_too() -> None:
    few, many = (set(words(LONG, rate, ways=("drop",)).split()) for rate in (0.1, 0.3))
    assert many < few


@given(texts, st.integers(0, 3))
def test_shuffling_keeps_the_words_and_the_gaps(text: str, seed: int) -> None:
    found = shuffled(text, seed)
    assert sorted(found.split()) == sorted(text.split())
    assert len(found) == len(text)
    assert shuffled(text, seed) == found


def test_shuffling_changes_the_order() -> None:
    assert shuffled(LONG) != LONG
    assert shuffled(LONG) != shuffled(LONG, 1)
