"""Examples of a dataset, by the rules of its card; every fault with its file, line and column."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from seqreg.errors import BadInput
from seqreg.metrics.tags import NO_TAG, OUTSIDE
from seqreg.workbench.config.cards import Card, Names
from seqreg.workbench.text.readers import LINE, Record, are_texts, json_list

_BROKEN = re.compile("[\0\ud800-\udfff]")
_WORD = re.compile(r"\w+")
WORD = 50_000
"""Characters of a word."""
_IDS = ("id", "idx", "guid")
ASSISTANT = "assistant"
"""The role of what a chat model writes."""
_EMPTY = "an empty text"
LONG = 200_000
"""Characters from which a note is made of a text: all of it is tokenized before it is cut."""
ENOUGH = 1000
"""Examples of a stream after which the share of empty ones is looked at."""


@dataclass(frozen=True)
class Example:
    """One example, cleaned.

    Args:
        target: the text to generate
        label: the class id, or the number
        references: texts that are all right, where there are several
        tags: class ids of `words`
        chat: role and content of every message before the target, which `source` has the contents of
    """

    source: str
    second: str | None = None
    target: str | None = None
    label: int | float | None = None
    references: tuple[str, ...] = ()
    tags: tuple[int, ...] | None = None
    chat: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> list[str]:
        """The words that have tags: what is between single spaces of the source."""
        return self.source.split(" ")

    @property
    def accepted(self) -> tuple[str, ...]:
        """What a generated text is scored against."""
        return self.references or (self.target or "",)

    @property
    def characters(self) -> int:
        """The length of its longest text."""
        return max(len(text or "") for text in (self.source, self.second, self.target))


def example(card: Card, record: Record, where: str, *, labelled: bool = True) -> Example | None:
    """One example by the rules of its card; None where the card says to drop it."""
    columns, mapping = card.columns, card.files.mapping
    if mapping is not None and mapping[1] in record and not isinstance(record[mapping[1]], str):
        return None
    if card.kind == "token_classification":
        return _tagged(card, record, where, labelled=labelled)
    chat = _chat(card, record, where, labelled=labelled)
    if chat is not None:
        return chat
    source = _text(card, record, "source", columns.source, where)
    second = None if columns.second is None else _text(card, record, "second", columns.second, where)
    if not labelled and not _is_labelled(record, names_of(columns.target) + names_of(columns.label)):
        return Example(source, second)
    if card.kind == "generation" and columns.target is not None:
        target = _text(card, record, "target", columns.target, where)
        return Example(source, second, target, references=_references(card, record, where))
    name, value = column_of(record, columns.label or "label", where)
    if str(value) in card.drop:
        return None
    return Example(source, second, label=_label(card, name, value, where))


def _tagged(card: Card, record: Record, where: str, *, labelled: bool) -> Example:
    """Words with their tags; a space inside a word becomes one that does not part words."""
    name, value = column_of(record, card.columns.source, where)
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise BadInput(f"{where}: the column {name!r} is {_short(value)}: expected a list of words, at least one")
    source = " ".join(_clean(card, "source", f"{name}[{place}]", word, where) for place, word in enumerate(words))
    if not labelled and not _is_labelled(record, names_of(card.columns.label)):
        return Example(source)
    name, value = column_of(record, card.columns.label or "tags", where)
    values = value.split() if isinstance(value, str) else value
    if not isinstance(values, list) or len(values) != len(words):
        count = f"{len(values)} tags" if isinstance(values, list) else _short(value)
        raise BadInput(f"{where}: the column {name!r} has {count}: expected a list of {len(words)}, one per word")
    tags = (_label(card, f"{name}[{place}]", tag, where) for place, tag in enumerate(values))
    return Example(source, tags=tuple(int(tag) for tag in tags))


def _is_labelled(record: Record, names: list[str]) -> bool:
    """Whether one of the columns is there and holds something."""
    return any(record.get(name) not in (None, "") for name in names)


def tag_text(card: Card, tags: Iterable[int | None]) -> str:
    """Tags as one text; a word without one is outside, or `NO_TAG` where the card knows no outside."""
    labels = card.labels or []
    without = OUTSIDE if OUTSIDE in labels else NO_TAG
    return " ".join(without if tag is None else labels[tag] for tag in tags)


def _chat(card: Card, record: Record, where: str, *, labelled: bool) -> Example | None:
    """The example of a chat: of its messages, or of a prompt and a completion that are messages; None for texts."""
    columns = card.columns
    if columns.messages is None:
        return None
    present = {name: record[name] for name in names_of(columns.messages) if record.get(name) is not None}
    for name, value in present.items():
        *before, last = _messages(card, name, value, where)
        if last[0] == ASSISTANT and before:
            return _as_example(before, last[1], _references(card, record, where))
        if labelled:
            raise BadInput(
                f"{where}: the column {name!r} has {len(value)} messages, the last of {last[0]!r}: expected at least "
                f"two, the last of {ASSISTANT!r}"
            )
        return _as_example([*before, last], None)
    if not any(name in record for name in names_of(columns.source)):
        empty = [name for name in names_of(columns.messages) if name in record]
        if empty:
            raise BadInput(f"{where}: the column {empty[0]!r} is empty (null)")
    name, value = column_of(record, columns.source, where)
    if not isinstance(value, list):
        return None
    prompt = _messages(card, name, value, where)
    if not labelled and not _is_labelled(record, names_of(columns.target)):
        return _as_example(prompt, None)
    name, value = column_of(record, columns.target or "completion", where)
    answer = _messages(card, name, value, where)
    if len(answer) != 1 or answer[0][0] != ASSISTANT:
        raise BadInput(f"{where}: the column {name!r} is {_short(value)}: expected one message of {ASSISTANT!r}")
    return _as_example(prompt, answer[0][1], _references(card, record, where))


def _as_example(chat: list[tuple[str, str]], target: str | None, references: tuple[str, ...] = ()) -> Example:
    source = "\n".join(content for _, content in chat)
    return Example(source, target=target, references=references, chat=tuple(chat))


def _messages(card: Card, name: str, value: Any, where: str) -> list[tuple[str, str]]:
    """Role and content of every message of a column."""
    if not isinstance(value, list) or not value:
        raise BadInput(f"{where}: the column {name!r} is {_short(value)}: expected a list of messages")
    messages = []
    for place, message in enumerate(value):
        known = isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        if not known or any(message[key] for key in message.keys() - {"role", "content"}):
            raise BadInput(f"{where}: {name}[{place}] is {_short(message)}: expected {{role: ..., content: ...}} alone")
        part = "target" if message["role"] == ASSISTANT else "source"
        messages.append((message["role"], _clean(card, part, f"{name}[{place}].content", message["content"], where)))
    return messages


def names_of(names: Names | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


def column_of(record: Record, names: Names, where: str) -> tuple[str, Any]:
    """The name and value of the first of some columns that is there."""
    for name in names_of(names):
        if name in record:
            if record[name] is None:
                raise BadInput(f"{where}: the column {name!r} is empty (null)")
            return name, record[name]
    expected = " or ".join(repr(name) for name in names_of(names))
    there = ", ".join(repr(name) for name in list(record)[:20]) + (" ..." if len(record) > 20 else "")
    raise BadInput(f"{where}: no column {expected}; it has {there or 'none'}")


def _references(card: Card, record: Record, where: str) -> tuple[str, ...]:
    """All references of an example; none where it has no such column, and one with several names has a text in each."""
    names, texts = names_of(card.columns.references), list[str]()
    for name in names:
        value = record.get(name)
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        several = json_list(value) if isinstance(value, str) else value
        if isinstance(value, str) and len(names) > 1 and not are_texts(several):
            texts.append(_clean(card, "target", name, value, where))
            continue
        if not isinstance(several, list) or not several:
            raise BadInput(
                f"{where}: the column {name!r} is {_short(value)}: expected a list of texts; or name several columns, "
                "each with a text"
            )
        texts += [_clean(card, "target", f"{name}[{place}]", text, where) for place, text in enumerate(several)]
    return tuple(texts)


def _text(card: Card, record: Record, part: str, names: Names, where: str) -> str:
    return _clean(card, part, *column_of(record, names, where), where)


def text_of(record: Record, names: Names, where: str) -> str:
    """The text of a column, as it is."""
    return _whole(*column_of(record, names, where), where).strip()


def _whole(name: str, value: Any, where: str) -> str:
    """A value that is text, and none that is broken."""
    if not isinstance(value, str):
        raise BadInput(f"{where}: the column {name!r} is {_short(value)}: expected text")
    broken = _BROKEN.search(value)
    if broken:
        what = "a NUL character" if broken.group() == "\0" else "half a character (a lone surrogate)"
        raise BadInput(f"{where}: the column {name!r} has {what} at position {broken.start() + 1}")
    return value


def _clean(card: Card, part: str, name: str, value: Any, where: str) -> str:
    """A text of a column, cleaned as the card says; `part` is what it is for."""
    value = _whole(name, value, where)
    for rule in card.clean:
        if rule.column == part:
            value = re.sub(rule.pattern, rule.by, value)
        _check_length(card, part, name, value, where)
    _check_length(card, part, name, value, where)
    if card.kind == "token_classification":
        return str(value).replace(" ", "\u00a0")
    return str(value).strip()


def _check_length(card: Card, part: str, name: str, value: str, where: str) -> None:
    """Refuse what no tokenizer or score gets through: very long texts, words without an end."""
    if len(value) > LINE:
        raise BadInput(f"{where}: the column {name!r} has {len(value):,} characters: at most {LINE:,}")
    if len(value) <= 8000:  # nothing can be wrong with most texts
        return
    longest = max(map(len, value.split()), default=0)
    if longest > WORD:  # with what is no letter or digit, of which there may be many
        longest = max((len(word) for word in _WORD.findall(value)), default=0)
    fault = f"a word of {longest:,} characters: is it text?" if longest > WORD else ""
    if not fault and part == "target":
        from seqreg.metrics.texts import too_long

        fault = too_long(card.metric, value, card.words)
    if fault:
        raise BadInput(f"{where}: the column {name!r} has {fault}")


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
    is_index = text.isascii() and text.isdigit() and len(text) < 10 and not isinstance(value, (bool, float))
    if is_index and int(text) < len(card.labels):
        return int(text)
    raise BadInput(f"{what}: expected 0 to {len(card.labels) - 1}, or one of {', '.join(card.labels)}")


def examples(
    card: Card,
    records: Iterable[tuple[str, Record]],
    *,
    training: bool = False,
    labelled: bool = True,
    empty: float = 1.0,
    into: Any = None,
) -> tuple[Any, list[str]]:
    """Examples, and notes on what was left out: dropped labels; for training, texts that are empty.

    Args:
        empty: the largest share of examples that may be left out because a text is empty
        into: what they are appended to, which can be counted; a new list by default
    """
    made = list[Example]() if into is None else into
    left_out, ids = Counter[str](), Counter[str]()
    kinds: dict[bool, str] = {}
    long, longest, where = 0, (0, ""), ""
    absent = set(names_of(card.columns.references) if labelled else ())
    for where, record in records:
        absent.difference_update(record)
        item = example(card, record, where, labelled=labelled)
        _same_kind(card, record, where, kinds)
        ids.update([str(record[key]) for key in _IDS if record.get(key) is not None][:1])
        if item is None:
            left_out["a label that the card drops" if card.files.mapping is None else "a value that is no text"] += 1
            continue
        long += item.characters > LONG
        longest = max(longest, (item.characters, where), key=lambda pair: pair[0])
        if training and not (item.source and item.target != ""):
            left_out[_EMPTY] += 1
        else:
            made.append(item)
    _check_empty(left_out[_EMPTY], len(made) + left_out.total(), empty, where)
    notes = [f"{count} examples left out: {reason}" for reason, count in left_out.items() if count]
    notes += [f"no example has the column {name!r} of columns.references" for name in sorted(absent) if where]
    if repeated := ids.total() - len(ids):
        notes.append(f"{repeated} examples have the id of another")
    if long:
        place = longest[1].rpartition(":")[2].strip()
        notes.append(
            f"{place if place.startswith('row') else f'line {place}'} has a text of {longest[0]:,} characters"
            f"{f', and {long - 1} more are over {LONG:,}' if long > 1 else ''}: all of it is tokenized before it is "
            "cut, which slows every batch that it is in"
        )
    return made, notes


def stream(card: Card, records: Iterable[tuple[str, Record]], *, empty: float) -> Iterator[Example]:
    """Training examples one after the other: those of `examples`, which are checked when they are reached."""
    kinds, left_out, total, where = dict[bool, str](), 0, 0, ""
    for total, (where, record) in enumerate(records, start=1):
        item = example(card, record, where)
        _same_kind(card, record, where, kinds)
        if item is None:
            continue
        if item.source and item.target != "":
            yield item
            continue
        left_out += 1
        if total >= ENOUGH:
            _check_empty(left_out, total, empty, where)
    _check_empty(left_out, total, empty, where)


def _check_empty(left_out: int, total: int, most: float, where: str) -> None:
    if left_out > most * total:
        raise BadInput(
            f"{where.rpartition(':')[0]}: {left_out} of {total} examples have an empty text, more than "
            f"data.max_empty_fraction={most:g}: look at the data, or set data.max_empty_fraction"
        )


def _same_kind(card: Card, record: Record, where: str, kinds: dict[bool, str]) -> None:
    """Refuse a label that is a text in one example and a number in another: one of the two is a mistake."""
    for name in names_of(card.columns.label):
        if name in record:
            kinds.setdefault(isinstance(record[name], str), where)
            if len(kinds) == 2:
                other = next(place for place in kinds.values() if place != where)
                raise BadInput(
                    f"{where}: the column {name!r} is {_short(record[name])}, and of the other kind (text or number) "
                    f"in {other}: write all labels the same way"
                )
            return
