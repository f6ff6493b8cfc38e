"""The form of a file that nobody has described: its encoding, and of a CSV file the delimiter and the header."""

from __future__ import annotations

import codecs
import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from seqreg.errors import BadInput
from seqreg.workbench.text import readers
from seqreg.workbench.text.atomic_files import regular

DELIMITERS = (",", ";", "\t", "|")
LOOKED_AT = 200
"""Records that a delimiter is tried on."""
TITLE = 60
"""Characters of the longest name of a column."""
_BINARY = (".parquet",)


@dataclass(frozen=True)
class FileForm:
    """How a file is written; what is None or empty is as everywhere: a comma, and a header in the file."""

    encoding: str = readers.UTF8
    delimiter: str | None = None
    header: tuple[str, ...] = ()

    @property
    def values(self) -> dict[str, object]:
        """The key `files` of a card."""
        form = {"delimiter": self.delimiter, "encoding": self.encoding, "header": list(self.header)}
        return {key: value for key, value in form.items() if value and value != readers.UTF8}


def sniff(path: Path, delimiter: str | None = None, encoding: str | None = None) -> FileForm:
    """The form of a file; what is given counts, and the rest is found out."""
    if path.suffix in _BINARY or path.suffix not in readers.ENDINGS:
        return FileForm(encoding or readers.UTF8, delimiter)
    known = encoding or encoding_of(path)
    if path.suffix != ".csv" or delimiter is not None:
        return FileForm(known, delimiter, _header(path, known, delimiter) if path.suffix == ".csv" else ())
    rows = {mark: _rows(path, known, mark) for mark in DELIMITERS}
    best = max(DELIMITERS, key=lambda mark: (min(map(len, rows[mark]), default=0) > 1, _regularity(rows[mark])))
    if len(max(rows[best], key=len, default=[])) < 2:
        best = ","  # a table of one column, or one that no delimiter explains: whoever reads it says what is wrong
    return FileForm(known, None if best == "," else best, _header(path, known, best))


def encoding_of(path: Path) -> str:
    """UTF-16 or UTF-8 where all bytes of a text file are that; else the encoding of Windows, or latin-1."""
    with regular(path).open("rb") as file:
        start = file.read(4096)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if start.count(0) > len(start) // 5:  # every other byte of Latin letters, on the side of the higher one
        return "utf-16-le" if start[1::2].count(0) > start[::2].count(0) else "utf-16-be"
    return next((name for name in (readers.UTF8, "cp1252") if _decodes(path, name)), "latin-1")


def _decodes(path: Path, encoding: str) -> bool:
    try:
        with path.open(encoding=encoding, newline="") as file:
            while file.read(1 << 20):
                pass
    except UnicodeDecodeError:
        return False
    return True


def _rows(path: Path, encoding: str, delimiter: str) -> list[list[str]]:
    """The cells of the first lines; none where they cannot be read so, of which the reader of the file says more."""
    try:
        cells = readers.cells(path, ".csv", delimiter, encoding)
        return [row for _, row in itertools.islice(cells, LOOKED_AT)]
    except BadInput:
        return []


def _regularity(rows: list[list[str]]) -> tuple[float, int]:
    """The share of the lines that have as many cells as most, and this number."""
    ((width, times),) = Counter(map(len, rows)).most_common(1) or [(0, 0)]
    return times / max(len(rows), 1), width


def _header(path: Path, encoding: str, delimiter: str | None) -> tuple[str, ...]:
    """Letters for the columns where the first line is a record: a cell is a number, empty, long or repeated."""
    first = next(iter(_rows(path, encoding, delimiter or ",")), [])
    names = [cell.strip() for cell in first]
    is_title = all(name and len(name) <= TITLE and "\n" not in name and not _is_number(name) for name in names)
    if len(first) < 2 or (is_title and len(set(names)) == len(names)):
        return ()
    letters = (*ascii_uppercase, *map("".join, itertools.product(ascii_uppercase, repeat=2)))  # as spreadsheets have it
    return letters[: len(first)]


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True
