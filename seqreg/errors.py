"""The one exception for input that cannot be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(ValueError):  # noqa: N818 - reads as what it is
    """One line that names the offending value and the fix."""


def nearest(name: str, options: Iterable[str]) -> str:
    """A hint for a misspelt `name`: the closest of `options`, or all of them."""
    options = sorted(options)
    close = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(options)}"
