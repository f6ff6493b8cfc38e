"""What a step costs on several ranks under an engine, with a plain head and with the fused one.

Every variant has processes of its own, on the CPU, with gloo between them. Both make one pass after the other, so that
they draw the same dropout masks and the same noise, and their losses can be compared.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import nn

from benchmarks.sizes import Size
from benchmarks.steps import SMOOTHING
from benchmarks.worker_process import clock, peak_of_step
from seqreg.criterion import Criterion
from seqreg.errors import Stopped
from seqreg.integrations.hf import context, count
from seqreg.terms.r3f import R3F

SIZE = Size(width=64, layers=1, heads=2, classes=50265, source=32, target=160, rows=8, together=2)
"""Of every rank: 1,280 tokens, and BART's vocabulary."""
RANKS = 2


@dataclass(frozen=True)
class EngineStep:
    """One step of R3F, the largest of all ranks.

    Args:
        head: "plain" from all logits, or "fused"
        memory: bytes at the peak, above what is held before the step
        seconds: CPU time
        loss: mean over ranks
    """

    head: str
    memory: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class EngineBench:
    engine: str
    ranks: int
    plain: EngineStep
    fused: EngineStep

    @property
    def memory(self) -> float:
        """Of the fused head, over the plain one."""
        return self.fused.memory / self.plain.memory

    @property
    def seconds(self) -> float:
        """Of the fused head, over the plain one."""
        return self.fused.seconds / self.plain.seconds


def measure(
    engine: str = "fsdp2", size: Size = SIZE, ranks: int = RANKS, progress: Callable[[str], None] | None = None
) -> EngineBench:
    """A step with a plain head, then one with the fused head.

    Args:
        progress: told what is being done
    """
    steps = {}
    for head in ("plain", "fused"):
        if progress is not None:
            progress(f"{engine}, {ranks} ranks, {head} head")
        steps[head] = _on_ranks(engine, head, size, ranks)
    return EngineBench(engine, ranks, steps["plain"], steps["fused"])


def _on_ranks(engine: str, head: str, size: Size, ranks: int) -> EngineStep:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # imports are paid once
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as exits:
        pipes: list[Any] = []
        for rank in range(ranks):
            mine, theirs = processes.Pipe()
            arguments = (theirs, f"{folder}/store", engine, head, size, rank, ranks)
            process = processes.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            exits.callback(process.join)
            exits.callback(process.terminate)
            pipes.append(mine)
        answers: dict[Any, Any] = {}
        while len(answers) < ranks:
            waiting: list[Any] = [pipe for pipe in pipes if pipe not in answers]
            ready: list[Any] = wait(waiting)
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()
                except (EOFError, ConnectionError):
                    raise Stopped(f"a rank with a {head} head ended before its step: too little memory?") from None
    memory, seconds, losses, paths = zip(*answers.values(), strict=True)
    if set(paths) != {head}:
        raise Stopped(f"{engine} took the paths {sorted(set(paths))} where a {head} head was asked for")
    return EngineStep(head, max(memory), max(seconds), sum(losses) / ranks)


def _rank(pipe: Connection, store: str, engine: str, head: str, size: Size, rank: int, ranks: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which stops its processes
    torch.set_num_threads(1)
    group = torch.distributed
    group.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(minutes=10)
    )
    model = _wrapped(size.model(), engine)
    batch = size.batch(padding=0.1 * rank)
    whole = count(model, [batch])
    criterion = Criterion(R3F(weight=1.0, scale=0.1, relative=True), label_smoothing=SMOOTHING, fused=head == "fused")
    loss, path = 0.0, ""

    def step() -> None:
        nonlocal loss, path
        torch.manual_seed(rank)
        report = criterion(context(model, batch, step=0, count=whole), batched=False)
        report.total.backward()  # type: ignore[no-untyped-call]
        loss, path = float(report.total.detach()), report.paths["r3f"]

    step()  # sets the engine up
    model.zero_grad(set_to_none=True)
    begin = clock()
    step()
    seconds = clock() - begin
    memory = peak_of_step(step, model)
    group.barrier()
    group.destroy_process_group()
    pipe.send((memory, seconds, loss, path))


def _wrapped(model: Any, engine: str) -> nn.Module:
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        fully_shard(layer)
    fully_shard(model)
    return model  # type: ignore[no-any-return]
