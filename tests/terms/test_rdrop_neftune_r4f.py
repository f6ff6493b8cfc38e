"""R-Drop, NEFTune and Bregman."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Criterion, Evaluation, Every
from seqreg.integrations.hf import context
from seqreg.terms.bregman import Bregman
from seqreg.terms.neftune import NEFTune
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.smart import SMART
from tests.helpers import tiny_models
from tests.helpers.evaluations import plain_loss
from tests.integrations.test_trainer import trainer


def test_rdrop_formula_and_gradient() -> None:
    net = tiny_models.make("bart").double()
    torch.manual_seed(0)
    ctx = context(net, tiny_models.batch("bart"), step=1)
    views = []
    inner = ctx.forward.run
    ctx.forward.run = lambda request: (views.append(inner(request)), views[-1])[1]  # type: ignore
    report = Criterion(RDrop(alpha=3.0), label_smoothing=0.1)(ctx, batched=False)
    p, q = (view.logits.log_softmax(-1) for view in views)
    kept = ctx.labels != -100
    labels = ctx.labels[kept].unsqueeze(-1)
    tasks = [-(0.9 * v[kept].gather(-1, labels).squeeze(-1) + 0.1 * v[kept].mean(-1)).mean() for v in (p, q)]
    kl = ((p.exp() * (p - q)).sum(-1) + (q.exp() * (q - p)).sum(-1))[kept].mean() / 2
    total = tasks[0] + tasks[1] + 3.0 * kl
    assert report.total.item() == pytest.approx(total.item(), rel=1e-9)
    parameters = list(net.parameters())
    ours = torch.autograd.grad(report.total, parameters, retain_graph=True, allow_unused=True)
    theirs = torch.autograd.grad(total, parameters, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)


def test_rdrop_task_forms() -> None:
    net = tiny_models.make("roberta")

    def run(task: Any) -> Any:
        torch.manual_seed(0)
        return Criterion(RDrop(task=task))(context(net, tiny_models.batch("roberta"), step=1))

    total = {task: run(task).total.item() for task in ("sum", "mean", "none")}
    base, value = run("none").parts["base"].item(), run("none").values["rdrop"].item()
    assert total["none"] == pytest.approx(base + value, rel=1e-6)
    second = total["sum"] - base - value
    assert total["mean"] == pytest.approx((base + second) / 2 + value, rel=1e-6)


def test_rdrop_does_not_depend_on_the_batch_size() -> None:
    """The authors' Hugging Face code takes the mean of one part and the sum of the other."""
    net = tiny_models.make("roberta", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    batch = tiny_models.batch("roberta", rows=3)
    double = {key: torch.cat([value, value]) for key, value in batch.items()}
    with pytest.warns(UserWarning, match="rdrop: .*does nothing.*: give the model dropout"):
        one = Criterion(RDrop())(context(net, batch)).total
    with pytest.warns(UserWarning, match="rdrop: .*does nothing.*: give the model dropout"):
        two = Criterion(RDrop())(context(net, double)).total
    assert one.item() == pytest.approx(two.item(), rel=1e-6)


def test_rdrop_regression_uses_mse() -> None:
    net = tiny_models.make("roberta", num_labels=1)
    batch = {**tiny_models.batch("roberta"), "labels": torch.tensor([0.1, 2.0, 3.5])}
    with pytest.raises(BadInput, match="use divergence='mse'"):
        Criterion(RDrop())(context(net, batch))
    assert Criterion(RDrop(divergence="mse", task="none"))(context(net, batch)).values["rdrop"] > 0


@pytest.mark.parametrize("model", ["bart", "pegasus", "t5", "mbart", "roberta", "gpt2", "led"])
def test_neftune_changes_the_loss_in_training_and_not_in_evaluation(model: str) -> None:
    """transformers' neftune_noise_alpha is a silent no-op on the first four."""
    net = tiny_models.dropout_off(tiny_models.make(model))
    batch = tiny_models.batch(model)
    plain = Criterion()(context(net, batch)).total
    noised = Criterion(NEFTune(alpha=15))(context(net, batch)).total
    assert abs(float((noised - plain).detach())) > 1e-6
    net.eval()
    with torch.no_grad():
        assert Criterion(NEFTune(alpha=15))(context(net, batch)).total == Criterion()(context(net, batch)).total


def noise_of(net: Any, batch: dict[str, Tensor], term: NEFTune) -> Tensor:
    ctx = context(net, batch)
    noised = Criterion(term)(ctx).clean
    clean = Evaluation(context(net, batch)).clean.embeds["encoder", "embedding"]
    return (noised.embeds["encoder", "embedding"] - clean).detach()


@pytest.mark.parametrize("model", ["bart", "pegasus"])
def test_neftune_is_scaled_by_the_true_length(model: str) -> None:
    net = tiny_models.dropout_off(tiny_models.make(model))
    batch = tiny_models.batch(model)
    lengths = batch["attention_mask"].sum(-1)
    ours, released = (noise_of(net, batch, NEFTune(preset=preset)) for preset in ("paper", "hf_neftune"))
    for row, length in enumerate(lengths):
        bound = 5.0 / float(length * 16) ** 0.5
        assert ours[row].abs().max() == pytest.approx(bound, rel=0.05)
        assert (ours[row, length:] == 0).all()
        assert released[row].abs().max() == pytest.approx(5.0 / (8 * 16) ** 0.5, rel=0.05)
    assert (released[2, int(lengths[2]) :] != 0).any()


@pytest.mark.parametrize("ratio", [0.05, 0.1])
def test_neftune_is_bounded_by_the_embeddings(ratio: float) -> None:
    """The noise of no text is larger than a share of the embeddings' RMS; where alpha is smaller, it is the paper's."""
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    batch = tiny_models.batch("bart")
    mask = batch["attention_mask"].bool()
    size = Evaluation(context(net, batch)).clean.embeds["encoder", "embedding"][mask].detach().square().mean().sqrt()
    noise = noise_of(net, batch, NEFTune(max_ratio=ratio))[mask]
    assert noise.square().mean().sqrt() == pytest.approx(float(ratio * size), rel=0.1)
    assert noise.abs().max() <= ratio * 3**0.5 * size * (1 + 1e-4)
    torch.manual_seed(0)
    small = noise_of(net, batch, NEFTune(alpha=1e-3))
    torch.manual_seed(0)
    torch.testing.assert_close(noise_of(net, batch, NEFTune(alpha=1e-3, preset="paper")), small)


def test_neftune_weight_scales_the_noise_and_can_be_a_schedule() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    torch.manual_seed(0)
    whole = noise_of(net, tiny_models.batch("bart"), NEFTune())
    torch.manual_seed(0)
    half = noise_of(net, tiny_models.batch("bart"), NEFTune(weight=0.5))
    torch.testing.assert_close(half, whole / 2)
    term = NEFTune(weight=Every(1.0, k=2))
    off = Criterion(term)(context(net, tiny_models.batch("bart"), step=1))
    assert off.total == Criterion()(context(net, tiny_models.batch("bart"))).total


@pytest.mark.parametrize("dropout", ["shared", "off", "independent"])
def test_other_terms_are_measured_around_the_noised_input(dropout: Any) -> None:
    """R3F beside NEFTune sees its own noise alone: without dropout its value falls with the square of the scale."""
    net = tiny_models.dropout_off(tiny_models.make("bart")).double()

    def value(scale: float) -> float:
        torch.manual_seed(0)
        criterion = Criterion(NEFTune(alpha=5), R3F(scale=scale, dropout=dropout))
        return float(criterion(context(net, tiny_models.batch("bart"))).values["r3f"])

    assert value(1e-3) / value(1e-4) == pytest.approx(100, rel=0.05)


def test_shared_dropout_is_replayed_beside_neftune() -> None:
    ctx = context(tiny_models.make("bart"), tiny_models.batch("bart"))
    clean = Criterion(NEFTune())(ctx).clean
    assert torch.equal(ctx.forward(dropout="shared").logits, clean.logits)


def step(net: Any, criterion: Criterion, number: int, lr: float = 0.5) -> Any:
    net.zero_grad()
    report = criterion(context(net, tiny_models.batch("bart"), step=number))
    report.total.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(lr * parameter.grad)
    return report


def test_bregman_is_the_divergence_from_the_averaged_weights() -> None:
    """Two models side by side in float64: the trained one and the average kept by hand. Value and gradient."""
    net, average = (
        tiny_models.dropout_off(tiny_models.make("bart")).double(),
        tiny_models.dropout_off(tiny_models.make("bart")).double(),
    )
    term = Bregman(beta=0.9, beta_late=0.5, switch=2, weight=2.0)
    criterion = Criterion(term)
    for number in range(5):
        if number > 0:
            beta = 0.9 if number <= 2 else 0.5
            with torch.no_grad():
                for own, kept in zip(net.parameters(), average.parameters(), strict=True):
                    kept.mul_(beta).add_(own, alpha=1 - beta)
        ctx = context(net, tiny_models.batch("bart"), step=number)
        other = Evaluation(context(average, tiny_models.batch("bart")))
        report = criterion(ctx)
        p, q = report.clean.logits.log_softmax(-1), other.clean.logits.detach().log_softmax(-1)
        kept_positions = ctx.mask
        kl = ((p.exp() - q.exp()) * (p - q)).sum(-1)[kept_positions].mean()
        assert report.values["bregman"].item() == pytest.approx(kl.item(), rel=1e-6, abs=1e-15)
        parameters = list(net.parameters())
        nll = plain_loss(ctx, report.clean)
        ours = torch.autograd.grad(report.total, parameters, retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(nll + 2.0 * kl, parameters, allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-10)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, ours, strict=True):
                if gradient is not None:
                    parameter.sub_(0.5 * gradient)
    assert report.values["bregman"] > 0


def test_bregman_moves_once_an_optimizer_step() -> None:
    """Accumulation does not move the average, and a loop must say which step it is."""
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    criterion = Criterion(Bregman())
    updates = []
    for number in range(4):
        for _ in range(3):
            criterion(context(net, tiny_models.batch("bart"), step=number))
        step(net, criterion, number)
        updates.append(int(criterion.memory["bregman"]["updates"]))
    assert updates == [0, 1, 2, 3]
    with pytest.raises(BadInput, match=r"pass context\(\.\.\., step=step\)"):
        criterion(context(net, tiny_models.batch("bart")))


def test_bregman_leaves_the_model_alone() -> None:
    net = tiny_models.make("bart")
    criterion = Criterion(Bregman())
    step(net, criterion, 0)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in net.named_parameters()}
    report = criterion(context(net, tiny_models.batch("bart"), step=1))
    for name, parameter in net.named_parameters():
        assert (parameter.data_ptr(), True) == (before[name][0], torch.equal(parameter, before[name][1]))
    report.total.backward()


