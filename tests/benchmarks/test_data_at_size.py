"""The measurement of data at size measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import data_at_size
from seqreg.errors import BadInput


def test_a_corpus_is_made_ready_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_at_size.write_corpus(tmp_path / "data", 30)
    first = data_at_size.prepare(tmp_path)
    monkeypatch.setattr(data_at_size.Encoded, "_write", None)  # nothing is tokenized again
    assert data_at_size.prepare(tmp_path) == first
    assert first["examples"] == 30
    assert 300 < first["tokens"] / 30 <= 1024  # articles that are cut at 1,024


def test_a_corpus_has_the_lengths_that_it_says() -> None:
    pairs = list(data_at_size._pairs(300, 0))
    assert pairs[:5] == list(data_at_size._pairs(5, 0)) != list(data_at_size._pairs(5, 1))
    words = [sum(len(texts[side].split()) for texts in pairs) / 300 for side in (0, 1)]
    assert words == [pytest.approx(660, rel=0.1), pytest.approx(47, rel=0.1)]


def test_a_disk_that_is_too_small_is_one_line() -> None:
    with pytest.raises(BadInput, match=r"--examples 100000000000: .* needs 2000000.0 GB of free disk: give fewer, or"):
        data_at_size.measure(10**11)


@pytest.mark.slow  # two processes import everything
def test_processes_measure_their_time_and_memory() -> None:
    readings = data_at_size.measure(40)
    assert list(readings) == ["first", "second"]
    first, second = readings.values()
    assert (first.digest, first.tokens) == (second.digest, second.tokens)
    for reading in (first, second):
        assert 2**26 < (reading.own_memory or 0) <= reading.memory
        assert reading.cpu_seconds >= reading.serial_seconds > 0
        assert reading.seconds > 0
