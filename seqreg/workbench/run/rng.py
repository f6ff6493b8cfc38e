"""The state of the global random number generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The state of every global generator."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back to a state of `rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextlib.contextmanager
def preserve_rng_state() -> Iterator[None]:
    """What happens inside draws no random number as far as the outside can tell."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
