"""What one training step costs, against the plain step of transformers: time, floating-point operations and memory.

All variants run on one model and one batch, in one process and in turns, so that ratios mean something on a machine
that is busy with other things. Operations and memory are exact; times are medians over rounds, with their range.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import BartConfig, BartForConditionalGeneration
from transformers.trainer_pt_utils import LabelSmoother

from seqreg import vocab
from seqreg.build import build_term, term_class, term_names
from seqreg.criterion import Criterion
from seqreg.errors import BadInput, nearest
from seqreg.integrations.hf import context

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler is silent

Step = Callable[[], None]
SMOOTHING = 0.1
HEAVY = 10
"""A term with more extra backwards than this is run once, and not at all on the largest model."""


@dataclass(frozen=True)
class Size:
    """A BART of random weights, and a batch for it."""

    width: int
    layers: int
    heads: int
    classes: int
    source: int
    target: int
    rows: int

    def model(self) -> BartForConditionalGeneration:
        config = BartConfig(
            vocab_size=self.classes, d_model=self.width, max_position_embeddings=max(self.source, self.target),
            encoder_layers=self.layers, encoder_attention_heads=self.heads, encoder_ffn_dim=4 * self.width,
            decoder_layers=self.layers, decoder_attention_heads=self.heads, decoder_ffn_dim=4 * self.width,
            dropout=0.1, attention_dropout=0.0, activation_dropout=0.0,
        )  # fmt: skip
        torch.manual_seed(0)
        return BartForConditionalGeneration(config).train()

    def batch(self, padding: float = 0.0) -> dict[str, torch.Tensor]:
        """Random tokens.

        Args:
            padding: the share of the targets that is padding
        """
        drawn = torch.Generator().manual_seed(1)
        source = torch.randint(4, self.classes, (self.rows, self.source), generator=drawn)
        labels = torch.randint(4, self.classes, (self.rows, self.target), generator=drawn)
        labels[:, self.target - round(padding * self.target) :] = -100
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": labels}


SIZES = {
    "tiny": Size(width=128, layers=3, heads=4, classes=2000, source=64, target=24, rows=4),
    "small": Size(width=256, layers=3, heads=4, classes=50265, source=128, target=48, rows=8),
    "bart-base": Size(width=768, layers=6, heads=12, classes=50265, source=256, target=64, rows=4),
}

HF, PLAIN = "plain transformers", "plain seqreg"
CHEAPER: dict[str, dict[str, dict[str, Any]]] = {
    "r3f": {"r3f grad=clean": {"grad": "clean"}, "r3f rows=0.5": {"rows": 0.5}, "r3f tokens=0.5": {"tokens": 0.5}},
    "jachess": {"jachess hessian=0.1": {"hessian": 0.1}},
    "smart": {"smart steps=2": {"steps": 2}},
}
"""Settings of terms that are measured besides the defaults."""


def transformers_step(model: Any, batch: dict[str, torch.Tensor]) -> Step:
    """The label-smoothed step that transformers' own Trainer makes."""
    smoother = LabelSmoother(SMOOTHING)

    def step() -> None:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        loss: torch.Tensor = smoother(model(**inputs, use_cache=False), batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def criterion_step(criterion: Criterion, model: nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    def step() -> None:
        criterion(context(model, batch, step=0)).total.backward()  # type: ignore[no-untyped-call]

    return step


def variants(
    model: nn.Module, batch: dict[str, torch.Tensor], terms: Sequence[str] | None = None, presets: bool = True
) -> dict[str, Step]:
    """Every step that is measured, by name.

    Args:
        terms: only these; all by default
        presets: also what released code computes
    """
    chosen = list(term_names() if terms is None else terms)
    for name in chosen:
        if name not in term_names():
            raise BadInput(f"unknown term {name!r}; {nearest(name, term_names())}")

    def of(settings: dict[str, Any], term: str, fused: bool = True) -> Step:
        criterion = Criterion(build_term(term, settings), label_smoothing=SMOOTHING, fused=fused)
        return criterion_step(criterion, model, batch)

    found = {
        HF: transformers_step(model, batch),
        PLAIN: criterion_step(Criterion(label_smoothing=SMOOTHING), model, batch),
    }
    for term in chosen:
        found[term] = of({}, term)
        for name, settings in CHEAPER.get(term, {}).items():
            found[name] = of(settings, term)
        for preset in term_class(term).presets if presets else ():
            found[f"{term} preset={preset}"] = of({"preset": preset}, term)
            if term not in ("neftune", "jachess"):  # nothing of these is fused
                found[f"{term} preset={preset}, from logits"] = of({"preset": preset}, term, fused=False)
    return found


def _heavy(name: str) -> bool:
    term, _, preset = name.partition(" preset=")
    settings = {"preset": preset.partition(",")[0]} if preset else {}
    return term in term_names() and build_term(term, settings).cost.backwards > HEAVY


@dataclass(frozen=True)
class Cost:
    """One step of a variant.

    Args:
        seconds: of every round
        flops: floating-point operations of matrix products
        memory: bytes at the peak, with the parameters and without an optimizer; None where not measured
    """

    seconds: tuple[float, ...]
    flops: int
    memory: int | None


@dataclass(frozen=True)
class Row:
    """A variant against the plain step of transformers; `time_range` is over rounds.

    Args:
        of_peak: achieved operations a second, over those of a large matrix product on the same machine
    """

    name: str
    time: float
    time_range: tuple[float, float]
    flops: float
    memory: float | None
    of_peak: float


@dataclass(frozen=True)
class Bench:
    size: str
    rounds: int
    threads: int
    peak: float
    """Operations a second of a large matrix product."""
    rows: tuple[Row, ...]

    def json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def count_flops(step: Step) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def peak_memory(step: Step, model: nn.Module) -> int:
    """Bytes that are allocated at the same time at most: parameters, and all that a step comes to hold."""
    gc.collect()  # what earlier steps left behind is not this one's to free
    vocab.release()  # what was kept from other steps is counted where it is needed
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    model.zero_grad(set_to_none=True)
    return most + sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def matmul_peak(width: int = 1536, tries: int = 5) -> float:
    """Operations a second of a large square product, the best of some tries."""
    a, b = torch.randn(width, width), torch.randn(width, width)
    seconds = []
    for _ in range(tries):
        begin = _clock()
        torch.mm(a, b)
        seconds.append(_clock() - begin)
    return 2 * width**3 / min(seconds)


def _clock() -> float:
    """Time of this process alone where it has one thread: others on the machine do not count."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def measure(
    size: str = "small",
    terms: Sequence[str] | None = None,
    rounds: int = 5,
    threads: int = 1,
    presets: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> Bench:
    """All variants, in turns.

    Args:
        size: "tiny", "small" or "bart-base"
        terms: only these; all by default
        rounds: every variant is timed once in each
        threads: of torch
        presets: also measure what released code computes
        progress: told what is being done, and how much of how much is done
    """
    if size not in SIZES:
        raise BadInput(f"unknown size {size!r}; {nearest(size, SIZES)}")
    if rounds < 1 or threads < 1:
        raise BadInput(f"rounds={rounds}, threads={threads}: expected whole numbers >= 1")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measure(size, terms, rounds, threads, presets, progress or (lambda *_: None))
    finally:
        torch.set_num_threads(before)
        vocab.release()


def _measure(
    size: str,
    terms: Sequence[str] | None,
    rounds: int,
    threads: int,
    presets: bool,
    progress: Callable[[str, int, int], None],
) -> Bench:
    model = SIZES[size].model()
    steps = variants(model, SIZES[size].batch(), terms, presets)
    if size == "bart-base":  # a quarter of an hour each
        steps = {name: step for name, step in steps.items() if not _heavy(name)}
    light = [name for name in steps if not _heavy(name)]
    done, whole = 0, len(steps) + len(light) * (rounds + 1)

    def each(what: str, names: Sequence[str]) -> Iterator[tuple[str, Step]]:
        nonlocal done
        for name in names:
            progress(f"{what}: {name}", done, whole)
            model.zero_grad(set_to_none=True)
            yield name, steps[name]
            done += 1

    flops: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in each("operations", list(steps)):
        begin = _clock()
        flops[name] = count_flops(step)
        seconds[name] += [] if name in light else [_clock() - begin]
    memory = {name: peak_memory(step, model) for name, step in each("memory", light)}
    peak = matmul_peak()
    for turn in range(rounds):
        for name, step in each(f"time, round {turn + 1} of {rounds}", light):
            begin = _clock()
            step()
            seconds[name].append(_clock() - begin)
        peak = max(peak, matmul_peak())
    progress("done", whole, whole)
    costs = {name: Cost(tuple(seconds[name]), flops[name], memory.get(name)) for name in steps}
    return Bench(size, rounds, threads, peak, tuple(_row(name, cost, costs[HF], peak) for name, cost in costs.items()))


def _row(name: str, cost: Cost, plain: Cost, peak: float) -> Row:
    ratios = sorted(own / other for own, other in zip(cost.seconds, plain.seconds, strict=False))
    middle = statistics.median(cost.seconds)
    return Row(
        name,
        middle / statistics.median(plain.seconds),
        (ratios[0], ratios[-1]),
        cost.flops / plain.flops,
        None if cost.memory is None or plain.memory is None else cost.memory / plain.memory,
        cost.flops / middle / peak,
    )


def plot(bench: Bench, path: str) -> None:
    """Bars of time and memory for every variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = bench.rows[::-1]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 1.2 + 0.28 * len(rows)), sharey=True, layout="constrained")
    places = range(len(rows))
    for axis, title in zip(axes, ("time", "peak memory"), strict=True):
        values = [row.time if title == "time" else row.memory or 0.0 for row in rows]
        colours = ["#0072b2" if "from logits" not in row.name else "#d55e00" for row in rows]
        axis.barh(places, values, color=colours, height=0.7)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{title}, plain transformers = 1")
        widest = max(value for value in values if value < HEAVY)  # a heavy one leaves the picture, and its number stays
        axis.set_xlim(0, 1.15 * widest)
        for place, value in zip(places, values, strict=True):
            shown = f" {value:.2f}" if value else " not measured"
            axis.text(min(value, 1.02 * widest), place, shown, va="center", fontsize=8)
    spread = [[row.time - row.time_range[0] for row in rows], [row.time_range[1] - row.time for row in rows]]
    axes[0].errorbar(
        [row.time for row in rows], places, xerr=[[max(x, 0.0) for x in side] for side in spread],
        fmt="none", ecolor="#555555", elinewidth=0.8,
    )  # fmt: skip
    axes[0].set_yticks(places, [row.name for row in rows], fontsize=8)
    figure.suptitle(f"One training step, {bench.size} (blue: seqreg; orange: the way that released code computes it)")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
