"""Escaping of text from a model, a dataset or a recipe, for the place where it is shown."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAK = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_MARKDOWN = re.compile(r"([\\`*{|~]|(?<!\w)_|_(?!\w)|(?<=\])[(\[])")  # what is markup anywhere: `_` not inside a word
_LEADING = re.compile(r"^(\s*)(\d*)([#=\[]|[.)+-](?=[\s-]|$))")  # what is markup at the beginning of a line


def plain(text: object) -> str:
    r"""One line for a terminal: escape sequences, line breaks and changes of direction are spelt out.

    >>> print(plain("a\x1b[31mb\n"))
    a\x1b[31mb\n
    """
    return _UNSEEN.sub(lambda match: match.group().encode("unicode_escape").decode(), str(text))


def one_line(text: str) -> str:
    """A text in a file that has one per line: `<n>` for a line break of any kind."""
    return _BREAK.sub("<n>", text)


def code(text: object, most: int = 500) -> str:
    """A Markdown code span inside a table cell: nothing in it is markup."""
    shown = plain(str(text).replace("\n", " ⏎ ")).replace("`", "'").replace("|", "¦")
    return f"`{shown[:most]}`" if shown.strip() else "*(empty)*"


def prose(text: object) -> str:
    r"""Text inside a sentence of Markdown: neither Markdown nor HTML. What is no markup stays as it is.

    >>> print(prose("+0.5 [0.1, 0.9] on text_pairs, *so* [it](is)"))
    +0.5 [0.1, 0.9] on text_pairs, \*so\* [it]\(is)
    >>> print(prose("1. - [x] <b>"))
    1\. - [x] &lt;b&gt;
    """
    marked = _MARKDOWN.sub(r"\\\1", html.escape(plain(text), quote=False))
    return _LEADING.sub(r"\1\2\\\3", marked)


def places(*values: Any) -> list[str]:
    """Paths in settings and words of commands that say where on a machine something is; the longest first.

    >>> places({"data": {"path": "/home/ann/news.jsonl"}}, "output=../ann/run", "data/news.jsonl", "/")
    ['/home/ann/news.jsonl', '../ann/run']
    """
    found = {text for value in _texts(values) for text in (value, value.partition("=")[2]) if _is_place(text)}
    return sorted(found, key=len, reverse=True)


def without_places(value: Any, found: Sequence[str]) -> Any:
    """Settings or a text with the last name in place of each path that `places` found.

    >>> without_places("seqreg train data.path=/home/ann/news.jsonl", ["/home/ann/news.jsonl"])
    'seqreg train data.path=news.jsonl'
    """
    if isinstance(value, dict):
        return {key: without_places(inner, found) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_places(inner, found) for inner in value]
    for place in found if isinstance(value, str) else ():
        value = value.replace(place, PurePath(place).name)
    return value


def _texts(value: Any) -> Iterator[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    yield from [value] if isinstance(value, str) else (text for part in inner for text in _texts(part))


def _is_place(text: str) -> bool:
    """Whether a text is a path that begins at the root, at home or above this folder; `/` alone may be a token."""
    path = PurePath(text)
    return len(path.parts) > 2 and path.parts[0] in ("/", "~", "..") and "\n" not in text


def fenced(text: str, language: str) -> str:
    """A Markdown block of code, with a fence that the text cannot close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
