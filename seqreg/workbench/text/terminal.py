"""Messages on the terminal."""

from __future__ import annotations

import os
import warnings
from typing import Any

from rich.console import Console

from seqreg.workbench.text.atomic_files import to_json
from seqreg.workbench.text.escape import plain

console = Console(stderr=True, highlight=False, markup=False)
"""For everything that is not a result: standard output is for results."""


_shown: set[str] = set()


def first_process() -> bool:
    """Whether this process speaks for a run: it is alone, or the first of those that torchrun started."""
    world = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("RANK", "0") == "0" or not world.isdecimal() or int(world) < 2


def say(text: str, style: str = "") -> None:
    """One line that stays one line, whatever is in it."""
    console.print(plain(text), style=style, markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """The same for what a user should look at; said by one process."""
    if first_process():
        say(text, "yellow")


def print_json(document: Any) -> None:
    """Print one JSON document on the standard output, in ASCII whatever the terminal; what is not finite is null."""
    print(to_json(document, indent=1))


def quiet() -> None:
    """No bars and notes of the libraries below; what matters is said by us."""
    import huggingface_hub
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    show_warnings()


def show_warnings() -> None:
    """Python's warnings as one line each: without the code that they come from, and none twice."""
    warnings.showwarning = _show


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    line = f"seqreg: warning: {plain(message)}"
    if line not in _shown:
        _shown.add(line)
        warn(line)
