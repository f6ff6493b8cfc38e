"""What a command found, for programs: `--json` prints one JSON document, alone on the standard output."""

from __future__ import annotations

import json
import math
from typing import Any


def print_json(found: Any) -> None:
    """Print one JSON document, in ASCII whatever the terminal; what is not finite is null, as JSON has no NaN."""
    print(json.dumps(strict(found), indent=1, allow_nan=False))


def strict(found: Any) -> Any:
    """The same without NaN and infinity.

    >>> strict({"loss": float("nan"), "scores": (1.5, float("inf"))})
    {'loss': None, 'scores': [1.5, None]}
    """
    if isinstance(found, dict):
        return {str(key): strict(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [strict(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
