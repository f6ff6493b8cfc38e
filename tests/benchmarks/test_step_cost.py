"""Operations are deterministic, so they are asserted; times are only printed, by `python -m benchmarks steps`."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import sizes, worker_process
from benchmarks import step_cost as bench
from benchmarks import steps as bench_steps
from benchmarks.__main__ import app
from seqreg import BadInput, Criterion, build_term
from seqreg.errors import Advice, Stopped
from seqreg.integrations.hf import context
from seqreg.terms.rdrop import RDrop

TINY = {
    "seq2seq": sizes.Size(width=32, layers=2, heads=2, classes=200, source=12, target=8, rows=3, together=1),
    "causal": sizes.Size(
        width=48, layers=2, heads=3, classes=200, source=4, target=8, rows=3, together=1, kind="causal", key_heads=1
    ),
    "classifier": sizes.Size(
        width=32, layers=2, heads=2, classes=200, source=12, target=0, rows=3, together=1, kind="classifier"
    ),
}


def with_dropout(model: Any) -> Any:
    """A Llama has dropout in its attention alone, and none unless it is asked for."""
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.2
    return model


@pytest.mark.parametrize("kind", ["causal", "classifier"])
def test_every_step_of_another_kind_of_model_can_be_made(kind: Any) -> None:
    """The plain step is that of transformers, and two passes cost twice as much."""
    size = TINY[kind]
    model, batch = size.model(), size.batch()
    counted = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Advice)
        for variant in bench_steps.variants(kind=kind):
            if not variant.heavy:
                counted[variant.name] = worker_process.count_flops(variant.step(model, batch))
    plain, seqreg = counted[bench_steps.HF], counted[bench_steps.PLAIN]
    head = 3 * 2 * size.width * size.classes * size.rows * size.source  # positions without a label
    assert seqreg == (plain - head if kind == "causal" else plain)
    assert counted["r3f"] == counted["rdrop"] == 2 * seqreg
    assert counted[bench_steps.TWO_PASSES] == 2 * plain
    assert not any("where" in name for name in counted)
    one, other = (
        gradients_of(model.eval(), step)
        for step in (
            bench_steps.transformers_step(model, batch),
            bench_steps.criterion_step(Criterion(label_smoothing=bench_steps.SMOOTHING), model, batch),
        )
    )
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def small() -> Any:
    size = sizes.SIZES["small"]
    return size, size.model()


def flops(model: Any, batch: Any, term: str | None = None, **settings: Any) -> int:
    terms = [] if term is None else [build_term(term, settings)]
    return worker_process.count_flops(bench_steps.criterion_step(Criterion(*terms, label_smoothing=0.1), model, batch))


def test_operations_of_the_small_step(small: Any) -> None:
    size, model = small
    batch = size.batch()
    plain = worker_process.count_flops(bench_steps.transformers_step(model, batch))
    assert flops(model, batch) == plain  # the same products, and none of them hidden from the counter
    assert flops(model, batch, "r3f") <= 2.0 * plain
    assert flops(model, batch, "rdrop") <= 2.0 * plain
    assert flops(model, batch, "r3f", grad="clean") <= 1.34 * plain
    assert flops(model, batch, "r3f", example_fraction=0.5) <= 1.5 * plain


def test_a_reference_costs_one_more_forward() -> None:
    size = sizes.SIZES["tiny"]
    model, batch = size.model(), size.batch()
    plain = worker_process.count_flops(bench_steps.transformers_step(model, batch))
    with torch.no_grad():
        forward = worker_process.count_flops(lambda: Criterion()(context(model, batch), training=False))
    assert flops(model, batch, "anchor") == flops(model, batch, "bregman") == plain + forward
    assert flops(model, batch, "anchor", divergence="l2") == plain


def test_memory_of_a_reference(small: Any) -> None:
    """No more than one copy of the weights, without logits of the reference; with adapters not even that."""
    size, model = small
    batch = size.batch()
    own = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    theirs = worker_process.peak_memory(bench_steps.transformers_step(model, batch), model)
    ours = worker_process.peak_memory(step_with(model, batch), model)
    with_anchor = worker_process.peak_memory(step_with(model, batch, build_term("anchor")), model)
    assert with_anchor <= min(1.25 * theirs, ours + own)
    adapters = peft.get_peft_model(size.model(), peft.LoraConfig(target_modules=["q_proj", "v_proj"])).train()
    criterion = Criterion(build_term("anchor"), label_smoothing=0.1)
    with_anchor = worker_process.peak_memory(bench_steps.criterion_step(criterion, adapters, batch), adapters)
    ours = worker_process.peak_memory(step_with(adapters, batch), adapters)
    assert with_anchor <= ours + 0.2 * own  # buffers of a few tokens
    assert criterion.state_dict() == {}


def step_with(model: Any, batch: Any, *terms: Any) -> Any:
    return bench_steps.criterion_step(Criterion(*terms, label_smoothing=0.1), model, batch)


@pytest.mark.parametrize(("term", "layers", "attention"), [("smart", 2.67, 3), ("jachess", 1.7, 2)])
def test_operations_of_terms_that_spare_layers(small: Any, term: str, layers: float, attention: float) -> None:
    """An ascent has no parameter gradients, JacHess no product with the head: nothing is spared inside attention."""
    size, model = small
    batch = size.batch()

    def counted(count: Any) -> tuple[int, int]:
        step = bench_steps.criterion_step(Criterion(build_term(term), label_smoothing=0.1), model, batch)
        return count(bench_steps.transformers_step(model, batch)), count(step)

    (whole, found), (plain, without) = counted(worker_process.count_flops), counted(without_attention)
    assert without <= layers * plain
    assert found <= layers * plain + attention * (whole - plain)


def without_attention(step: bench_steps.StepFunction) -> int:
    """As torch counts on the CPU, of a step after the first, in which a term may measure its start."""
    step()
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def test_the_products_inside_attention_are_counted() -> None:
    """As many forward as by the plain formula; the fused backward makes one of them again."""
    q, k, v = (torch.randn(2, 4, size, 8, requires_grad=True) for size in (24, 64, 64))
    product = 2 * 2 * 4 * 24 * 64 * 8

    def step() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()

    with sdpa_kernel(SDPBackend.MATH):
        assert worker_process.count_flops(step) == 6 * product
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert worker_process.count_flops(step) == 7 * product


def test_padding_costs_the_head_nothing(small: Any) -> None:
    """With a quarter of the targets padded, a quarter of the head's operations is left out; transformers does them."""
    size, model = small
    plain = worker_process.count_flops(bench_steps.transformers_step(model, size.batch(0.25)))
    head = 3 * 2 * size.rows * size.target * size.classes * size.width
    assert plain == worker_process.count_flops(bench_steps.transformers_step(model, size.batch()))
    assert flops(model, size.batch(0.25)) == plain - head // 4
    assert flops(model, size.batch(0.25), "r3f") == 2 * (plain - head // 4)


def test_the_plain_step_is_that_of_transformers() -> None:
    """Two ways to one loss, with every gradient."""
    size = sizes.SIZES["tiny"]
    model, batch = size.model().eval(), size.batch(0.25)
    found = []
    for step in (
        bench_steps.transformers_step(model, batch),
        bench_steps.criterion_step(Criterion(label_smoothing=bench_steps.SMOOTHING), model, batch),
    ):
        model.zero_grad()
        step()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("name", "criterion"), [
    (bench_steps.LINEAR, Criterion()),
    (bench_steps.DFT, Criterion(loss="dft")),
    (bench_steps.TWO_PASSES, Criterion(label_smoothing=bench_steps.SMOOTHING)),
])  # fmt: skip
def test_what_others_compute_is_the_same_loss(name: str, criterion: Criterion) -> None:
    """Without dropout R-Drop's two passes are one: the divergence is 0, the task losses are equal."""
    if name == bench_steps.LINEAR and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("torch before 2.13")
    size = sizes.SIZES["tiny"]
    model, batch = size.model().eval(), size.batch(0.25)
    found = []
    (variant,) = [some for some in bench_steps.variants(["anchor", "rdrop"], presets=False) if some.name == name]
    for step in (variant.step(model, batch), bench_steps.criterion_step(criterion, model, batch)):
        model.zero_grad()
        step()
        found.append({key: parameter.grad.clone() for key, parameter in model.named_parameters()})
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-4, atol=1e-7)


