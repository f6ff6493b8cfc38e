"""What a command found, for programs: `--json` prints one JSON document, alone on the standard output."""

from __future__ import annotations

from typing import Any

from seqreg.workbench.files import to_json


def print_json(found: Any) -> None:
    """Print one JSON document, in ASCII whatever the terminal; what is not finite is null, as JSON has no NaN."""
    print(to_json(found, indent=1))
