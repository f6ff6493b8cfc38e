"""The one exception for input that cannot be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(ValueError):  # noqa: N818 - reads as what it is
    """One line that names the offending value and the fix."""


def yaml_hint(value: object) -> str:
    """PyYAML by itself reads 1e-5 as text: say so where a text would have been a number."""
    try:
        float(str(value))
    except ValueError:
        return ""
    return ": in YAML write 1.0e-5, not 1e-5"


def nearest(name: str, options: Iterable[str]) -> str:
    """A hint for a misspelt `name`: the closest of `options`, or all of them."""
    options = sorted(options)
    close = difflib.get_close_matches(name, options, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(options)}"
