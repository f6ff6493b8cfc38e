"""Processes that count, for corpora large enough to need them.

A worker is the file `counts.py` run as a program of its own, which reads examples from a pipe and writes rows back.
The start methods of `multiprocessing` do not serve here. "fork" copies a process that has torch's threads, and may
deadlock; "spawn" and "forkserver" import the caller's main module again, so that a script without an
`if __name__ == "__main__"` guard would run twice, and one read from a pipe or a notebook cell may fail. A plain program
has neither trouble, starts in about 10 ms, and needs neither torch nor nltk: text becomes numbers on this side, while
the workers count what they already have.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from seqreg.metrics import counts
from seqreg.metrics.counts import Example, Row


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_start() -> bool:
    """Whether there is a Python to start: not in a frozen program."""
    return bool(sys.executable) and not getattr(sys, "frozen", False) and os.path.exists(counts.__file__)


class Worker:
    """One process, and the two ends of its pipes."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", counts.__file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, examples: list[Example], kinds: Sequence[str]) -> list[Row]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            counts.send((examples, list(kinds)), self.process.stdin)
            return list(counts.receive(self.process.stdout))
        except (EOFError, BrokenPipeError) as error:
            code = self.process.poll()
            raise RuntimeError(f"a ROUGE worker stopped (exit code {code}): jobs=1 counts without workers") from error

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def count_parallel(chunks: Iterable[list[Example]], kinds: Sequence[str], jobs: int) -> Iterator[list[Row]]:
    """The rows of every chunk, in order, from `jobs` workers; a thread waits for each."""
    workers: list[Worker] = []
    free: SimpleQueue[Worker] = SimpleQueue()
    waiting: deque[Future[list[Row]]] = deque()

    def ask(chunk: list[Example]) -> list[Row]:
        worker = free.get()
        try:
            return worker.ask(chunk, kinds)
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(jobs)
    try:
        for _ in range(jobs):
            workers.append(Worker())
            free.put(workers[-1])
        for chunk in chunks:
            waiting.append(pool.submit(ask, chunk))
            if len(waiting) > 8 * jobs:  # so that a large corpus is never all in memory as numbers
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        for worker in workers:
            worker.stop()
