"""Where the time of a step goes: matrix products and their rate, attention, other operators, optimizer, the rest."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

MATRIX_PRODUCTS = frozenset(
    f"aten::{name}" for name in "mm addmm addmm_ bmm baddbmm baddbmm_ mv addmv linear _addmm_activation".split()
)
ATTENTION = "scaled_dot_product"


@dataclass(frozen=True)
class StepProfile:
    """One step, with an update of AdamW.

    Args:
        seconds: CPU time of step and update, without a profiler
        shares: of the time of step and update under the profiler, by kind; they add up to 1
        product_flops: operations of the matrix products, those inside attention not counted
        product_seconds: their time under the profiler
        peak: operations a second of a large matrix product on this machine
        system: share of `seconds` inside the operating system: new pages, most of all
        page_faults: pages that the system gave in this step and update
        waiting: wall-clock time under the profiler over CPU time: above 1 others are on the machine, and shares and
            rates are theirs too
    """

    name: str
    seconds: float
    shares: dict[str, float]
    product_flops: int
    product_seconds: float
    peak: float
    system: float
    page_faults: int
    waiting: float

    @property
    def of_peak(self) -> float:
        """How fast matrix products are, over a large one."""
        return self.product_flops / self.product_seconds / self.peak if self.product_seconds else 0.0


def profile_step(
    name: str, step: Callable[[], None], model: nn.Module, count: Callable[[Callable[[], None]], int], peak: float
) -> StepProfile:
    """Profile a step, after two that warm up.

    Args:
        count: operations of the matrix products of a step, without those inside attention
        peak: see `StepProfile`
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def whole() -> None:
        optimizer.zero_grad(set_to_none=True)
        step()
        optimizer.step()

    whole()
    flops = count(step)
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    whole()
    seconds, after = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        wall, used = time.perf_counter(), time.process_time()
        whole()
        total, used = time.perf_counter() - wall, time.process_time() - used
    waiting = total / used
    kinds = dict.fromkeys(("matrix products", "attention", "optimizer", "other operators"), 0.0)
    for event in profiler.key_averages():
        kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    kinds["outside of operators"] = max(total - sum(kinds.values()), 0.0)
    shares = {kind: taken / sum(kinds.values()) for kind, taken in kinds.items()}
    system = (after.ru_stime - before.ru_stime) / seconds
    faults = after.ru_minflt - before.ru_minflt
    return StepProfile(name, seconds, shares, flops, kinds["matrix products"], peak, system, faults, waiting)


def kind_of(operator: str) -> str:
    """What an operator counts as, by its name in torch's profiler."""
    if operator in MATRIX_PRODUCTS:
        return "matrix products"
    if ATTENTION in operator:
        return "attention"
    if "adam" in operator.lower() or operator.startswith("Optimizer."):
        return "optimizer"
    return "other operators"
