"""benchmarks/gpu_bench.py, as far as it can be run without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks import gpu_bench
from benchmarks import steps as bench_steps
from benchmarks.sizes import SIZES
from seqreg import Criterion
from seqreg.terms import r3f


def cross_entropy(weight: Any, states: Any, labels: Any) -> Any:
    return functional.cross_entropy(states @ weight.T, labels, label_smoothing=bench_steps.SMOOTHING)


def jsd(student: Any, weight: Any, teacher: Any, teacher_weight: Any, labels: Any) -> Any:
    """As Liger documents it: beta 0.5, averaged over labels that count."""
    q, p = (student @ weight.T).softmax(-1), (teacher @ teacher_weight.T).softmax(-1)
    m = (p + q) / 2
    apart = (p * (p / m).log() + q * (q / m).log()).sum(-1) / 2
    return apart[labels != -100].mean()


@pytest.mark.parametrize("name", [gpu_bench.LIGER, gpu_bench.LIGER_JSD])
def test_the_steps_with_ligers_losses_are_those_of_seqreg(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(r3f, "sample", lambda noise, embeds, *_: torch.zeros_like(embeds))  # the same masks in both
    model, batch = SIZES["tiny"].model(), SIZES["tiny"].batch(0.25)
    same = [r3f.R3F(scale=0.0, weight=1.0, divergence="js", grad="clean")] if name == gpu_bench.LIGER_JSD else []
    criterion = Criterion(*same, label_smoothing=bench_steps.SMOOTHING)
    found = []
    for step in (
        gpu_bench.liger_steps(model, batch, cross_entropy, jsd)[name],
        bench_steps.criterion_step(criterion, model, batch),
    ):
        model.zero_grad()
        torch.manual_seed(3)
        step()
        found.append({key: parameter.grad.clone() for key, parameter in model.named_parameters()})
    for key, gradient in found[1].items():
        torch.testing.assert_close(found[0][key], gradient, rtol=1e-4, atol=1e-6)


def test_the_table_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_bench.main(["--device", "cpu", "--size", "tiny", "-t", "rdrop", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    names = [variant.name for variant in bench_steps.variants(["rdrop"]) if variant.prepared]
    assert [line.split("|")[1].strip() for line in printed.splitlines() if "x |" in line] == names
    assert "| plain transformers | 1.00x | 1.00x | not measured |" in printed
    assert "Without Liger's rows" in printed


def test_a_step_of_liger_has_no_operations() -> None:
    text = gpu_bench.table([gpu_bench.Row(gpu_bench.LIGER, 0.5, None, 0.25)])
    assert text.splitlines()[-1] == f"| {gpu_bench.LIGER} | 0.50x | not measured | 0.25x |"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_bench.main([]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    assert gpu_bench.main(["--device", "cpu", "--rounds", "0"]) == 2
    assert "--rounds 0" in capsys.readouterr().err


def test_a_term_that_is_not_known_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_bench.main(["--device", "cpu", "--size", "tiny", "-t", "nosuch"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("unknown term 'nosuch'")
    assert error.count("\n") == 1
