"""Tables in Markdown."""

from __future__ import annotations

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
    """Which columns hold numbers."""
    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.columns)
    return [any(isinstance(value, (int, float)) for value in column) for column in columns]