def test_bregman_state_travels() -> None:
    net = tiny_models.make("bart")
    criterion = Criterion(Bregman(), SMART())
    for number in range(3):
        step(net, criterion, number)
    state = {key: value.clone() for key, value in criterion.state_dict().items()}
    other = Criterion(Bregman(), SMART())
    other.load_state_dict(state)
    torch.manual_seed(0)
    expected = criterion(context(net, tiny_models.batch("bart"), step=3)).total
    torch.manual_seed(0)
    assert other(context(net, tiny_models.batch("bart"), step=3)).total == expected
    with pytest.raises(BadInput, match="of a term 'bregman' that this criterion does not have"):
        Criterion(SMART()).load_state_dict(state)


def test_bregman_keeps_one_copy_of_what_is_trained() -> None:
    net = tiny_models.make("bart")
    for parameter in net.model.encoder.parameters():
        parameter.requires_grad_(False)
    criterion = Criterion(Bregman())
    step(net, criterion, 0)
    kept = sum(value.numel() for key, value in criterion.state_dict().items() if "/w/" in key)
    assert kept == sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)


def test_resume_with_bregman_is_bit_exact(tmp_path: Path) -> None:
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    terms = (Bregman(beta=0.5, switch=2), SMART(), R3F())
    whole = trainer("bart", tmp_path / "whole", *terms, **settings)
    whole.train()
    again = trainer("bart", tmp_path / "again", *terms, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for key, value in whole.criterion.state_dict().items():
        assert torch.equal(again.criterion.state_dict()[key], value), key
    (tmp_path / "whole" / "checkpoint-3" / "seqreg_terms.safetensors").unlink()
    lost = trainer("bart", tmp_path / "lost", *terms, **settings)
    with pytest.raises(BadInput, match=r"seqreg_terms\.safetensors is missing"):
        lost.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bregman(beta=1.0), "beta=1.0: expected a number in (0, 1)"),
        (lambda: Bregman(beta_late=-0.1), "beta_late=-0.1"),
        (lambda: Bregman(switch=-1), "switch=-1"),
        (lambda: RDrop(alpha=0.0), "alpha=0.0: expected a number > 0"),
        (lambda: NEFTune(alpha=-5), "alpha=-5"),
        (lambda: NEFTune(max_ratio=0.0), "max_ratio=0.0: expected a number > 0"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize("model", ["bart", "roberta", "gpt2"])
def test_bregman_under_autocast_uses_the_average(model: str) -> None:
    """Autocast keeps casts of the parameters whose values are exchanged; another model has none to keep."""
    import copy

    net = tiny_models.dropout_off(tiny_models.make(model))
    average = copy.deepcopy(net)
    criterion = Criterion(Bregman(beta=0.5))
    with torch.autocast("cpu", torch.bfloat16):
        criterion(context(net, tiny_models.batch(model), step=0))
    with torch.no_grad():
        for own, kept in zip(net.parameters(), average.parameters(), strict=True):
            own.mul_(1.1)
            kept.lerp_(own, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        value = criterion(context(net, tiny_models.batch(model), step=1)).values["bregman"]
        ctx, other = (Evaluation(context(one, tiny_models.batch(model))) for one in (net, average))
        p, q = ctx.clean.logits.float().log_softmax(-1), other.clean.logits.float().log_softmax(-1)
    values = ((p.exp() - q.exp()) * (p - q)).sum(-1)
    assert value.item() == pytest.approx(float(ctx.reduce(values).detach()), rel=1e-4)


def test_bregman_makes_up_for_steps_that_a_schedule_skips() -> None:
    net = tiny_models.make("bart")
    criterion = Criterion(Bregman(beta=0.9, weight=Every(1.0, k=4)))
    criterion(context(net, tiny_models.batch("bart"), step=0))
    start = {key: value.clone() for key, value in criterion.state_dict().items() if "/w/" in key}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    criterion(context(net, tiny_models.batch("bart"), step=4))
    assert int(criterion.memory["bregman"]["updates"]) == 4
    for key, value in start.items():
        torch.testing.assert_close(criterion.state_dict()[key], value + 1 - 0.9**4, rtol=1e-4, atol=1e-5)


def test_bregman_refuses_another_model() -> None:
    net = tiny_models.make("bart")
    criterion = Criterion(Bregman())
    step(net, criterion, 0)
    net.model.shared.weight.requires_grad_(False)
    with pytest.raises(BadInput, match="begin a new criterion"):
        criterion(context(net, tiny_models.batch("bart"), step=1))


def test_a_new_training_begins_a_new_average(tmp_path: Path) -> None:
    one = trainer("bart", tmp_path, Bregman(beta=0.5), max_steps=3, learning_rate=1e-2)
    for _ in range(2):
        one.train()
        first = next(row for row in one.state.log_history if "value/bregman" in row)
        assert first["value/bregman"] == 0


def test_observing_at_another_step_does_not_move_the_average() -> None:
    net = tiny_models.make("bart")
    criterion = Criterion(Bregman())
    step(net, criterion, 0)
    before = {key: value.clone() for key, value in criterion.state_dict().items()}
    criterion.diagnostics(context(net, tiny_models.batch("bart"), step=7))
    assert all(torch.equal(value, before[key]) for key, value in criterion.state_dict().items())


def test_neftune_refuses_what_it_cannot_do() -> None:
    net = tiny_models.make("bart")
    with pytest.raises(BadInput, match="raise alpha"):
        Criterion(NEFTune(weight=Every(1.0, k=4)))(context(net, tiny_models.batch("bart"), step=0))


def test_neftune_where() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    ctx = context(net, tiny_models.batch("bart"))
    noised = Criterion(NEFTune(where="decoder"))(ctx).clean
    plain = Evaluation(context(net, tiny_models.batch("bart"))).clean
    assert torch.equal(noised.embeds["encoder", "embedding"], plain.embeds["encoder", "embedding"])
    assert not torch.equal(noised.embeds["decoder", "embedding"], plain.embeds["decoder", "embedding"])


def test_neftune_diagnostics_is_against_the_embeddings_without_noise() -> None:
    net = tiny_models.dropout_off(tiny_models.make("bart"))
    batch = tiny_models.batch("bart")
    found = Criterion(NEFTune(preset="paper", alpha=50)).diagnostics(context(net, batch))[
        "neftune/delta_over_embedding"
    ]
    mask = batch["attention_mask"].bool()
    embeds = Evaluation(context(net, batch)).clean.embeds["encoder", "embedding"][mask].detach()
    noise = 50 / (batch["attention_mask"].sum(-1) * 16).sqrt() / 3**0.5
    assert found == pytest.approx(float(noise.mean() / embeds.square().mean().sqrt()), rel=0.15)


def test_rdrop_halves_the_symmetric_kl_alone() -> None:
    net = tiny_models.make("roberta")

    def value(**settings: Any) -> float:
        torch.manual_seed(0)
        return float(
            Criterion(RDrop(task="none", **settings))(context(net, tiny_models.batch("roberta"), step=1)).values[
                "rdrop"
            ]
        )

    assert value(divergence="kl") + value(divergence="reverse_kl") == pytest.approx(2 * value(), rel=1e-4)
