"""Drift against slow computations in float64, from all logits and all weights at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqreg.integrations.hf import r4f
from seqreg.smoothness import linear_cka
from seqreg.spectral_norm import fold
from seqreg.workbench.scores import drift
from tests.helpers import tiny_models

NAMES = ["bart", "t5", "bert", "gpt2"]


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """A starting model, and the same after some random steps."""
    start = tiny_models.make(name)
    trained, generator = copy.deepcopy(start), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return trained, start


@torch.no_grad()
def log_probabilities(model: nn.Module, batch: dict[str, Tensor], name: str) -> Tensor:
    """Of the labelled positions [n, V], from the model's own output in float64."""
    output = copy.deepcopy(model).double().eval()(**batch)
    logits, labels = output.logits, batch["labels"]
    if name == "gpt2":
        logits, labels = logits[:, :-1], labels[:, 1:]
    chosen = logits if labels.dim() == 1 else logits[labels != -100]
    return torch.log_softmax(chosen, -1)


def kls(trained: nn.Module, start: nn.Module, batches: list[dict[str, Tensor]], name: str) -> tuple[float, float]:
    p, q = (torch.cat([log_probabilities(model, batch, name) for batch in batches]) for model in (trained, start))
    return float((p.exp() * (p - q)).sum(-1).mean()), float((q.exp() * (q - p)).sum(-1).mean())


def flat(model: nn.Module, without: tuple[str, ...] = ()) -> Tensor:
    return torch.cat([p.detach().double().flatten() for key, p in model.named_parameters() if key not in without])


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_the_formulas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, start = pair(name)
    batches = [tiny_models.batch(name), tiny_models.batch(name, seed=2, rows=2)]
    before = torch.get_rng_state()
    numbers = drift.measure(trained, start, batches, examples=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert trained.training
    assert start.training
    measured = numbers["kl_trained_start"], numbers["kl_start_trained"]
    assert measured == pytest.approx(kls(trained, start, batches, name), rel=2e-5)
    assert min(measured) > 0.01
    assert abs(measured[0] - measured[1]) > 1e-4  # the two directions are told apart
    distance = (flat(trained) - flat(start)).norm() / flat(start).norm()
    assert numbers["weight_distance"] == pytest.approx(float(distance), rel=1e-6)
    assert (numbers["parameters"], numbers["new_parameters"]) == (len(flat(start)), [])
    labels = [batch["labels"][:, 1:] if name == "gpt2" else batch["labels"] for batch in batches]
    assert numbers["positions"] == sum(int((one != -100).sum()) for one in labels)
    monkeypatch.setattr(drift, "ELEMENTS", tiny_models.VOCAB * 2)  # two positions, 96 weights at a time
    again = drift.measure(trained, start, batches, examples=5)
    assert again["cka"] == numbers["cka"]
    for key in ("kl_trained_start", "kl_start_trained", "weight_distance"):
        assert again[key] == pytest.approx(numbers[key], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_cka_is_of_the_last_states_of_real_tokens(name: str) -> None:
    trained, start = pair(name)
    batch = tiny_models.batch(name)
    numbers = drift.measure(trained, start, [batch], examples=3)
    states = []
    for model in (trained, start):
        output = copy.deepcopy(model).eval()(**batch, output_hidden_states=True)
        layers = output.encoder_hidden_states if name in ("bart", "t5") else output.hidden_states
        states.append(layers[-1][batch["attention_mask"].bool()].detach())
    assert numbers["cka"] == pytest.approx(linear_cka(*states), abs=1e-5)
    assert (numbers["cka_of"], numbers["cka_tokens"]) == ("decoder" if name == "gpt2" else "encoder", 18)
    assert drift.measure(copy.deepcopy(start), start, [batch], examples=3)["cka"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_batches_change_nothing(name: str) -> None:
    trained, start = pair(name)
    whole = drift.measure(trained, start, [tiny_models.batch(name)], examples=3)
    rows = [{key: value[row : row + 1] for key, value in tiny_models.batch(name, pad=3).items()} for row in range(3)]
    for batches in ([tiny_models.batch(name, pad=5)], rows):
        numbers = drift.measure(trained, start, batches, examples=3)
        for key, value in whole.items():
            assert numbers[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key


def test_no_step_is_no_drift() -> None:
    _, start = pair("bart")
    numbers = drift.measure(copy.deepcopy(start), start, [tiny_models.batch("bart")], examples=3)
    assert [numbers[key] for key in ("kl_trained_start", "kl_start_trained", "weight_distance")] == [0.0, 0.0, 0.0]


def test_a_new_head_is_left_out_and_said() -> None:
    trained, start = pair("bert")
    head = ("classifier.weight", "classifier.bias")
    batch = tiny_models.batch("bert")
    under_trained_head = copy.deepcopy(start)
    under_trained_head.classifier.load_state_dict(trained.classifier.state_dict())
    numbers = drift.measure(trained, start, [batch], examples=3, new=head)
    assert "kl_trained_start" not in numbers
    measured = numbers["body_kl_trained_start"], numbers["body_kl_start_trained"]
    assert measured == pytest.approx(kls(trained, under_trained_head, [batch], "bert"), rel=2e-5)
    distance = (flat(trained, head) - flat(start, head)).norm() / flat(start, head).norm()
    assert numbers["weight_distance"] == pytest.approx(float(distance), rel=1e-6)
    assert numbers["new_parameters"] == sorted(head)


def test_a_normalised_head_counts_as_its_value() -> None:
    trained, start = pair("bert")
    batch = tiny_models.batch("bert")
    normalised, folded = r4f(copy.deepcopy(trained)), fold(r4f(copy.deepcopy(trained)))
    torch.manual_seed(0)
    expected = drift.measure(folded, copy.deepcopy(start), [batch], examples=3)
    numbers = drift.measure(normalised, copy.deepcopy(start), [batch], examples=3)
    assert "classifier.parametrizations.weight.original" in dict(normalised.named_parameters())
    for key in ("kl_trained_start", "weight_distance", "cka"):
        assert numbers[key] == pytest.approx(expected[key], rel=1e-3)  # of two power iterations


def test_passes_are_in_float32_whatever_is_wrapped_around_the_model() -> None:
    trained, start = pair("bart")
    plain = drift.measure(trained, start, [tiny_models.batch("bart")], examples=3)
    calls: list[Any] = []

    def wrapped(*args: Any, **kwargs: Any) -> Any:  # what Accelerate puts there computes in bfloat16
        calls.append(args)
        return type(trained).forward(trained, *args, **kwargs)

    trained.forward = wrapped  # type: ignore[method-assign]
    assert drift.measure(trained, start, [tiny_models.batch("bart")], examples=3) == plain
    assert calls == []
    assert trained.forward is wrapped  # type: ignore[comparison-overlap]


def test_a_regression_has_no_kl() -> None:
    start = tiny_models.make("bert", num_labels=1, problem_type="regression")
    trained = tiny_models.make("bert", num_labels=1, problem_type="regression", seed=1)
    batch = {**tiny_models.batch("bert"), "labels": torch.tensor([0.1, 0.5, 0.9])}
    numbers = drift.measure(trained, start, [batch], examples=3)
    assert not any("kl" in key for key in numbers)
    assert numbers["weight_distance"] > 0.1
    assert numbers["positions"] == 0
