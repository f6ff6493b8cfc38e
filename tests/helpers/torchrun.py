"""`seqreg train` under torchrun's own agent, with ranks that are cheap to start and to kill.

The agent is forked from a server that has imported everything, and forks its ranks from itself, where the program
`torchrun` would start an interpreter for each. Rendezvous, monitoring and restarts are torchrun's.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as _checkpoint  # noqa: F401 - what a run would import when it needs it
import torch.distributed.fsdp as _fsdp  # noqa: F401
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from seqreg.cli import main as cli
from seqreg.workbench.run.torchrun import UNSHARED_STORE, exit_code
from tests.helpers import forked_process

RANKS = 2


class Agent(forked_process.Command):
    """`torchrun --nproc-per-node RANKS --max-restarts RESTARTS -m seqreg WORDS`, started at once.

    Args:
        entry: what every rank calls with the words, in place of the command
    """

    def __init__(self, *words: str | Path, log: Path, ranks: int = RANKS, restarts: int = 0, entry: Any = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *(["deepspeed"] if entry is not None else [])])
        self.log = log
        arguments = ([str(word) for word in words], str(log), ranks, restarts, entry)
        self.process = context.Process(target=_agent, args=arguments)
        self.process.start()

    @property
    def ranks(self) -> list[int]:
        """The processes of the ranks, in their order."""
        pid = self.process.pid
        try:
            return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
        except FileNotFoundError:
            return []


def _agent(words: list[str], log: str, ranks: int, restarts: int, entry: Any) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    logging.disable(logging.WARNING)
    os.environ[UNSHARED_STORE] = "1"  # as `seqreg launch` does
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=restarts, monitor_interval=0.05,
        run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
    )  # fmt: skip
    called = (_rank, [words]) if entry is None else (entry, words)
    sys.exit(exit_code(lambda: elastic_launch(config, called[0])(*called[1])))


def _rank(words: list[str]) -> None:
    sys.argv = ["seqreg", *words]
    try:
        cli.main()
    except SystemExit as end:  # torchrun waits for what a function returns
        if end.code:
            raise


def train(output: Path, *words: str, terms: tuple[str, ...] = (), **options: Any) -> Agent:
    """`seqreg train quickstart` with a tiny model; its log is beside its output."""
    chosen = [word for name in terms for word in ("--terms", name)]
    log = output.with_suffix(".log")
    return Agent(
        "train", "quickstart", *forked_process.TINY, *words, *chosen, f"output={output}", log=log, **options
    )  # fmt: skip
