"""Processes that a study starts: they end with it."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable


def end_with_parent() -> Callable[[], None] | None:
    """For `preexec_fn`: on Linux the kernel sends SIGTERM when the parent dies, by `kill -9` too; a run then saves."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec

    def ask_the_kernel() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    return ask_the_kernel
