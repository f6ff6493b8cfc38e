"""Readers of local files: JSONL, JSON, CSV, TSV, Parquet and CoNLL, with the file and line of whatever is wrong."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput
from seqreg.workbench.text.atomic_files import regular

CONLL = ".conll"
ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", CONLL)
Record = dict[str, Any]
UTF8 = "utf-8"
LINE = 10_000_000
"""Bytes of a line, and characters of a text: a large book has a tenth of it."""
COLUMNS = 10_000
"""Of a table."""


def read(
    path: Path,
    *,
    ending: str | None = None,
    header: Sequence[str] = (),
    known: Collection[str] = (),
    mapping: Sequence[str] | None = None,
    delimiter: str | None = None,
    encoding: str = UTF8,
    options: str = "",
) -> Iterator[tuple[str, Record]]:
    """Every record of a file, with the place to name when it is wrong.

    Args:
        ending: of the format, where the name of the file does not tell
        header: names of the columns of a table whose first line has none of the `known` names: it is a record then
        mapping: names of the columns that keys and values of a single JSON object become
        delimiter: of a CSV file
        encoding: of a text file
        options: how the user gives the last two: "data." in a recipe, "--" to a command; "" where nobody can
    """
    ending = ending or path.suffix
    if ending not in ENDINGS:
        raise BadInput(f"{path}: cannot tell its format: expected a name that ends in {', '.join(ENDINGS)}")
    if delimiter is not None and ending != ".csv":
        raise BadInput(f"{path}: {options}delimiter={delimiter!r}: only CSV files have one to choose")
    try:
        if ending in (".csv", ".tsv"):
            yield from _table(cells(regular(path), ending, delimiter or ",", encoding), header, known)
        elif ending == ".json":
            yield from _json(regular(path), encoding, mapping)
        elif ending == ".jsonl":
            yield from _jsonl(regular(path), encoding)
        elif ending == CONLL:
            yield from _conll(regular(path), header, encoding)
        else:
            yield from _parquet(regular(path))
    except BadInput as error:
        if not options or not error.key or (error.key == "delimiter" and ending != ".csv"):
            raise
        raise BadInput(f"{error}: is there another {error.key}? Give {options}{error.key}") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or str(error).splitlines()[0]}") from None


def lines(path: Path, most: int = LINE, encoding: str = UTF8) -> Iterator[tuple[int, str]]:
    """The lines of a text file, from 1; `most` bytes each. A file that begins as UTF-16 does is read as that."""
    with path.open("rb") as file:
        marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        file.seek(0)
        number, wide = 0, marked or is_utf16(encoding)
        encoding = encoding if is_utf16(encoding) or not marked else "utf-16"
        source: Any = io.TextIOWrapper(file, encoding, newline="\n") if wide else file
        try:
            while line := source.readline(most + 1):
                number += 1
                if len(line) > most:
                    raise BadInput(f"{path}:{number}: a line of more than {most:,} bytes: is it text?")
                form = "utf-8-sig" if number == 1 and encoding == UTF8 else encoding
                yield number, line if wide else line.decode(form)
        except UnicodeDecodeError as error:
            fault = f"not {encoding.upper()} (byte {error.start + 1} of the line)"
            raise BadInput(f"{path}:{number + wide}: {fault}", key="encoding") from None


def is_utf16(encoding: str) -> bool:
    """Whether a character of a text is two bytes or four, so that lines are not found by their last byte.

    >>> is_utf16("UTF-16"), is_utf16("utf_16_le"), is_utf16("utf-8")
    (True, True, False)
    """
    return encoding.lower().replace("_", "-").startswith("utf-16")


def _unique(pairs: list[tuple[str, Any]]) -> Record:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key is there twice")
    return record


def _jsonl(path: Path, encoding: str) -> Iterator[tuple[str, Record]]:
    _, first = next(lines(path, encoding=encoding), (1, ""))
    return _json(path, encoding) if first.lstrip().startswith("[") else _objects(path, encoding)


def _objects(path: Path, encoding: str) -> Iterator[tuple[str, Record]]:
    for number, line in lines(path, encoding=encoding):
        where = f"{path}:{number}"
        if line.strip():
            try:
                record = json.loads(line, object_pairs_hook=_unique)
            except (ValueError, RecursionError) as error:
                raise BadInput(f"{where}: not a JSON object: {_fault(error)}") from None
            yield where, _object(record, where)


def _object(record: Any, where: str) -> Record:
    if not isinstance(record, dict):
        raise BadInput(f"{where}: expected a JSON object, not {type(record).__name__}")
    return record


def _fault(error: ValueError | RecursionError) -> str:
    """What is wrong with JSON; the line is known to the caller."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (character {error.colno} of the line)"
    return str(error).partition(":")[0]


