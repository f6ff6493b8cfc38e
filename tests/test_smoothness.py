from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from seqreg import BadInput, Evaluation
from seqreg.integrations.hf import context
from seqreg.losses import Base
from seqreg.smoothness import effective_rank, linear_cka, observe, source_gap
from tests.helpers import tiny_models
from tests.integrations.test_trainer import losses, trainer


def test_cka() -> None:
    """1 for rotations and rescalings, about 0 for unrelated representations, also wide ones of few tokens."""
    x = torch.randn(60, 30)
    rotation, _ = torch.linalg.qr(torch.randn(30, 30))
    assert linear_cka(x, 3 * x @ rotation) == pytest.approx(1, abs=1e-4)
    unrelated = [linear_cka(torch.randn(20, 300), torch.randn(20, 300)) for _ in range(20)]
    assert abs(sum(unrelated) / 20) < 0.05
    with pytest.raises(BadInput, match="3 tokens are too few"):
        linear_cka(torch.randn(3, 4), torch.randn(3, 4))


def test_cka_by_the_formula() -> None:
    """The debiased HSIC of Song et al., summed element by element."""
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)

    def hsic(a: Any, b: Any) -> float:
        k, l = a @ a.t(), b @ b.t()  # noqa: E741
        k.fill_diagonal_(0)
        l.fill_diagonal_(0)
        n = 6
        ones = torch.ones(n, dtype=torch.float64)
        first = torch.trace(k @ l)
        second = (ones @ k @ ones) * (ones @ l @ ones) / ((n - 1) * (n - 2))
        third = 2 / (n - 2) * (ones @ k @ l @ ones)
        return float((first + second - third) / (n * (n - 3)))

    expected = hsic(x, y) / (hsic(x, x) * hsic(y, y)) ** 0.5
    assert linear_cka(x, y) == pytest.approx(expected, rel=1e-9)


def test_effective_rank() -> None:
    basis, _ = torch.linalg.qr(torch.randn(200, 16))
    assert effective_rank(basis - basis.mean(0)) == pytest.approx(16, rel=0.05)
    line = torch.randn(200, 1) @ torch.randn(1, 16)
    assert effective_rank(line) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("model", ["bart", "t5", "roberta", "gpt2", "led"])
def test_observe(model: str) -> None:
    net = tiny_models.make(model).eval()
    ctx = context(net, tiny_models.batch(model))
    numbers, own = observe(ctx, base=Base())
    again, _ = observe(ctx, own)
    assert "source_gap" not in again
    ckas = [value for key, value in again.items() if key.startswith("cka/")]
    assert ckas
    assert all(value == pytest.approx(1, abs=1e-4) for value in ckas)
    assert all(value > 0 for key, value in numbers.items() if key.startswith("jacobian/"))
    assert all(value >= 1 for key, value in numbers.items() if key.startswith("rank/"))
    assert ("source_gap" in numbers) == (model in tiny_models.SEQ2SEQ)


def test_trainers_log_it_and_train_the_same(tmp_path: Path) -> None:
    def run(steps: int, out: str, **settings: Any) -> Any:
        one = trainer("bart", tmp_path / out, smoothness_steps=steps, max_steps=4, **settings)
        one.train()
        return one

    plain, observed = run(0, "plain"), run(2, "observed", save_strategy="steps", save_steps=2)
    for a, b in zip(plain.model.parameters(), observed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    first, second = (row for row in losses(observed) if any(key.startswith("smoothness/") for key in row))
    assert {"smoothness/jacobian/logits", "smoothness/rank/encoder.1", "smoothness/source_gap"} <= first.keys()
    assert 0 < second["smoothness/cka/decoder.1"] < 1 + 1e-6
    again = trainer("bart", tmp_path / "again", smoothness_steps=2, max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "observed" / "checkpoint-2"))
    (resumed,) = (row for row in losses(again) if "smoothness/cka/decoder.1" in row)
    assert resumed["smoothness/cka/decoder.1"] == pytest.approx(second["smoothness/cka/decoder.1"], rel=1e-5)


def test_a_collapsed_layer_has_no_alignment() -> None:
    assert linear_cka(torch.randn(20, 8), torch.ones(20, 8)) == 0
    assert linear_cka(torch.randn(20, 8), torch.full((20, 8), 0.3)) == 0


def test_source_gap_of_a_model_that_ignores_its_source() -> None:
    net = tiny_models.make("bart")
    for layer in net.model.decoder.layers:
        torch.nn.init.zeros_(layer.encoder_attn.out_proj.weight)
        torch.nn.init.zeros_(layer.encoder_attn.out_proj.bias)
    with torch.no_grad():
        assert source_gap(Evaluation(context(net, tiny_models.batch("bart")))) == pytest.approx(0, abs=1e-6)
        single = {key: value[:1] for key, value in tiny_models.batch("bart").items()}
        one = Evaluation(context(tiny_models.make("bart"), single))
        assert source_gap(one) is None, "one row has no other row's source"


def test_observe_without_a_criterion() -> None:
    numbers, _ = observe(context(tiny_models.make("bart").eval(), tiny_models.batch("bart")))
    assert "jacobian/encoder.1" in numbers
    assert "source_gap" not in numbers


@pytest.mark.parametrize("model", tiny_models.MODELS)
def test_a_dropout_rate_reaches_every_dropout(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded at torch's own functions, in a model of 0.1 everywhere."""
    rates: list[float] = []
    plain, fused = torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        rates.append(p)
        return plain(x, p, training, inplace)

    def attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
        rates.append(dropout_p)
        return fused(*args, dropout_p=dropout_p, **kwargs)

    net = tiny_models.make(model)
    ctx = Evaluation(context(net, tiny_models.batch(model)))
    _ = ctx.clean
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    ctx.forward(dropout="independent", rate=0.37)
    assert rates
    assert set(rates) == {0.37}
    rates.clear()
    ctx.forward(dropout="independent")
    assert 0.37 not in rates


def test_rounding_around_a_point_has_no_rank() -> None:
    """A collapsed model whose tokens differ in the last bit is not the richest of all."""
    torch.manual_seed(0)
    point = torch.randn(1, 32).repeat(200, 1)
    assert effective_rank(point * (1 + 6e-8 * torch.randn(200, 32).sign())) == 1.0
    assert effective_rank(torch.zeros(20, 4)) == 1.0
    assert effective_rank(point + 1e-3 * torch.randn(200, 32)) > 20
