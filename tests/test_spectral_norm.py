from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqreg import BadInput, Criterion, Evaluation, spectral_norm
from seqreg.integrations.hf import context, count, r4f
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models


def norms(model: Any) -> dict[str, float]:
    return {
        name: torch.linalg.matrix_norm(module.weight.detach(), 2).item()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and nn.utils.parametrize.is_parametrized(module, "weight")
    }


@pytest.mark.parametrize("model", tiny_models.CLASSIFIERS)
def test_every_matrix_of_the_head_has_norm_one(model: str) -> None:
    net = r4f(tiny_models.make(model), warmup=200).eval()
    found = norms(net)
    assert found
    assert all(norm == pytest.approx(1, abs=1e-3) for norm in found.values())
    body = net.base_model_prefix
    assert not any(name.startswith(f"{body}.") for name in found)
    if model in ("roberta", "xlm_r", "electra", "bart_classifier", "t5_classifier"):
        assert {name.rpartition(".")[2] for name in found} == {"dense", "out_proj"}


@pytest.mark.parametrize("model", tiny_models.CLASSIFIERS)
def test_the_released_code_normalises_the_last_layer_only(model: str) -> None:
    net = r4f(tiny_models.make(model), "out_proj")
    assert len(norms(net)) == 1
    assert next(iter(norms(net))).endswith(("out_proj", "classifier"))


@pytest.mark.parametrize("model", tiny_models.CLASSIFIERS)
def test_folded_export_gives_identical_logits(model: str, tmp_path: Path) -> None:
    net = r4f(tiny_models.make(model))
    batch = {key: value for key, value in tiny_models.batch(model).items() if key != "labels"}
    net(**batch)
    net.eval()
    expected = net(**batch).logits
    state = spectral_norm.folded_state(net)
    assert torch.equal(net(**batch).logits, expected), "reading the folded state changes nothing"
    spectral_norm.fold(net).save_pretrained(tmp_path)
    assert not spectral_norm.raw_state(net)
    loaded = type(net).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**batch).logits, expected)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in state.items())


@pytest.mark.parametrize("model", [*tiny_models.SEQ2SEQ, *tiny_models.CAUSAL])
def test_language_model_heads_are_refused(model: str) -> None:
    with pytest.raises(BadInput, match="has a language-model head"):
        r4f(tiny_models.make(model))


def test_refuses_to_normalise_twice_and_unknown_layers() -> None:
    net = r4f(tiny_models.make("roberta"), "out_proj")
    with pytest.raises(BadInput, match="normalised already"):
        r4f(net)
    assert len(norms(net)) == 1, "a refused call changes nothing"
    with pytest.raises(BadInput, match="layers='dense'"):
        spectral_norm.spectral_norm(nn.Linear(2, 2), "dense")  # type: ignore[arg-type]


def test_gradient_through_the_norm() -> None:
    """d/dW of W / (u' W v) with u and v held: against finite differences."""
    weight = torch.randn(3, 4, dtype=torch.float64)
    norm = spectral_norm.SpectralNorm(weight, warmup=3).eval()
    assert torch.autograd.gradcheck(norm, weight.requires_grad_())


def test_extra_passes_use_the_norm_of_the_clean_pass() -> None:
    """Power iteration moves in the clean pass only; otherwise R3F would also measure the head's own movement."""
    net = tiny_models.dropout_off(r4f(tiny_models.make("roberta"), warmup=0))
    ctx = Evaluation(context(net, tiny_models.batch("roberta")))
    vectors = [value.clone() for key, value in spectral_norm.raw_state(net).items() if key.endswith(".u")]
    clean = ctx.clean.logits
    moved = [value.clone() for key, value in spectral_norm.raw_state(net).items() if key.endswith(".u")]
    assert not any(torch.equal(a, b) for a, b in zip(vectors, moved, strict=True))
    assert torch.equal(ctx.forward(dropout="independent").logits, clean)
    assert torch.equal(ctx.forward(dropout="shared").logits, clean)
    after = [value for key, value in spectral_norm.raw_state(net).items() if key.endswith(".u")]
    assert all(torch.equal(a, b) for a, b in zip(moved, after, strict=True))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_gradient_does_not_depend_on_accumulation(accumulate: int) -> None:
    """One power iteration an optimizer step, however many passes it takes."""

    def gradient(pieces: int) -> Tensor:
        net = tiny_models.dropout_off(r4f(tiny_models.make("roberta"), warmup=1))
        batch = tiny_models.batch("roberta", rows=4)
        parts = [{k: v[i::pieces] for k, v in batch.items()} for i in range(pieces)]
        whole = count(net, parts)
        for part in parts:
            Criterion()(context(net, part, count=whole, step=0)).total.backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    one, several = gradient(1), gradient(accumulate)
    assert (one - several).norm() <= 1e-6 * one.norm()


def test_the_head_itself_iterates_in_every_pass() -> None:
    net = r4f(tiny_models.make("roberta"), "out_proj", warmup=0)
    batch = {k: v for k, v in tiny_models.batch("roberta").items() if k != "labels"}

    def vector() -> Tensor:
        return next(value.clone() for key, value in spectral_norm.raw_state(net).items() if key.endswith(".u"))

    (net(**batch).logits.sum() + net(**batch).logits.sum()).backward()  # the first graph outlives the second iteration
    before = vector()
    net(**batch)
    assert not torch.equal(before, vector())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    net = r4f(tiny_models.make("roberta"))
    with torch.autocast("cpu", dtype):
        report = Criterion(R3F(scale=0.1))(context(net, tiny_models.batch("roberta")))
    report.total.backward()
    assert torch.isfinite(report.total)


def test_folding_in_training_mode_or_a_copy_leaves_the_rest_alone() -> None:
    net = r4f(tiny_models.make("roberta"), warmup=0)
    batch = {k: v for k, v in tiny_models.batch("roberta").items() if k != "labels"}
    net(**batch)
    state = spectral_norm.folded_state(net)
    copied = spectral_norm.fold(copy.deepcopy(net))
    assert all(torch.equal(value, copied.state_dict()[key]) for key, value in state.items())
    expected = net.eval()(**batch).logits
    assert torch.equal(copied.eval()(**batch).logits, expected)
    spectral_norm.fold(net)
    assert torch.equal(net(**batch).logits, expected)


def test_a_bare_layer_and_a_zero_layer() -> None:
    layer = nn.Linear(3, 2)
    spectral_norm.spectral_norm(layer)
    assert set(spectral_norm.folded_state(layer)) == {"weight", "bias"}
    assert spectral_norm.raw_state(layer).keys() >= {"parametrizations.weight.original"}
    zero = nn.Linear(3, 2)
    nn.init.zeros_(zero.weight)
    spectral_norm.spectral_norm(zero)
    assert torch.isfinite(zero(torch.ones(1, 3))).all()


def test_trains_under_r3f() -> None:
    net = r4f(tiny_models.make("roberta"))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        report = Criterion(R3F())(context(net, tiny_models.batch("roberta")))
        report.total.backward()
        optimizer.step()
        return report.total

    first = step()
    for _ in range(20):
        last = step()
    assert last < first
