"""SIGTERM and SIGINT: finish the step, save, and stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from seqreg.errors import BadInput, Interrupted

STOPPED = "stopped: run the same command to resume"


class Signals:
    """SIGTERM and SIGINT: the first one stops the run in good order, the second at once.

    Outside of `deferred()` the first one raises `Interrupted` where it strikes; inside it is only noted.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred, self._pid = False, os.getpid()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # the only one that signals may be set from
            self._handlers = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if kind is not None and issubclass(kind, BadInput):
            self.check()  # one that struck inside a library was taken for its error

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
            raise Interrupted(number, STOPPED)

    @contextlib.contextmanager
    def deferred(self, on: bool = True) -> Iterator[None]:
        """Let what is inside finish; what is inside `deferred(False)` in it may be interrupted anywhere again."""
        before, self._deferred = self._deferred, on
        try:
            if not on:
                self.check()
            yield
        finally:
            self._deferred = before

    def check(self) -> None:
        """Raise if a signal was noted."""
        if self.received is not None:
            raise Interrupted(self.received, STOPPED)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
