"""Free arms of a comparison: models made of the baseline's weights, without training; `seqreg soup` makes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seqreg.errors import BadInput, nearest

ARMS: dict[str, list[str]] = {
    "wise": ["--interpolate", "best"],
    "ema": ["--ema"],
    "soup": [],
    "greedy-soup": ["--greedy"],
}
"""Arms by name, with the options of `seqreg soup` that make them."""
SOUPS = ("soup", "greedy-soup")
"""Arms that are one model of all seeds: they have no spread over seeds, and are described without a test."""
CHOOSING = ("wise", "greedy-soup")
"""Arms that are chosen by validation scores."""
EMA_DECAY = "optimisation.ema_decay"
_DECAY = 0.999


def check(arms: Sequence[str], methods: Sequence[str], seeds: Sequence[int], pretrained: bool) -> list[str]:
    """The arms, each once; refuses those that cannot be made.

    Args:
        methods: the names that are taken
        pretrained: whether the baseline starts from a pretrained model
    """
    for arm in arms:
        if arm not in ARMS:
            raise BadInput(f"--arm {arm}: unknown; {nearest(arm, list(ARMS))}")
        if arm in methods:
            raise BadInput(f"--arm {arm}: a method is called so too: give it another name, such as mine={arm}")
        if arm in SOUPS and len(seeds) < 2:
            raise BadInput(f"--arm {arm}: a soup needs at least 2 seeds: --seeds 2")
        if arm != "ema" and not pretrained:
            raise BadInput(f"--arm {arm}: the model is trained from scratch: only one that is pretrained has a start")
    return list(dict.fromkeys(arms))


def settings(arm: str) -> dict[str, Any]:
    """What tells the record of an arm from that of the run that it is made of."""
    share = "best" if arm == "wise" else None
    return {"soup.greedy": arm == "greedy-soup", "soup.interpolate": share, "soup.ema": arm == "ema"}


def baseline_settings(arms: Sequence[str], given: Sequence[str]) -> list[str]:
    """Settings that the baseline needs for its arms, unless they are given."""
    known = any(setting.partition("=")[0].strip() == EMA_DECAY for setting in given)
    return [f"{EMA_DECAY}={_DECAY}"] if "ema" in arms and not known else []
