"""How a finding is shown in a terminal, and how far a study has come."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Shown

from seqreg.errors import BadInput
from seqreg.studies.common.findings import FOLDER, Finding, Table, check_own
from seqreg.workbench.text.atomic_files import writable
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.progress import Bar, columns
from seqreg.workbench.text.terminal import console, print_json

Tell = Callable[[str], None]
"""Called after every batch, with what it was for."""


def place(folders: Sequence[Path], output: Path | None) -> Path:
    """Where a study of runs is written: in its run, or beside several of them; refuses a file in the way."""
    beside = {os.path.dirname(os.path.realpath(folder)) for folder in folders}
    if output is None and len(folders) > 1 and len(beside) > 1:
        raise BadInput("the runs are in different folders: say where to write with --output FOLDER")
    chosen = output or (folders[0] if len(folders) == 1 else folders[0].parent) / FOLDER
    writable(chosen, "--output ")
    check_own(chosen)
    for path in (chosen, *chosen.parents):
        if path.exists() and not path.is_dir():
            raise BadInput(f"--output {chosen}: {path} is a file and in the way: choose another")
    return chosen


def show(finding: Finding, where: Path, *, as_json: bool) -> None:
    """Print tables and sentences, or everything as JSON."""
    console.print(f"Numbers and figures are in {plain(where)}", soft_wrap=True)
    if as_json:
        print_json(asdict(finding))
        return
    out = Console(highlight=False, markup=False)
    out = out if out.is_terminal else Console(highlight=False, markup=False, width=120)
    for table in finding.tables:
        out.print(shown(table))
    for sentence in finding.summary:
        out.print(plain(sentence), soft_wrap=not out.is_terminal)


def shown(table: Table) -> Shown:
    """A table for the terminal: words to the left, numbers to the right."""
    found = Shown(title=plain(table.title))
    for place, name in enumerate(table.columns):
        words = any(isinstance(row[place], str) and not row[place][:1].isdigit() for row in table.rows)
        found.add_column(plain(name), justify="left" if words else "right", overflow="fold")
    for row in table.rows:
        found.add_row(*(plain(_digits(value)) for value in row))
    return found


def _digits(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Tell]:
    """A bar of so many batches on a terminal; elsewhere a line whenever the work changes."""
    with Progress(*columns(), console=console, disable=not console.is_terminal, transient=True) as bar:
        work, last = Bar(bar, "", steps, "batch"), [""]

        def tell(what: str) -> None:
            bar.update(work.task, description=what)
            work.what = what
            work.at(work.done + 1)
            if what != last[0] and not console.is_terminal:
                console.print(f"  {what}")
            last[0] = what

        yield tell
