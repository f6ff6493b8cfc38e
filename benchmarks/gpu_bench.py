"""The table of `python -m benchmarks steps` on a GPU, beside Liger's fused cross-entropy and JSD.

    pip install liger-kernel && python -m benchmarks.gpu_bench --size bart-base --dtype bfloat16

It prints Markdown: time (CUDA events, medians of rounds in turns), counted operations, and peak memory with parameters,
as ratios to the step of transformers. What Liger's Triton kernels multiply is not seen by torch's counter: their rows
have no operations. It has not been run on a GPU yet: tests run it on the CPU, with stand-ins for Liger's losses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.sizes import SIZES
from benchmarks.steps import HF, SMOOTHING, Batch, StepFunction, states_and_labels, variants
from benchmarks.worker_process import count_flops
from seqreg.errors import Advice, BadInput
from seqreg.fused.head import release_buffers

Loss = Callable[..., torch.Tensor]
LIGER = "liger fused cross-entropy"
LIGER_JSD = "liger fused cross-entropy + JSD to a second pass without gradient"
"""What `R3F(scale=0, divergence="js", grad="clean")` computes."""


@dataclass(frozen=True)
class Row:
    """A step against that of transformers; None where operations are not seen by the counter, memory not measured."""

    name: str
    time: float
    flops: float | None
    memory: float | None


def liger_losses() -> tuple[Loss, Loss] | None:
    """Cross-entropy, called with weight, states and labels, and JSD; None where Liger is not installed."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD
    except ModuleNotFoundError:
        return None
    return LigerFusedLinearCrossEntropyLoss(label_smoothing=SMOOTHING), LigerFusedLinearJSD()


def liger_steps(model: Any, batch: Batch, cross_entropy: Loss, jsd: Loss) -> dict[str, StepFunction]:
    """Steps of a language model with Liger's losses; its JSD has a gradient for the student, the first pass, alone."""
    weight = model.lm_head.weight

    def plain() -> None:
        states, labels = states_and_labels(model, batch)
        cross_entropy(weight, states, labels).backward()  # type: ignore[no-untyped-call]

    def consistency() -> None:
        student, labels = states_and_labels(model, batch)
        with torch.no_grad():
            teacher, _ = states_and_labels(model, batch)
        loss = cross_entropy(weight, student, labels) + jsd(student, weight, teacher, weight.detach(), labels)
        loss.backward()  # type: ignore[no-untyped-call]

    return {LIGER: plain, LIGER_JSD: consistency}


def steps(size: str, terms: Sequence[str] | None, device: str, losses: tuple[Loss, Loss] | None) -> tuple[Any, Any]:
    """The model, and every step by name."""
    chosen = SIZES[size]
    model = chosen.model().to(device)
    batch = {key: value.to(device) for key, value in chosen.batch().items()}
    light = [variant for variant in variants(terms, kind=chosen.kind) if variant.prepared and not variant.heavy]
    by_name = {variant.name: variant.step(model, batch) for variant in light}
    if losses is not None and chosen.kind != "classifier":
        by_name |= liger_steps(model, batch, *losses)
    return model, by_name


def measure(model: Any, by_name: Mapping[str, StepFunction], device: str, dtype: torch.dtype, rounds: int) -> list[Row]:
    """All steps in turns, after one of each that is not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in by_name}
    memory: dict[str, Any] = {}
    flops: dict[str, int] = {}
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        for name, step in by_name.items():
            flops[name] = count_flops(step)
            memory[name] = _peak(model, step, device)
        for _ in range(rounds):
            for name, step in by_name.items():
                model.zero_grad(set_to_none=True)
                seconds[name].append(_seconds(step, device))
    times = {name: statistics.median(taken) for name, taken in seconds.items()}
    return [
        Row(
            name,
            times[name] / times[HF],
            None if name in (LIGER, LIGER_JSD) else flops[name] / flops[HF],
            None if memory[name] is None else memory[name] / memory[HF],
        )
        for name in by_name
    ]


def _seconds(step: StepFunction, device: str) -> float:
    if device == "cpu":
        begin = time.process_time()
        step()
        return time.process_time() - begin
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    begins, ends = events
    begins.record()
    step()
    ends.record()
    torch.cuda.synchronize()
    return float(begins.elapsed_time(ends)) / 1000


def _peak(model: Any, step: StepFunction, device: str) -> int | None:
    """Bytes at the peak; not measured on the CPU, where `python -m benchmarks steps` does."""
    if device == "cpu":
        return None
    release_buffers()
    model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| step | time | FLOPs | memory |", "|---|---|---|---|"]
    for row in rows:
        flops, memory = ("not measured" if ratio is None else f"{ratio:.2f}x" for ratio in (row.flops, row.memory))
        lines.append(f"| {row.name} | {row.time:.2f}x | {flops} | {memory} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="bart-base")
    parser.add_argument("--terms", "-t", action="append", help="only these; may be repeated")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of autocast")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the script, no memory")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no GPU; on the CPU use `python -m benchmarks steps`", file=sys.stderr)
        return 2
    if given.rounds < 1:
        print(f"--rounds {given.rounds}: expected a whole number >= 1", file=sys.stderr)
        return 2
    losses = liger_losses() if given.device == "cuda" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Advice)
        try:
            model, by_name = steps(given.size, given.terms, given.device, losses)
        except BadInput as error:
            print(error, file=sys.stderr)
            return 2
        rows = measure(model, by_name, given.device, getattr(torch, given.dtype), given.rounds)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(f"`{given.size}`, {given.dtype}, {name}, torch {torch.__version__}, {given.rounds} rounds\n\n{table(rows)}")
    if losses is None:
        print("\nWithout Liger's rows: they need a GPU and `pip install liger-kernel`.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
