"""Seeds on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from seqreg.errors import BadInput
from seqreg.workbench.config.schema import LARGEST


def read_seeds(text: str) -> list[int]:
    """A number of seeds, which are 1, 2, 3 ..., or the seeds themselves with commas between."""
    try:
        seeds = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        seeds = []
    if "," not in text and len(seeds) == 1:
        seeds = list(range(1, seeds[0] + 1)) if seeds[0] <= 1000 else []
    if not 1 <= len(set(seeds)) == len(seeds) <= 1000 or not 0 <= min(seeds) <= max(seeds) <= LARGEST:
        raise BadInput(f"--seeds {text}: expected how many, such as 5, or different ones with commas, such as 3,7,11")
    return seeds


def write_seeds(seeds: Sequence[int]) -> str:
    """What `read_seeds` reads as these.

    >>> write_seeds([1, 2, 3]), write_seeds([3, 7]), write_seeds([5])
    ('3', '3,7', '5,')
    """
    if list(seeds) == list(range(1, len(seeds) + 1)):
        return str(len(seeds))
    return ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")
