"""The rows, and the command in this process: its exit code, what it said, what it wrote."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import typer

from seqreg.cli import main as cli
from seqreg.workbench.config import run_config
from tests.helpers import sample_files

Promise = Literal["E", "W", "S", "H", "P"]
Does = Literal["refused", "warned", "skipped", "handled", "cannot occur"]
PROMISES = {
    "E": "refused before training, exit code 2, one line with the place and the fix, nothing written",
    "W": "a warning with numbers, and the run continues",
    "S": "left out and counted; stopped above a share",
    "H": "handled, with the right numbers",
    "P": "a promise of docs/reliability.md",
}


@dataclass(frozen=True)
class Row:
    """One kind of bad input.

    Args:
        promise: what we promise; see `PROMISES`
        does: what happens here
        note: what a reader should know, such as why it cannot occur
        test: the test that has the case, where it is not here
    """

    number: int
    title: str
    promise: Promise
    does: Does
    note: str = ""
    test: str = ""
    case: Callable[[Path], None] | None = None


ROWS: dict[int, Row] = {}
COMMAND = typer.main.get_command(cli.app)
"""The command, made once."""


def row(
    number: int, title: str, promise: Promise, does: Does, note: str = ""
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Put a case, which gets an empty folder, into the table."""

    def add(case: Callable[[Path], None]) -> Callable[[Path], None]:
        assert number not in ROWS
        ROWS[number] = Row(number, title, promise, does, note, case=case)
        return case

    return add


def elsewhere(number: int, title: str, promise: Promise, does: Does, test: str, note: str = "") -> None:
    """Put a row into the table whose case is a test of its own."""
    assert number not in ROWS
    ROWS[number] = Row(number, title, promise, does, note, test=test)


@dataclass(frozen=True)
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str


def run(folder: Path, *words: str | Path) -> Said:
    """The command in this process, with `folder` as the working directory."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as exits:
        exits.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        exits.enter_context(mock.patch.object(cli, "app", COMMAND))
        exits.enter_context(mock.patch.object(sys, "argv", ["seqreg", *map(str, words)]))
        exits.enter_context(mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}))
        exits.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        exits.enter_context(contextlib.redirect_stdout(out))
        exits.enter_context(contextlib.redirect_stderr(err))
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return Said(code, out.getvalue(), err.getvalue())


def tree(folder: Path) -> dict[str, int]:
    """All files below a folder, with their sizes."""
    return {str(path): path.lstat().st_size for path in folder.rglob("*")}


def refused(folder: Path, message: str, *words: str | Path) -> None:
    """The command says this in one line, exits with 2 and writes nothing."""
    before = tree(folder)
    said = run(folder, *words)
    assert said.code == 2, said
    (line,) = said.err.strip().splitlines()[-1:]
    assert line.startswith("seqreg: "), said.err
    assert re.search(message, line), line
    assert "Traceback" not in said.err
    assert tree(folder) == before


def tiny(folder: Path, *further: str, recipe: str = "gigaword", variant: str = "", verb: str = "train") -> list[str]:
    """The words of a command that trains one step of a tiny model on a few stories."""
    chosen = ["--variant", variant] if variant else []
    card = run_config.resolve(recipe, variants=chosen[1:]).card
    place = folder / "data"
    if not place.exists():
        sample_files.folder(place, card)
    architecture = "bart" if card.kind == "generation" else "roberta"
    if any(word.startswith(("model.name=", "model.architecture=")) for word in further):
        further = (*further, "model.vocab_size=320")
        base = [word for word in sample_files.tiny(architecture, place) if not word.startswith("model.")]
    else:
        base = sample_files.tiny(architecture, place)
    settings = [*base, "logging.tensorboard=false", f"output={folder / 'run'}"]
    return [verb, recipe, *chosen, *settings, *further]


@contextlib.contextmanager
def warned(message: str) -> Iterator[None]:
    """The block warns of this."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert any(re.search(message, str(one.message)) for one in caught), [str(one.message) for one in caught]