def gradients_of(model: Any, step: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    step()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["seq2seq", "causal", "classifier"])
def test_the_divergence_of_r_drop_by_hand_is_that_of_the_term(kind: Any) -> None:
    """With dropout, from the same masks: both task losses, and the KL both ways, halved."""
    size = dataclasses.replace(TINY[kind], target=8 if kind != "classifier" else 0)
    model, batch = with_dropout(size.model()), size.batch(0.25)
    criterion = Criterion(RDrop(alpha=5.0, task="mean"), label_smoothing=bench_steps.SMOOTHING, fused=False)
    expected = gradients_of(model, bench_steps.criterion_step(criterion, model, batch))
    found = gradients_of(model, bench_steps.two_pass_step(model, batch, weight=5.0))
    without = gradients_of(model, bench_steps.two_pass_step(model, batch, weight=0.0))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert any(not torch.allclose(without[name], gradient, rtol=0.05) for name, gradient in expected.items())


def test_memory_counts_what_a_step_holds() -> None:
    model = torch.nn.Linear(10, 10, bias=False)

    def step() -> None:
        held = torch.ones(1000, 1000)
        del held
        torch.ones(500, 1000)

    assert worker_process.peak_memory(step, model) == pytest.approx(4e6 + 400, rel=1e-3)


