"""Rows of local files: JSONL, JSON, CSV, TSV and Parquet, with the file and line of whatever is wrong."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
Row = dict[str, Any]


def read(path: Path) -> Iterator[tuple[str, Row]]:
    """Every row of a file, with the place to name when it is wrong."""
    if path.suffix not in ENDINGS:
        raise BadInput(f"{path}: cannot tell its format: expected a name that ends in {', '.join(ENDINGS)}")
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _table, ".tsv": _table, ".parquet": _parquet}[path.suffix]
    try:
        yield from reader(path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise BadInput(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from None


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError("a key is there twice")
    return row


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in _lines(path):
        if number == 1 and line.lstrip().startswith("["):
            yield from _json(path)
            return
        if line.strip():
            yield f"{path}:{number}", _object(line, f"{path}:{number}")


def _object(text: str, where: str) -> Row:
    try:
        row = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise BadInput(f"{where}: not a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise BadInput(f"{where}: expected a JSON object, not {type(row).__name__}")
    return row


def _json(path: Path) -> Iterator[tuple[str, Row]]:
    text = "".join(line for _, line in _lines(path))
    try:
        rows = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        if path.suffix == ".json" and "Extra data" in str(error):  # JSON lines under another name
            rows = [_object(line, f"{path}:{number}") for number, line in _lines(path) if line.strip()]
        else:
            raise BadInput(f"{path}: not JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BadInput(f"{path}: expected a list of JSON objects")
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", row


def _table(path: Path) -> Iterator[tuple[str, Row]]:
    """CSV with quotes; TSV without, as GLUE is distributed."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    lines = (line.replace("\0", "\ufffd") for _, line in _lines(path))
    tabs = path.suffix == ".tsv"
    reader = csv.reader(lines, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL)
    names = next(reader, [])
    for cells in reader:
        if not cells:
            continue
        where = f"{path}:{reader.line_num}"
        if len(cells) != len(names):
            raise BadInput(f"{where}: {len(cells)} cells, but the first line names {len(names)} columns")
        yield where, dict(zip(names, cells, strict=True))


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise BadInput(f"{path}: not Parquet: {str(error).splitlines()[0]}") from None
    number = 0
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path}: row {number}", row
