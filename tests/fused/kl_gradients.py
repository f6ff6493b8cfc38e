"""Time KL gradients that are written out against the same by autograd: `python -m tests.fused.kl_gradients`."""

from __future__ import annotations

import statistics
import time

import torch

from seqreg.forward import Pass
from seqreg.fused import block
from seqreg.fused.head import Projection
from seqreg.fused.loss import Summand, fused_loss
from seqreg.losses import Base
from seqreg.objective import BaseLoss, Consistency

ROUNDS = 7


def seconds(width: int, positions: int, classes: int, divergence: block.Divergence) -> tuple[float, float]:
    """Of a fused loss and its backward: gradients written out, and by autograd. Medians, in turns."""
    torch.manual_seed(0)
    weight = (0.05 * torch.randn(classes, width)).requires_grad_()
    states = [torch.randn(1, positions, width).requires_grad_() for _ in range(2)]
    labels, ones = torch.randint(0, classes, (1, positions)), torch.ones(1, positions)
    written, times = dict(block.KL_FAMILY), ([], [])  # type: tuple[object, tuple[list[float], list[float]]]
    try:
        for _ in range(ROUNDS + 1):
            for family, taken in zip((written, {}), times, strict=True):
                block.KL_FAMILY = family  # type: ignore[assignment]
                heads = [Projection(each, weight, None, torch.float32) for each in states]
                passes = [Pass(head.logits, projection=head) for head in heads]
                parts = BaseLoss(passes[0]), Consistency(passes[0], passes[1], divergence)
                start = time.process_time()
                loss = fused_loss([Summand(part, ones, ones > 0) for part in parts], labels, Base(0.1))[0]
                loss.backward()  # type: ignore[no-untyped-call]
                taken.append(time.process_time() - start)
    finally:
        block.KL_FAMILY = written  # type: ignore[assignment]
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| D | tokens | V | divergence | written out, s | autograd, s | ratio |\n|---|---|---|---|---|---|---|")
    for width, positions, classes in ((256, 384, 50265), (768, 256, 50265), (128, 96, 2000)):
        for divergence in ("symmetric_kl", "kl"):
            ours, derived = seconds(width, positions, classes, divergence)  # type: ignore[arg-type]
            sizes = f"| {width} | {positions} | {classes} | {divergence} |"
            print(f"{sizes} {ours:.4f} | {derived:.4f} | {derived / ours:.2f} |")