def test_measure_and_plot(tmp_path: Path) -> None:
    told: list[str] = []
    found = bench.measure("tiny", ["rdrop"], rounds=1, progress=lambda what, done, whole: told.append(what))
    names = [row.name for row in found.rows]
    assert names[:4] == [bench_steps.HF, bench_steps.UNPREPARED, bench_steps.PLAIN, "rdrop"]
    presets = ["rdrop preset=fairseq_rdrop", "rdrop preset=fairseq_rdrop, from logits"]
    torchs = [bench_steps.LINEAR] if hasattr(torch.nn.functional, "linear_cross_entropy") else []
    assert names[4:] == ["rdrop where=decoder, layer=0", *presets, bench_steps.TWO_PASSES, *torchs]
    assert found.rows[0].time == found.rows[0].flops == found.rows[0].memory == 1.0
    assert all(0 < row.of_peak < 1.5 for row in found.rows)
    assert told[-1] == "done"
    assert json.loads(json.dumps(dataclasses.asdict(found)))["size"] == "tiny"
    bench.plot(found, str(tmp_path / "cost.png"))
    assert (tmp_path / "cost.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "smal"}, "did you mean 'small'"),
        ({"terms": ["r3"]}, "did you mean 'r3f'"),
        ({"rounds": 0}, "rounds=0"),
    ],
)
def test_mistakes_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        bench.measure(**{"size": "tiny", **arguments})


def test_a_term_that_is_named_twice_is_measured_once() -> None:
    assert bench_steps.variants(["rdrop", "rdrop"]) == bench_steps.variants(["rdrop"])


def test_a_process_that_is_gone_is_named() -> None:
    """While it is idle, and while it works: one line, and no pipe that is taken for the reader of our output."""
    for killed_at in ("idle", "work"):
        worker = worker_process.Worker("tiny", bench_steps.Variant(bench_steps.PLAIN), threads=1)
        try:
            worker.wait()
            if killed_at == "work":
                worker._pipe.send("peak")
            worker._process.kill()
            if killed_at == "idle":
                worker._process.join()
            with pytest.raises(Stopped, match="'plain seqreg' ended with code -9"):
                worker.ask("seconds")
        finally:
            worker.close()


def test_processes_leave_an_interrupt_to_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    worker = worker_process.Worker("tiny", bench_steps.Variant(bench_steps.PLAIN), threads=1)
    worker.wait()
    assert worker._process.pid is not None
    os.kill(worker._process.pid, signal.SIGINT)
    assert worker.ask("seconds") > 0
    worker._pipe.close()  # as if the command had been killed
    worker._process.join(30)
    assert worker._process.exitcode == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "cost.png").mkdir()
    for plot, message in (("cost.png", "cannot be written"), ("cost.jpg", r"ends in \.png"), ("no/cost.png", "folder")):
        with pytest.raises(BadInput, match=message):
            app(["steps", "--size", "tiny", "--plot", str(tmp_path / plot)], standalone_mode=False)


def test_a_step_that_is_timed_once_lies_within_its_range() -> None:
    plain = bench.StepCost((1.0, 2.0, 4.0), 10, 100)
    row = bench._row("heavy", bench.StepCost((60.0,), 30, None), plain)
    assert (row.time, row.time_range) == (30.0, (15.0, 60.0))
    row = bench._row("light", bench.StepCost((2.0, 6.0, 8.0), 30, 50), plain)
    assert (row.time, row.time_range, row.flops, row.memory) == (3.0, (2.0, 3.0), 3.0, 0.5)


def test_compiled_steps_are_added_when_asked_for() -> None:
    made = bench_steps.variants(["r3f"], presets=False, compiled=True)
    names = [variant.name for variant in made if variant.compiled]
    assert names == ["plain transformers, compiled", "plain seqreg, compiled", "r3f, compiled"]
    assert not any(variant.compiled for variant in bench_steps.variants(["r3f"]))


def test_operations_of_a_compiled_step_are_those_of_the_step() -> None:
    counts = []
    for variant in bench_steps.variants([], presets=False, compiled=True):
        if variant.name.removesuffix(bench_steps.COMPILED) == bench_steps.HF:
            with closing(worker_process.Worker("tiny", variant, 1)) as worker:
                worker.wait()
                counts.append(worker.ask("operations")[0])
    assert len(counts) == 2
    assert counts[0] == counts[1] > 0


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(BadInput, match="--compile: torch's inductor needs a C"):
        bench.measure("tiny", ["r3f"], compiled=True)
