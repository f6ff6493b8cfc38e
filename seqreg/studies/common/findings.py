"""What a study found, in one form for all of them: a JSON file beside its figures."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console

from seqreg.errors import BadInput
from seqreg.workbench.text.atomic_files import ASIDE, inside, to_json, writable, write_text
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import console, print_json

FOLDER = "evidence"
"""In the folder of a run or of a comparison: the findings of later studies of it."""

BatchDone = Callable[[str], None]
"""Called after every batch, with what it was for."""


@dataclass(frozen=True)
class Table:
    """Numbers and words in columns; whoever shows it chooses the digits."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Finding:
    """One study and its result.

    Args:
        kind: the command that made it, such as "calibrate"; also the name of its file
        title: for a heading
        command: what repeats it
        summary: plain sentences, each a result with its numbers
        tables: for people
        figures: names of SVG or PNG files in the same folder
        values: all numbers, for programs
    """

    kind: str
    title: str
    command: str
    summary: list[str]
    tables: list[Table] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Finding:
        """Write it to `<kind>.json`."""
        _refuse_link(folder)
        write_text(folder / f"{self.kind}.json", to_json(asdict(self), indent=1, ensure_ascii=False) + "\n")
        return self

    @classmethod
    def read(cls, path: Path) -> Finding:
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**stored, "tables": [Table(**table) for table in stored["tables"]]})
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise BadInput(f"{path}: is not a finding of seqreg ({error})") from None

    def show(self, folder: Path, *, as_json: bool) -> None:
        """Print tables and sentences, or everything as JSON; `folder` is where it was written."""
        console.print(f"Numbers and figures are in {plain(folder)}", soft_wrap=True)
        if as_json:
            print_json(asdict(self))
            return
        out = Console(highlight=False, markup=False)
        out = out if out.is_terminal else Console(highlight=False, markup=False, width=120)
        for table in self.tables:
            out.print(terminal_table(table))
        for sentence in self.summary:
            out.print(plain(sentence), soft_wrap=not out.is_terminal)


def findings(folder: Path) -> list[Finding]:
    """All findings about a run or a comparison, by name."""
    paths = [path for path in (folder / FOLDER).glob("*.json") if not path.name.startswith(ASIDE)]
    return [Finding.read(inside(folder, f"{FOLDER}/{path.name}")) for path in sorted(paths)]


def command(*words: object) -> str:
    """A command line of seqreg."""
    return shlex.join(["seqreg", *map(str, words)])


def output_folder(folders: Sequence[Path], output: Path | None) -> Path:
    """Where a study of runs is written: in the run's folder, or beside several of them; refuses a file in the way."""
    parents = {os.path.dirname(os.path.realpath(folder)) for folder in folders}
    if output is None and len(parents) > 1:
        raise BadInput("the runs are in different folders: say where to write with --output FOLDER")
    chosen = output or (folders[0] if len(folders) == 1 else folders[0].parent) / FOLDER
    writable(chosen, "--output ")
    _refuse_link(chosen)
    for path in (chosen, *chosen.parents):
        if path.exists() and not path.is_dir():
            raise BadInput(f"--output {chosen}: {path} is a file and in the way: choose another")
    return chosen


def _refuse_link(folder: Path) -> None:
    """Refuse an `evidence` that is a symbolic link: what is written there would be in somebody else's folder."""
    if folder.name == FOLDER and folder.is_symlink():
        raise BadInput(f"{folder}: a symbolic link: remove it, or choose a folder with --output")


_NAME = 24
"""Characters up to which names in the first column of a table are kept on one line of a terminal."""


def terminal_table(table: Table) -> rich.table.Table:
    """A table for the terminal: words to the left, numbers to the right."""
    shown = rich.table.Table(title=plain(table.title))
    for place, name in enumerate(table.columns):
        words = any(isinstance(row[place], str) and not row[place][:1].isdigit() for row in table.rows)
        short = place == 0 and all(len(str(row[0])) <= _NAME for row in table.rows)  # a name that is typed again
        shown.add_column(plain(name), justify="left" if words else "right", overflow="fold", no_wrap=short)
    for row in table.rows:
        shown.add_row(*(plain(_digits(value)) for value in row))
    return shown


def _digits(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


@contextlib.contextmanager
def progress(batches: int) -> Iterator[BatchDone]:
    """A bar of so many batches on a terminal; elsewhere a line whenever the work changes."""
    from rich.progress import Progress

    from seqreg.workbench.text.progress import Bar, columns  # imports transformers

    with Progress(*columns(), console=console, disable=not console.is_terminal, transient=True) as bars:
        bar, last = Bar(bars, "", batches, "batch"), ""

        def batch_done(what: str) -> None:
            nonlocal last
            bars.update(bar.task, description=what)
            bar.what = what
            bar.at(bar.done + 1)
            if what != last and not console.is_terminal:
                console.print(f"  {what}")
            last = what

        yield batch_done
