"""YAML, read strictly, and layers of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seqreg.errors import BadInput
from seqreg.workbench.config import overlay


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("3E4", 3e4), ("-1.5e+3", -1500.0), (".5", 0.5), ("7", 7), ("1_000", 1000), ("true", True),
        ("no", "no"), ("on", "on"), ("010", 10.0), ("12:30", "12:30"), ("3.0.0", "3.0.0"), ("null", None), ("~", None),
        ("", None), ("[1, 2e1]", [1, 20.0]), ("2020-01-01", "2020-01-01"), ("'1e-5'", "1e-5"), ("1e", "1e"),
    ],
)  # fmt: skip
def test_plain_values(text: str, value: Any) -> None:
    found = overlay.parse(text, "here")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", r"here:2: the key 'a' is twice"),
        ("a: {b: 1, b: 2}", r"here:1: the key 'b' is twice"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("1: a", "the key 1 is not text"),
        ("a: !!python/object:os.system x", r"here:1: the tag '.*python/object:os.system' is not allowed"),
        ("[" * 5000, "here:1: more than 20 levels deep"),
        ("a: 1\x07", "here: unacceptable character"),
        ('a: "\\0"', "here:1: a text has a NUL"),
        ("a: " + "9" * 5000, "here: Exceeds the limit"),
        ("a: 1\nb: " + "9" * 400, "here:2: a whole number of more than 63 bits"),
        ("a: [1", r"here:1"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        overlay.parse(text, "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value", ["yes", "1e-5", "a: b", "<unk>", "\\bUNK\\b", "x\ny", " x", "", "null", "- a", "é", "#1 String", "3.0.0"]
)
def test_text_survives_a_round_trip(value: str) -> None:
    assert overlay.parse(overlay.dump({"key": [value, {"inner": value}]}), "here") == {"key": [value, {"inner": value}]}
    import yaml

    assert yaml.safe_load(overlay.dump({"key": value})) == {"key": value}


def test_numbers_survive_a_round_trip() -> None:
    values = {"a": 1e-5, "b": 3, "c": 1e20, "d": None, "e": True, "f": [], "g": {}}
    assert overlay.parse(overlay.dump(values), "here") == values


def test_later_layers_win_and_are_remembered() -> None:
    stack = overlay.Overlay()
    stack.add({"a": {"b": 1, "c": 2}, "d": 3}, "first")
    stack.add({"a": {"c": 4}}, "second")
    stack.set("a.e=[1, 2]")
    stack.set("w.x={schedule: warmup, steps: 3}")
    stack.set("w.x={schedule: every, k: 2}")
    assert stack.values == {"a": {"b": 1, "c": 4, "e": [1, 2]}, "d": 3, "w": {"x": {"schedule": "every", "k": 2}}}
    stack.set("optimisation.max_steps=3")
    stack.set("optimisation.lr_scheduler_type=constant")
    assert stack.values["optimisation"] == {"max_steps": 3, "lr_scheduler_type": "constant"}, (
        "a setting, not a weight's"
    )
    assert [stack.origin(key) for key in ("a.b", "a.c", "a.e", "d", "z")] == [
        "first", "second", "command line", "first", "defaults",
    ]  # fmt: skip


@pytest.mark.parametrize("assignment", ["a", "=1", "a..b=1", ".a=1"])
def test_assignments_need_a_key(assignment: str) -> None:
    with pytest.raises(BadInput, match="expected key=value"):
        overlay.Overlay().set(assignment)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for content, message in ((b"- 1", "expected a mapping"), (b"\xff", "not UTF-8"), (b"#" * 1_000_001, "larger")):
        path.write_bytes(content)
        with pytest.raises(BadInput, match=message):
            overlay.read(path)
    path.write_text("")
    assert overlay.read(path) == {}
