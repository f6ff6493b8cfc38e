"""The table of bad input: every row is there, and behaves as promised."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.bad_input import ROWS
from tests.bad_input.table import PROMISES

ROOT = Path(__file__).parents[2]


def test_every_row_is_there() -> None:
    assert sorted(ROWS) == list(range(1, 79))
    assert all(row.promise in PROMISES and row.title and (row.case or row.test) for row in ROWS.values())
    assert all(row.note for row in ROWS.values() if row.does == "cannot occur")


@pytest.mark.parametrize("number", [number for number in sorted(ROWS) if ROWS[number].case])
def test_row(number: int, tmp_path: Path) -> None:
    case = ROWS[number].case
    assert case is not None
    case(tmp_path)


@pytest.mark.parametrize("number", [number for number in sorted(ROWS) if ROWS[number].test])
def test_a_row_that_is_tested_elsewhere_is(number: int) -> None:
    path, _, name = ROWS[number].test.partition("::")
    tests = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    assert name in {node.name for node in tests if isinstance(node, ast.FunctionDef)}


def test_the_page_lists_every_row() -> None:
    text = (ROOT / "docs" / "bad_input.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M))
    for number, row in ROWS.items():
        cells = (row.title, row.promise, row.does, row.note)
        assert lines[str(number)] == " | ".join(cells), f"in docs/bad_input.md: | {number} | {' | '.join(cells)} |"
