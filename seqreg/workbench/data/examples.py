"""One row of a dataset, by the rules of its card; every fault with its file, line and column."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from seqreg.errors import BadInput
from seqreg.workbench.config.cards import Card, Names
from seqreg.workbench.data.readers import LINE, Record

_BROKEN = re.compile("[\0\ud800-\udfff]")
_WORD = re.compile(r"\w+")
WORD = 50_000
"""Characters of a word."""
_IDS = ("id", "idx", "guid")
_EMPTY = "an empty text"
LONG = 200_000
"""Characters from which a text is said to be long: it is tokenized as a whole before it is cut."""


@dataclass(frozen=True)
class Example:
    """One row, cleaned. `target` is the text to generate, `label` the class id or the number."""

    source: str
    second: str | None = None
    target: str | None = None
    label: int | float | None = None


def example(card: Card, row: Record, where: str, *, labelled: bool = True) -> Example | None:
    """One row by the rules of its card; None where the card says to drop it."""
    columns = card.columns
    texts: dict[str, str | None] = {"source": _text(card, row, "source", columns.source, where)}
    texts["second"] = None if columns.second is None else _text(card, row, "second", columns.second, where)
    if not labelled and not any(name in row for name in names_of(columns.target) + names_of(columns.label)):
        return Example(str(texts["source"]), texts["second"])
    if card.kind == "generation" and columns.target is not None:
        return Example(str(texts["source"]), texts["second"], _text(card, row, "target", columns.target, where))
    name, value = column_of(row, columns.label or "label", where)
    if str(value) in card.drop:
        return None
    return Example(str(texts["source"]), texts["second"], label=_label(card, name, value, where))


def names_of(names: Names | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


def column_of(row: Record, names: Names, where: str) -> tuple[str, Any]:
    """The name and value of the first of some columns that is there."""
    for name in names_of(names):
        if name in row:
            if row[name] is None:
                raise BadInput(f"{where}: the column {name!r} is empty (null)")
            return name, row[name]
    expected = " or ".join(repr(name) for name in names_of(names))
    there = ", ".join(repr(name) for name in list(row)[:20]) + (" ..." if len(row) > 20 else "")
    raise BadInput(f"{where}: no column {expected}; it has {there or 'none'}")


def _text(card: Card, row: Record, part: str, names: Names, where: str) -> str:
    name, value = column_of(row, names, where)
    if not isinstance(value, str):
        raise BadInput(f"{where}: the column {name!r} is {_short(value)}: expected text")
    broken = _BROKEN.search(value)
    if broken:
        what = "a NUL character" if broken.group() == "\0" else "half a character (a lone surrogate)"
        raise BadInput(f"{where}: the column {name!r} has {what} at position {broken.start() + 1}")
    for rule in card.clean:
        if rule.column == part:
            value = re.sub(rule.pattern, rule.by, value)
        _check_length(card, part, name, value, where)
    _check_length(card, part, name, value, where)
    return value.strip()


def _check_length(card: Card, part: str, name: str, value: str, where: str) -> None:
    """Refuse what no tokenizer or score gets through: very long texts, words without an end."""
    if len(value) > LINE:
        raise BadInput(f"{where}: the column {name!r} has {len(value):,} characters: at most {LINE:,}")
    if len(value) <= 8000:  # nothing can be wrong with most texts
        return
    longest = max((found.end() - found.start() for found in _WORD.finditer(value)), default=0)
    wrong = f"a word of {longest:,} characters: is it text?" if longest > WORD else ""
    if not wrong and part == "target":
        from seqreg.metrics.rouge.score import too_long

        wrong = too_long(value, card.words)
    if wrong:
        raise BadInput(f"{where}: the column {name!r} has {wrong}")


def _short(value: object) -> str:
    """A value as errors show it."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _label(card: Card, name: str, value: Any, where: str) -> int | float:
    """A class by its name or number, or a number to predict."""
    what = f"{where}: the column {name!r} is {_short(value)}"
    if card.labels is None:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise BadInput(f"{what}: expected a number")
        return number
    text = str(value).strip()
    text = card.files.labels.get(text, text)
    if text in card.labels:
        return card.labels.index(text)
    whole = text.isascii() and text.isdigit() and len(text) < 10 and not isinstance(value, (bool, float))
    if whole and int(text) < len(card.labels):
        return int(text)
    raise BadInput(f"{what}: expected 0 to {len(card.labels) - 1}, or one of {', '.join(card.labels)}")


def examples(
    card: Card,
    records: Iterable[tuple[str, Record]],
    *,
    training: bool = False,
    labelled: bool = True,
    empty: float = 1.0,
) -> tuple[list[Example], list[str]]:
    """Examples, and what was left out: dropped labels; for training, texts that are empty.

    Args:
        empty: the largest share of rows that may be left out because a text is empty
    """
    kept: list[Example] = []
    left_out: Counter[str] = Counter()
    ids, kinds, where = Counter[str](), dict[bool, str](), ""
    long, longest = 0, (0, "")
    for where, row in records:
        one = example(card, row, where, labelled=labelled)
        _same_kind(card, row, where, kinds)
        size = _characters(one)
        long, longest = long + (size > LONG), max(longest, (size, where), key=lambda pair: pair[0])
        ids.update([str(row[key]) for key in _IDS if row.get(key) is not None][:1])
        if one is None:
            left_out["a label that the card drops"] += 1
        elif training and not (one.source and one.target != ""):
            left_out[_EMPTY] += 1
        else:
            kept.append(one)
    total = len(kept) + left_out.total()
    if left_out[_EMPTY] > empty * total:
        raise BadInput(
            f"{where.rpartition(':')[0]}: {left_out[_EMPTY]} of {total} rows have an empty text, more than "
            f"data.max_empty_fraction={empty:g}: look at the data, or set data.max_empty_fraction"
        )
    notes = [f"{count} rows left out: {why}" for why, count in left_out.items() if count]
    if twice := ids.total() - len(ids):
        notes.append(f"{twice} rows have the id of another")
    if long:
        place = longest[1].rpartition(":")[2].strip()
        notes.append(
            f"{place if place.startswith('row') else f'line {place}'} has a text of {longest[0]:,} characters"
            f"{f', and {long - 1} more are over {LONG:,}' if long > 1 else ''}: all of it is tokenized before it is "
            "cut, which slows every batch that it is in"
        )
    return kept, notes


def _characters(one: Example | None) -> int:
    """The length of the longest text of an example."""
    return max(len(text or "") for text in (one.source, one.second, one.target)) if one else 0


def _same_kind(card: Card, row: Record, where: str, kinds: dict[bool, str]) -> None:
    """Refuse a label that is a text in one row and a number in another: one of the two is a mistake."""
    for name in names_of(card.columns.label):
        if name in row:
            kinds.setdefault(isinstance(row[name], str), where)
            if len(kinds) == 2:
                other = next(place for place in kinds.values() if place != where)
                raise BadInput(
                    f"{where}: the column {name!r} is {_short(row[name])}, and of the other kind (text or number) in "
                    f"{other}: write all labels the same way"
                )
            return