def _json(path: Path, encoding: str, mapping: Sequence[str] | None = None) -> Iterator[tuple[str, Record]]:
    text = "".join(line for _, line in lines(path, path.stat().st_size, encoding))
    if not text.strip():
        return
    try:
        records = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        if path.suffix == ".json" and "Extra data" in str(error):  # JSON lines under another name
            yield from _objects(path, encoding)
            return
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise BadInput(f"{path}{line}: not JSON: {_fault(error)}") from None
    if isinstance(records, dict) and mapping is not None:
        for key, value in records.items():
            yield f"{path}: key {key[:80]!r}", {mapping[0]: key, mapping[1]: value}
        return
    if not isinstance(records, list):
        raise BadInput(f"{path}: expected a list of JSON objects, not {type(records).__name__}")
    for number, record in enumerate(records, start=1):
        where = f"{path}: row {number}"
        yield where, _object(record, where)


def json_list(text: str) -> Any:
    """What a cell of a table holds as JSON; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def are_texts(value: Any) -> bool:
    """Whether it is a list of texts, at least one."""
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _conll(path: Path, header: Sequence[str], encoding: str) -> Iterator[tuple[str, Record]]:
    """A word per line, its columns apart by tabs or spaces, and an empty line after a text: lists by column.

    Without a `header` the first column is "tokens" and the last one "tags"; those between have numbers. A comment, of
    "#" and several words, or "-DOCSTART-" is no word.
    """
    rows, first, names = list[list[str]](), 0, list(header)
    for number, line in itertools.chain(lines(path, encoding=encoding), [(0, "")]):
        cells = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
        if not any(cells):
            if rows:
                yield f"{path}:{first}", dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
            rows = []
            continue
        if cells[0] == "-DOCSTART-" or (line.startswith("# ") and not rows and len(cells) != len(names)):
            continue
        names = names or ["tokens", *(f"column_{place}" for place in range(2, len(cells))), "tags"]
        if len(cells) != len(names) or len(names) < 2:
            raise BadInput(f"{path}:{number}: {len(cells)} columns: expected {max(len(names), 2)}, a word and its tags")
        first = first if rows else number
        rows.append(cells)


def _table(
    rows: Iterator[tuple[str, list[str]]], header: Sequence[str], known: Collection[str]
) -> Iterator[tuple[str, Record]]:
    """Records from the cells of all lines."""
    where, names = next(rows, ("", []))
    if len(names) > COLUMNS:
        raise BadInput(f"{where}: {len(names):,} columns: at most {COLUMNS:,}")
    if len(names) == 1 != len(header) and any(sign in names[0] for sign in ",;\t|"):
        raise BadInput(f"{where}: one column, {names[0][:80]!r}", key="delimiter")
    if header and len(names) == len(header) and not set(names) & set(known):
        yield where, dict(zip(header, names, strict=True))
        names = list(header)
    for name, times in Counter(names).items():
        if times > 1:
            raise BadInput(f"{where}: two columns are called {name!r}")
    for where, cells in rows:
        if len(cells) != len(names):
            text = f"{where}: {len(cells)} cells, but the first line names {len(names)} columns"
            raise BadInput(text, key="delimiter")
        yield where, dict(zip(names, cells, strict=True))


def cells(path: Path, ending: str, delimiter: str, encoding: str) -> Iterator[tuple[str, list[str]]]:
    """Cells of every line: CSV with quotes; TSV without, as GLUE is distributed."""
    csv.field_size_limit(LINE)
    texts, tabs = (line for _, line in lines(path, encoding=encoding)), ending == ".tsv"
    way: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"delimiter": delimiter, "strict": True}
    reader = csv.reader(texts, **way)
    try:
        for row in reader:
            if row:
                yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        key = "delimiter" if "expected after" in str(error) else ""  # a quote that ends before the delimiter
        raise BadInput(f"{path}:{reader.line_num}: not {'TSV' if tabs else 'CSV'}: {error}", key=key) from None


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        if file.metadata.num_columns > COLUMNS:
            raise BadInput(f"{path}: {file.metadata.num_columns:,} columns: at most {COLUMNS:,}")
        batches = file.iter_batches(batch_size=1024)
        while (batch := next(batches, None)) is not None:
            rows = batch.to_pylist()
            yield from ((f"{path}: row {number + place}", row) for place, row in enumerate(rows, start=1))
            number += len(rows)
    except BadInput:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise BadInput(f"{path}: not Parquet after row {number}: {str(error).splitlines()[0]}") from None
