"""A criterion for any trainer. TRL's trainers: test_sft.py."""

from __future__ import annotations

import copy
import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import seqreg
from seqreg import BadInput, Criterion, attach, regularized
from seqreg.integrations.hf import RegularizedTrainer
from seqreg.terms.bregman import Bregman
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models
from tests.integrations.test_hf_context import fixed_noise
from tests.integrations.test_trainer import Gradients, losses, rows, trainer


def made(model: str, out: Path, *, cls: Any = None, net: Any = None, **settings: Any) -> Any:
    """A plain trainer, as `trainer` makes those with a criterion."""
    seq2seq = model in tiny_models.SEQ2SEQ
    arguments = transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments
    settings = {
        "max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "max_grad_norm": 0.0, "learning_rate": 1e-3, **settings,
    }  # fmt: skip
    cls = cls or (transformers.Seq2SeqTrainer if seq2seq else transformers.Trainer)
    return cls(
        tiny_models.make(model) if net is None else net,
        arguments(output_dir=str(out), **settings),
        train_dataset=rows(model),
        eval_dataset=rows(model),
    )


def trained(one: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    one.train(**options)
    return one


@pytest.mark.parametrize("model", ["bart", "roberta", "llama"])
def test_without_terms_the_loss_is_the_trainers_own(model: str, tmp_path: Path) -> None:
    high = {"max_grad_norm": 1e9}  # transformers 4 logs the norm of gradients that are clipped
    plain, ours = trained(made(model, tmp_path, **high)), trained(attach(made(model, tmp_path, **high), Criterion()))
    for theirs, row in zip(losses(plain), losses(ours), strict=True):
        assert row["loss"] == row["part/base"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert row["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


def test_gpt2_is_divided_by_the_labels_that_it_learns(tmp_path: Path) -> None:
    """transformers 5.22.2 also counts the first token of every row, which nothing predicts."""
    settings: dict[str, Any] = {"max_steps": 1, "per_device_train_batch_size": 8}
    net = tiny_models.dropout_off(tiny_models.make("gpt2"))
    own = float(net(**tiny_models.batch("gpt2", rows=8)).loss.detach())
    labels = int((tiny_models.batch("gpt2", rows=8)["labels"][:, 1:] != -100).sum())
    (ours,) = losses(trained(attach(made("gpt2", tmp_path, net=copy.deepcopy(net), **settings), Criterion())))
    (theirs,) = losses(trained(made("gpt2", tmp_path, net=net, **settings)))
    assert ours["loss"] == pytest.approx(own, rel=1e-6)
    assert theirs["loss"] == pytest.approx(own * labels / (labels + 8), rel=1e-6)


@pytest.mark.parametrize("model", ["bart", "roberta"])
def test_an_attached_trainer_is_one_with_a_criterion(model: str, tmp_path: Path) -> None:
    """Logs, weights, generation beside the loss, and state of terms that is resumed: bit for bit."""
    terms = (Bregman(weight=1.0), R3F(scale=0.1))
    settings: dict[str, Any] = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    if model == "bart":
        settings |= {"predict_with_generate": True, "generation_max_length": 6}
    expected = trained(trainer(model, tmp_path / "class", *terms, **settings))
    whole = attach(made(model, tmp_path / "whole", **settings), Criterion(*terms, label_smoothing=0.1))
    assert trained(whole) is whole
    assert [{k: v for k, v in row.items() if "/" in k or k == "loss"} for row in losses(whole)] == [
        {k: v for k, v in row.items() if "/" in k or k == "loss"} for row in losses(expected)
    ]
    again = attach(made(model, tmp_path / "again", **settings), Criterion(*terms, label_smoothing=0.1))
    trained(again, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for a, b, c in zip(whole.model.parameters(), expected.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert whole.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]


@pytest.mark.parametrize("cls", [None, "Forgetful"])
def test_gradient_does_not_depend_on_accumulation(cls: str | None, tmp_path: Path, monkeypatch: Any) -> None:
    fixed_noise(monkeypatch)
    found, own = {}, {"cls": globals()[cls]} if cls else {}
    for accumulate in (1, 4):
        net = tiny_models.dropout_off(tiny_models.make("gpt2"))
        settings = {"gradient_accumulation_steps": accumulate, "per_device_train_batch_size": 8 // accumulate}
        one = made("gpt2", tmp_path, net=net, max_steps=1, **own, **settings)
        attach(one, Criterion(R3F(scale=0.1)), own_loss="call")
        one.add_callback(gradients := Gradients())
        one.train()
        found[accumulate] = gradients.steps[0]
    assert (found[4] - found[1]).norm() <= 1e-6 * found[1].norm()


class Doubling(transformers.Trainer):  # type: ignore[misc]
    """Twice the loss of its base class."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(*args, **options)
        return 2 * loss


class Forgetful(transformers.Trainer):  # type: ignore[misc]
    """A class of before `num_items_in_batch`, which it does not hand on."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


class Unrelated(transformers.Trainer):  # type: ignore[misc]
    """A loss that has nothing to do with its base class'."""

    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        return model(**inputs).logits.square().mean()


def test_a_loss_of_the_class_itself_is_refused_replaced_or_called(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"^Doubling has a compute_loss of its own: own_loss='replace' .* own_loss='call'"
    ):
        attach(made("roberta", tmp_path, cls=Doubling), Criterion())
    with pytest.raises(BadInput, match="Doubling has a compute_loss of its own"):
        regularized(Doubling)
    with pytest.raises(BadInput, match="own_loss='calls': did you mean 'call'"):
        attach(made("roberta", tmp_path, cls=Doubling), Criterion(), own_loss="calls")  # type: ignore[arg-type]
    plain = losses(trained(attach(made("roberta", tmp_path), Criterion())))[0]["loss"]
    for own_loss, factor in (("replace", 1), ("call", 2)):
        one = attach(made("roberta", tmp_path, cls=Doubling), Criterion(), own_loss=own_loss)
        assert isinstance(one, Doubling)
        assert losses(trained(one))[0]["loss"] == pytest.approx(factor * plain, rel=1e-6)
    one = attach(made("roberta", tmp_path, cls=Unrelated), Criterion(), own_loss="call")
    with pytest.raises(BadInput, match="RegularizedUnrelated: a step was made without the criterion"):
        one.train()


def test_a_class_that_cannot_hand_the_criterion_on_is_refused(tmp_path: Path) -> None:
    class Fixed(Doubling):
        def __init__(self, model: Any, args: Any, train_dataset: Any) -> None:
            super().__init__(model, args, train_dataset=train_dataset)

    class Behind(transformers.Seq2SeqTrainer, Doubling):  # type: ignore[misc]
        """Before the class with a loss is one of transformers with a list of parameters of its own."""

    for cls, named in ((Fixed, "Fixed"), (Behind, "Seq2SeqTrainer")):
        with pytest.raises(
            BadInput, match=rf"^{named}.__init__ takes no criterion= .* attach\(trainer, criterion, own_l"
        ):
            regularized(cls, own_loss="call")
        assert issubclass(regularized(cls, own_loss="replace"), cls)
    assert isinstance(attach(made("bart", tmp_path, cls=Behind), Criterion(), own_loss="call"), Behind)
    one = made("roberta", tmp_path)
    again = regularized(Doubling, own_loss="call")(
        one.model, one.args, train_dataset=one.train_dataset, criterion=Criterion()
    )
    assert isinstance(again, Doubling)


def test_a_loss_that_is_called_may_change_its_inputs(tmp_path: Path) -> None:
    """What the other micro-batches will be is then not known before, and a start of one of them is said."""
    said = r"its start is that of \d of the \d rows of this optimizer step"
    for cls, warned in ((Doubling, True), (transformers.Trainer, False)):
        one = made("roberta", tmp_path, cls=cls, gradient_accumulation_steps=2, per_device_train_batch_size=1)
        attach(one, Criterion(JacHess()), own_loss="call")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(one)
        assert any(re.search(said, str(warning.message)) for warning in caught) == warned


def test_a_loss_that_is_called_is_also_the_one_beside_generated_text(tmp_path: Path) -> None:
    class Mixed(Doubling, transformers.Seq2SeqTrainer):  # type: ignore[misc]
        pass

    settings: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 6}
    criterion = Criterion(label_smoothing=0.1)
    plain, one = made("bart", tmp_path, **settings), made("bart", tmp_path, cls=Mixed, **settings)
    again = regularized(Mixed, own_loss="call")(
        one.model, one.args, train_dataset=one.train_dataset, eval_dataset=one.eval_dataset, criterion=criterion
    )
    found = []
    for ours in (attach(plain, criterion), attach(one, criterion, own_loss="call"), again):
        ours.compute_metrics = lambda output: {"dimensions": output.predictions.ndim}
        found.append(ours.evaluate())
    assert {row["eval_dimensions"] for row in found} == {2}  # ids, not logits
    assert [row["eval_loss"] / found[0]["eval_loss"] for row in found] == pytest.approx([1, 2, 2])


def test_evaluation_averages_over_the_labels_of_all_ranks(tmp_path: Path, monkeypatch: Any) -> None:
    """As Trainer's own: the mean over ranks of sum / labels of all * ranks is the mean over all labels."""
    one = attach(made("llama", tmp_path), Criterion())
    expected = one.evaluate()["eval_loss"]
    labels = int((tiny_models.batch("llama", rows=8)["labels"][:, 1:] != -100).sum())
    monkeypatch.setattr(importlib.import_module("seqreg.integrations.hf.context"), "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda totals: totals.add_(3 * labels))  # of the other rank
    assert one.evaluate()["eval_loss"] == pytest.approx(expected * 2 / 4, rel=1e-6)


def test_evaluation_with_the_kernels_of_liger(tmp_path: Path, monkeypatch: Any) -> None:
    """The forward that they put into a model raises where it is to skip the logits and has no labels."""
    one = attach(made("llama", tmp_path), Criterion())
    expected, forward = one.evaluate()["eval_loss"], one.model.forward

    def of_liger(*args: Any, skip_logits: bool | None = None, **inputs: Any) -> Any:
        assert not skip_logits or "labels" in inputs
        return forward(*args, **inputs)

    monkeypatch.setattr(one.model, "forward", of_liger)
    one.args.use_liger_kernel = True
    assert one.evaluate()["eval_loss"] == expected


def test_what_cannot_work_is_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("DPOTrainer", "RewardTrainer", "GRPOTrainer", "GKDTrainer", "SentenceTransformerTrainer"):
        cls = type(name, (transformers.Trainer,), {"__module__": "elsewhere"})
        mine = type("Mine", (cls,), {})
        for refused in (lambda: attach(made("roberta", tmp_path, cls=mine), Criterion()), lambda: regularized(mine)):  # noqa: B023
            with pytest.raises(BadInput, match=f"^{name}: its loss .*, and no criterion can replace it") as caught:
                refused()
            assert "\n" not in str(caught.value)
    with pytest.raises(BadInput, match="not the class Trainer"):
        attach(transformers.Trainer, Criterion())
    with pytest.raises(BadInput, match="not a BartForConditionalGeneration"):
        attach(tiny_models.make("bart"), Criterion())
    with pytest.raises(BadInput, match="regularized takes a subclass"):
        regularized(int)
    one = made("roberta", tmp_path)
    with pytest.raises(BadInput, match="expected a Criterion"):
        attach(one, R3F())  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="attach: unknown setting 'diagnostic_steps'; did you mean 'diagnostics_steps'"):
        attach(one, Criterion(), diagnostic_steps=1)
    one.compute_loss = lambda *_: 0
    with pytest.raises(BadInput, match="compute_loss was assigned to this trainer"):
        attach(one, Criterion())
    del one.compute_loss
    assert isinstance(attach(one, Criterion()), RegularizedTrainer)
    with pytest.raises(BadInput, match="RegularizedTrainer has a criterion already"):
        attach(one, Criterion())
    smoothed = made("bart", tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(BadInput, match=r"label_smoothing_factor=0\.1: set Criterion"):
        attach(smoothed, Criterion())
    assert type(smoothed) is transformers.Seq2SeqTrainer  # as it was


def test_a_loss_that_is_set_after_the_criterion_is_refused_too(tmp_path: Path) -> None:
    one = attach(made("roberta", tmp_path), Criterion())
    one.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum()
    with pytest.raises(BadInput, match=r"^compute_loss_func and criterion both compute the loss"):
        one.train()
    other = attach(made("bart", tmp_path), Criterion())
    other.args.label_smoothing_factor = 0.1
    with pytest.raises(BadInput, match=r"^label_smoothing_factor=0\.1: set Criterion"):
        other.train()


def test_classes_are_made_once() -> None:
    assert regularized(Doubling, own_loss="replace") is regularized(Doubling, own_loss="replace")
    assert regularized(RegularizedTrainer) is RegularizedTrainer
    assert issubclass(regularized(transformers.Seq2SeqTrainer), transformers.Seq2SeqTrainer)
    assert {"attach", "regularized"} <= set(dir(seqreg))
