"""Processes that a study starts: they end with it, and those that train do not import everything again."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from seqreg.workbench.text.atomic_files import open_own

IMPORTED = ["seqreg.cli.main", "seqreg.workbench.run.train", "torch.utils.tensorboard"]
"""What a run imports: seconds of a processor, once per comparison instead of once per run."""


class ForkedCommand:
    """One `seqreg` command, started at once as a fork of a process that has imported what runs need.

    Where forks of a process with libraries in it are not safe (other systems than Linux), it imports them itself.

    Args:
        words: after `seqreg`
        log: where what it prints goes, at the end
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        context.set_forkserver_preload(IMPORTED)
        self._process: BaseProcess = context.Process(target=_main, args=(list(words), log))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def poll(self) -> int | None:
        """The exit code, negative for a signal that ended it; None while it runs."""
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> int:
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code


def _main(words: list[str], log: Path) -> None:
    with open_own(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.setsid()  # a Ctrl-C reaches it through the comparison, once
    threading.Thread(target=_end_with_the_comparison, daemon=True).start()
    multiprocessing.set_start_method(None, force=True)  # for workers, as in a command of its own
    sys.argv = ["seqreg", *words]
    try:
        runpy.run_module("seqreg", run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out; trackers of experiments finish there


def _end_with_the_comparison() -> None:
    """Send SIGTERM to this process when the comparison is gone, by `kill -9` too; a run then saves."""
    comparison = multiprocessing.parent_process()
    assert comparison is not None
    comparison.join()
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_parent() -> Callable[[], None] | None:
    """For `preexec_fn`: on Linux the kernel sends SIGTERM when the parent dies, by `kill -9` too; a run then saves."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec

    def ask_the_kernel() -> None:
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

    return ask_the_kernel
