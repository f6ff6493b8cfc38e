"""What one training step with each term costs, against the same step without.

    python tools/cost.py

Floating-point operations are exact, and the same on every machine; time is the median of interleaved rounds on this
one, with its spread. The model: a BART of 3 + 3 layers, d = 128, a vocabulary of 2000, dropout 0.1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BartConfig, BartForConditionalGeneration

from seqreg import Criterion, Term, build_term
from seqreg.build import term_names
from seqreg.integrations.hf import context
from seqreg.terms.jachess import JacHess


def step(*terms: str | Term) -> Callable[[], None]:
    """One forward and backward with these terms."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=2000, d_model=128, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_position_embeddings=128,
        attn_implementation="eager",
    )  # fmt: skip
    model = BartForConditionalGeneration(config).train()
    batch = {
        "input_ids": torch.randint(4, 2000, (4, 64)),
        "attention_mask": torch.ones(4, 64, dtype=torch.long),
        "labels": torch.randint(4, 2000, (4, 24)),
    }
    chosen = [build_term(term) if isinstance(term, str) else term for term in terms]
    criterion = Criterion(*chosen, label_smoothing=0.1)
    return lambda: criterion(context(model, batch, step=0)).total.backward()


def step_flops(*terms: str | Term) -> int:
    """Floating-point operations of one step."""
    run = step(*terms)
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def times(steps: dict[str, Callable[[], None]], rounds: int = 9) -> dict[str, list[float]]:
    """Seconds of every step in every round, one after the other."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            begin = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - begin)
    return found


def ratios() -> dict[str, float]:
    """The step with each term over the step without."""
    plain = step_flops()
    return {name: step_flops(name) / plain for name in term_names()}


def main() -> None:
    flops = {"plain": 1.0, **ratios(), "jachess with hessian": step_flops(JacHess(hessian=0.1)) / step_flops()}
    steps = {"plain": step(), **{name: step(name) for name in term_names()}}
    steps["jachess with hessian"] = step(JacHess(hessian=0.1))
    for run in steps.values():
        run()
    measured = times(steps)
    print(f"{'step':22s} {'FLOPs':>6s} {'time':>6s}   range")
    for name, seconds in measured.items():
        against = sorted(a / b for a, b in zip(seconds, measured["plain"], strict=True))
        middle = statistics.median(seconds) / statistics.median(measured["plain"])
        print(f"{name:22s} {flops[name]:5.2f}x {middle:5.2f}x   {against[0]:.2f} to {against[-1]:.2f}")


if __name__ == "__main__":
    main()
