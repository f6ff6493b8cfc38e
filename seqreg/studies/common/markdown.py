"""Tables in Markdown."""

from __future__ import annotations

import re
from typing import Any

from seqreg.studies.common.findings import Table
from seqreg.workbench.text.escape import prose


def cell(value: Any) -> str:
    """A value of a table as text: two decimals for a score."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2g}"
    return str(value)


def markdown_table(table: Table) -> str:
    """A table of GitHub's kind; numbers are to the right.

    >>> print(markdown_table(Table("t", ["a", "b"], [["x|y", 1.5]])))
    | a | b |
    |---|--:|
    | x\\|y | 1.50 |
    """
    lines = [[prose(cell(value)) for value in row] for row in [table.columns, *table.rows]]
    rule = "|" + "|".join("--:" if right else "---" for right in numeric(table)) + "|"
    shown = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([shown[0], rule, *shown[1:]])


def numeric(table: Table) -> list[bool]:
    """Which columns hold numbers, or text that begins with one: intervals, shares, p values.

    >>> numeric(Table("t", ["a", "b", "c"], [["x", "1.2 to 3", None], ["2", "", "0.5"]]))
    [False, True, True]
    """
    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.columns)
    filled = [[str(value) for value in column if value not in (None, "")] for column in columns]
    return [all(re.match(r"[+-]?[\d.]+\b", text) for text in texts) for texts in filled]
