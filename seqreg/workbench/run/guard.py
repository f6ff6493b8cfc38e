"""What a run is guarded against from outside: signals, full disks, and monitors that draw random numbers."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqreg.errors import DISK, BadInput, Interrupted, NoRoom, Stopped

_SAID = re.compile(
    r"(No space left on device|File too large|Disk quota exceeded|Read-only file system|Permission denied|"
    r"Input/output error|PytorchStreamWriter failed|file write failed|inline_container)"
)


class Signals:
    """SIGTERM and SIGINT: the first one stops the run in good order, the second at once.

    Outside of `deferred()` the first one raises `Interrupted` where it strikes; inside it is only noted.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred, self._pid = False, os.getpid()
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # the only one that signals may be set from
            self._kept = {one: signal.signal(one, self._handle) for one in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for one, handler in self._kept.items():
            signal.signal(one, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a worker process that was forked from us
            if number == signal.SIGTERM:
                _die(number)
            return
        if self.received is not None:
            _die(number)
        self.received = number
        name = signal.Signals(number).name
        os.write(2, f"{name}: finishing the step and saving; once more to stop at once\n".encode())
        if not self._deferred:
            raise Interrupted(number)

    @contextlib.contextmanager
    def deferred(self, on: bool = True) -> Iterator[None]:
        """Let what is inside go on to a good end; `deferred(False)` inside of it may be stopped anywhere again."""
        kept, self._deferred = self._deferred, on
        try:
            if not on:
                self.check()
            yield
        finally:
            self._deferred = kept

    def check(self) -> None:
        """Raise if a signal was noted."""
        if self.received is not None:
            raise Interrupted(self.received)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def writing(path: Path, needed: int = 0, hint: str = "") -> Iterator[None]:
    """Turn a disk that is full or cannot be written into one line with the path and the bytes."""
    try:
        yield
    except (BadInput, Stopped):
        raise
    except Exception as error:  # writers in Rust and C++ have exceptions of their own
        reason = _reason(error)
        if reason is None:
            raise
        wanted = f", about {needed:,} needed" if needed else ""
        raise NoRoom(f"{path}: {reason}: {free(path):,} bytes free{wanted}{hint}") from None


def _reason(error: Exception) -> str | None:
    if isinstance(error, OSError) and error.errno in DISK:
        return os.strerror(error.errno)
    found = None if isinstance(error, OSError) else _SAID.search(str(error))
    return None if found is None else f"writing failed ({found[0]})"


def free(path: Path) -> int:
    """Bytes left on the disk of a path that may not exist yet."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def draw_state() -> dict[str, Any]:
    """The state of every global generator."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state_all()} if torch.cuda.is_available() else {})


def set_draw_state(state: dict[str, Any]) -> None:
    """Put the generators back to a state of `draw_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """What happens inside draws no random number as far as the outside can tell."""
    state = draw_state()
    try:
        yield
    finally:
        set_draw_state(state)
