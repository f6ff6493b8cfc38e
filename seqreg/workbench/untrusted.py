"""Text that somebody else wrote (a model, a dataset, a recipe), made safe for the place where it is shown."""

from __future__ import annotations

import html
import re

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAK = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|~>-])")


def plain(text: object) -> str:
    r"""One line for a terminal: escape sequences, line breaks and changes of direction are spelt out.

    >>> print(plain("a\x1b[31mb\n"))
    a\x1b[31mb\n
    """
    return _UNSEEN.sub(lambda found: found.group().encode("unicode_escape").decode(), str(text))


def one_line(text: str) -> str:
    """A text in a file that has one a line: `<n>` for a line break of any kind."""
    return _BREAK.sub("<n>", text)


def code(text: object, most: int = 500) -> str:
    """A Markdown code span inside a table cell: nothing in it is markup."""
    shown = plain(str(text).replace("\n", " ⏎ ")).replace("`", "'").replace("|", "¦")
    return f"`{shown[:most]}`" if shown.strip() else "*(empty)*"


def prose(text: object) -> str:
    """Text inside a sentence of Markdown: neither Markdown nor HTML."""
    return _MARKDOWN.sub(r"\\\1", html.escape(plain(text), quote=False))


def fenced(text: str, language: str) -> str:
    """A Markdown block of code, with a fence that the text cannot close."""
    longest = max((len(found) for found in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
