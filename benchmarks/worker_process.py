"""One step in a process of its own: how long it takes, what it computes, what it holds.

Steps that share a process share its memory too: one that frees large arrays leaves them to the next, which is then not
given new pages by the system and looks cheaper than in a training run. So every variant has a process, and they take
turns.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.profile_step import profile_step
from benchmarks.sizes import SIZES
from benchmarks.steps import StepFunction, Variant
from seqreg.errors import Advice, Stopped
from seqreg.fused.head import release_buffers

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler is silent
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes beside what is measured


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Shapes to operations of what torch's counter knows on other devices and overlooks on the CPU."""


def _count_products(step: StepFunction) -> int:
    """Without the products inside attention, as torch counts on the CPU."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def count_flops(step: StepFunction) -> int:
    """Of a step after the first, in which a term may measure its start."""
    step()
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        step()
    return int(counter.get_total_flops())


def peak_memory(step: StepFunction, model: nn.Module) -> int:
    """Bytes that are allocated at the same time at most: parameters, and all that a step comes to hold."""
    most = peak_of_step(step, model)
    return most + sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def peak_of_step(step: StepFunction, model: nn.Module) -> int:
    """Bytes that a step comes to hold at most, above what is held before it."""
    gc.collect()  # what earlier steps left behind is not this one's to free
    release_buffers()  # what was kept from other steps is counted where it is needed
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    model.zero_grad(set_to_none=True)
    return most


def matmul_peak(width: int = 1536, tries: int = 5) -> float:
    """Operations a second of a large square product, the best of some tries."""
    a, b = torch.randn(width, width), torch.randn(width, width)
    seconds = []
    for _ in range(tries):
        begin = clock()
        torch.mm(a, b)
        seconds.append(clock() - begin)
    return 2 * width**3 / min(seconds)


def clock() -> float:
    """Time of this process alone where it has one thread: others on the machine do not count."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _work(pipe: Connection, size: str, variant: Variant, threads: int) -> None:
    """Answer questions about a step until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which stops its processes
    torch.set_num_threads(threads)
    if variant.prepared:
        from seqreg.workbench.data.hardware import prepare_cpu

        prepare_cpu()
    warnings.simplefilter("ignore", Advice)  # random weights are not to be trained
    model = SIZES[size].model()
    batch = SIZES[size].batch()
    if variant.compiled:
        model.compile()
    step = variant.step(model, batch)

    def seconds() -> float:
        model.zero_grad(set_to_none=True)
        begin = clock()
        step()
        return clock() - begin

    def operations() -> tuple[int, float]:
        begin = clock()
        with torch.compiler.set_stance("force_eager"):  # the same products, which a counter sees
            return count_flops(step), clock() - begin

    def memory() -> int:
        again = variant.step(model, batch)  # with what a term keeps from its first step
        if variant.compiled:
            step()  # it is compiled here
        return peak_memory(again, model)

    answers: dict[str, Callable[[], Any]] = {
        "seconds": seconds,
        "operations": operations,
        "memory": memory,
        "peak": matmul_peak,
        "profile": lambda: profile_step(variant.name, step, model, _count_products, matmul_peak()),
    }
    with contextlib.suppress(EOFError, ConnectionError):  # nobody asks any more
        pipe.send("ready")
        while True:
            pipe.send(answers[pipe.recv()]())


class Worker:
    """A process that holds one variant."""

    def __init__(self, size: str, variant: Variant, threads: int) -> None:
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload([__name__])  # imports are paid once
        self.variant = variant
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_work, args=(theirs, size, variant, threads), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, question: str) -> Any:
        """Its answer: "seconds", "operations", "memory", "peak" or "profile"."""
        with contextlib.suppress(ConnectionError):  # if it is gone, there is no answer either
            self._pipe.send(question)
        return self.wait()

    def wait(self) -> Any:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise Stopped(
                f"the process of {self.variant.name!r} ended with code {self._process.exitcode}; -9: too little memory"
            ) from None

    def close(self) -> None:
        self._pipe.close()  # which ends it, unless it is at work
        self._process.join(2)
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()
