"""Ways in which a file of a run can be spoilt: of bytes, and of what JSON says."""

from __future__ import annotations

import copy
import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**12, 10**30, 1e308, float("nan"), "", "x", "x" * 5000, "\0", "../../x", [], ["x"], [[]],
    {}, {"x": 1},
)  # fmt: skip
"""Values of every type, and too large ones."""


def spoilt_bytes(path: Path) -> Iterator[str]:
    """Spoil a file in one way after the other; yields what was done to it."""
    whole = path.read_bytes()
    for name, content in {
        "empty": b"", "truncated": whole[: len(whole) // 2], "one byte short": whole[:-1], "zeros": b"\0" * 64,
        "not UTF-8": b"\xff\xfe\xfa" * 9, "text": b"hello\n", "open": b"{", "a list": b"[]", "a number": b"3",
        "null": b"null", "deep": b"[" * 100_000, "random": random.Random(0).randbytes(len(whole)),
        "a state that is a list": _saved([1]), "a state that is a tensor": _saved(torch.ones(3)),
    }.items():  # fmt: skip
        path.write_bytes(content)
        yield name
    path.unlink()
    yield "missing"
    path.mkdir()
    yield "a folder"
    path.rmdir()
    os.symlink(path.name, path)
    yield "a link to itself"
    path.unlink()
    path.write_bytes(whole)


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def spoilt_json(path: Path, most: int, seed: int = 0) -> Iterator[str]:
    """Take out, or replace, one value of a JSON file after the other: a draw of `most` of all ways."""
    whole = path.read_bytes()
    found = json.loads(whole)
    ways = [(place, wrong) for place in _places(found) for wrong in (..., *WRONG)]
    for place, wrong in random.Random(seed).sample(ways, min(most, len(ways))):
        changed = copy.deepcopy(found)
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        if wrong is ...:
            del inner[place[-1]]
        else:
            inner[place[-1]] = wrong
        path.write_text(json.dumps(changed))
        yield f"{'.'.join(map(str, place))} {'is gone' if wrong is ... else f'= {str(wrong)[:20]!r}'}"
    path.write_bytes(whole)


def _places(found: Any, depth: int = 3) -> Iterator[tuple[Any, ...]]:
    """The way to every value; of a list to the first and the last."""
    keys = list(found) if isinstance(found, dict) else sorted({0, len(found) - 1}) if isinstance(found, list) else []
    for key in keys if found else ():
        yield (key,)
        if depth > 1:
            yield from ((key, *rest) for rest in _places(found[key], depth - 1))
