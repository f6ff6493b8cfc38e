from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from seqreg import BadInput, Criterion, Every
from seqreg.engines.shards import full
from seqreg.integrations.hf import RegularizedSeq2SeqTrainer, RegularizedTrainer, r4f
from seqreg.selective_update import ChildTuningD
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models
from tests.integrations.test_hf_context import fixed_noise


class Gradients(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps the gradient of every optimizer step, before clipping."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.append(torch.cat([full(p.grad).flatten().clone() for p in model.parameters() if p.grad is not None]))


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps every evaluation's loss."""

    def __init__(self, seen: list[float]) -> None:
        self.seen = seen

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.seen.append(metrics["eval_loss"])


def rows(model: str, number: int = 8) -> list[dict[str, Tensor]]:
    batch = tiny_models.batch(model, rows=number)
    return [{key: value[row] for key, value in batch.items()} for row in range(number)]


def trainer(
    model: str,
    out: Path,
    *terms: Any,
    net: Any = None,
    streams: Any = None,
    update: Any = None,
    smoothness_steps: int = 0,
    **settings: Any,
) -> Any:
    seq2seq = model in tiny_models.SEQ2SEQ
    arguments = transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments
    settings = {
        "max_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "max_grad_norm": 0.0, "learning_rate": 1e-3, **settings,
    }  # fmt: skip
    cls = RegularizedSeq2SeqTrainer if seq2seq else RegularizedTrainer
    return cls(
        tiny_models.make(model) if net is None else net,
        arguments(output_dir=str(out), **settings),
        train_dataset=rows(model),
        eval_dataset=rows(model),
        criterion=Criterion(*terms, label_smoothing=0.1),
        **(streams or {}),
        update=update,
        smoothness_steps=smoothness_steps,
    )


def losses(one: Any) -> list[dict[str, float]]:
    return [row for row in one.state.log_history if "loss" in row]


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("terms", [(), (R3F(weight=0.3, scale=0.1),)])
@pytest.mark.parametrize("model", ["bart", "t5", "roberta", "gpt2"])
def test_parts_add_up_to_the_logged_loss(model: str, terms: Any, accumulate: int, tmp_path: Path) -> None:
    one = trainer(
        model, tmp_path, *terms, gradient_accumulation_steps=accumulate, per_device_train_batch_size=8 // accumulate,
        max_steps=5, logging_steps=2,
    )  # fmt: skip
    one.train()
    assert len(losses(one)) == 2
    for row in losses(one):
        parts = {key: value for key, value in row.items() if key.startswith("part/")}
        assert set(parts) == {"part/base", *(f"part/{term.name}" for term in terms)}
        assert sum(parts.values()) == pytest.approx(row["loss"], rel=1e-6)
        assert 0 < row["value/nll"] != row["part/base"]
        if terms:
            assert row["weight/r3f"] == pytest.approx(0.3)
            assert row["part/r3f"] == pytest.approx(0.3 * row["value/r3f"], rel=1e-6)


@pytest.mark.parametrize("terms", [(), (R3F(scale=0.1),)])
@pytest.mark.parametrize("model", ["bart", "roberta", "gpt2"])
def test_gradient_does_not_depend_on_accumulation(model: str, terms: Any, tmp_path: Path, monkeypatch: Any) -> None:
    fixed_noise(monkeypatch)
    found: dict[int, Tensor] = {}
    for accumulate in (1, 2, 4):
        one = trainer(
            model, tmp_path, *terms, net=tiny_models.dropout_off(tiny_models.make(model)),
            gradient_accumulation_steps=accumulate, per_device_train_batch_size=8 // accumulate, max_steps=1,
        )  # fmt: skip
        one.add_callback(gradients := Gradients())
        one.train()
        found[accumulate] = gradients.steps[0]
    for accumulate in (2, 4):
        assert (found[accumulate] - found[1]).norm() <= 1e-6 * found[1].norm()


def test_windows_average_values_over_active_steps(tmp_path: Path) -> None:
    one = trainer("bart", tmp_path, R3F(weight=Every(1.0, k=2)), max_steps=4, logging_steps=4)
    one.train()
    (row,) = losses(one)
    assert row["weight/r3f"] == pytest.approx(1.0)
    assert row["part/r3f"] == pytest.approx(row["value/r3f"], rel=1e-5)  # 2x the weight in half of the steps


@pytest.mark.parametrize("model", ["bart", "roberta"])
def test_terms_are_off_in_evaluation(model: str, tmp_path: Path) -> None:
    net = tiny_models.make(model)
    expected = trainer(model, tmp_path, net=net).evaluate()["eval_loss"]
    assert trainer(model, tmp_path, R3F(scale=10.0), net=net).evaluate()["eval_loss"] == expected


def test_evaluation_with_generation_reports_the_criterions_loss(tmp_path: Path) -> None:
    net = tiny_models.make("bart")
    plain = trainer("bart", tmp_path, net=net).evaluate()["eval_loss"]
    one = trainer("bart", tmp_path, R3F(), net=net, predict_with_generate=True, generation_max_length=12)
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen["generated"], seen["labels"] = prediction.predictions, prediction.label_ids
        return {}

    one.compute_metrics = metrics
    assert one.evaluate()["eval_loss"] == pytest.approx(plain, rel=1e-6)
    assert seen["generated"].shape[0] == seen["labels"].shape[0] == 8
    assert one.predict(rows("bart")).metrics["test_loss"] == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("terms", [(), (R3F(),)])
def test_resume_is_bit_exact(terms: Any, tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    whole = trainer("bart", tmp_path / "whole", *terms, **settings)
    whole.train()
    again = trainer("bart", tmp_path / "again", *terms, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_r4f_checkpoints_load_anywhere_and_resume_exactly(tmp_path: Path) -> None:
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer("roberta", tmp_path / "whole", R3F(), net=r4f(tiny_models.make("roberta")), **settings)
    whole.train()
    again = trainer("roberta", tmp_path / "again", R3F(), net=r4f(tiny_models.make("roberta")), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for key, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], value), key
    batch = {key: value for key, value in tiny_models.batch("roberta").items() if key != "labels"}
    expected = whole.model.eval()(**batch).logits
    whole.save_model(str(tmp_path / "final"))
    for folder in (tmp_path / "final", tmp_path / "whole" / "checkpoint-4"):
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        assert torch.equal(loaded(**batch).logits, expected)
    plain = trainer("roberta", tmp_path / "plain", **settings)
    plain.train()
    other = trainer("roberta", tmp_path / "other", net=r4f(tiny_models.make("roberta")), **settings)
    with pytest.raises(BadInput, match="not trained with a normalised head"):
        other.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    forgotten = trainer("roberta", tmp_path / "forgotten", **settings)
    with pytest.raises(BadInput, match=r"call r4f\(model\) before resuming"):
        forgotten.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))


def test_load_best_model_restores_an_r4f_head(tmp_path: Path) -> None:
    one = trainer(
        "roberta", tmp_path, net=r4f(tiny_models.make("roberta")), max_steps=6, save_strategy="steps", save_steps=2,
        eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, learning_rate=0.5, greater_is_better=True,
        metric_for_best_model="eval_loss", lr_scheduler_type="constant",
    )  # fmt: skip
    seen = []
    one.add_callback(Watch(seen))
    one.train()
    assert seen[-1] != max(seen), "the best must not be the last for this to say anything"
    assert one.evaluate()["eval_loss"] == pytest.approx(max(seen), rel=1e-6)


def test_a_second_training_starts_a_new_window(tmp_path: Path) -> None:
    one = trainer("bart", tmp_path, R3F(), max_steps=3, logging_steps=2)
    one.train()
    one.train()
    for row in losses(one):
        assert row["part/base"] + row["part/r3f"] == pytest.approx(row["loss"], rel=1e-6)


def test_the_loss_can_be_asked_for_before_training(tmp_path: Path) -> None:
    one = trainer("bart", tmp_path, R3F())
    assert one.compute_loss(one.model.train(), tiny_models.batch("bart")) > 0


def test_data_without_labels_is_one_line(tmp_path: Path) -> None:
    one = trainer("bart", tmp_path)
    one.train_dataset = [{k: v for k, v in row.items() if k != "labels"} for row in rows("bart")]
    with pytest.raises(BadInput, match="has no tensor 'labels'"):
        one.train()


def test_generation_does_not_continue_the_labels(tmp_path: Path) -> None:
    net = tiny_models.make("bart")
    settings = {"predict_with_generate": True, "generation_max_length": 12, "net": net}
    plain = trainer("bart", tmp_path, **settings).predict(rows("bart")).predictions
    one = trainer("bart", tmp_path, **settings)
    given = [{**row, "decoder_input_ids": torch.full((6,), 7)} for row in rows("bart")]
    assert (one.predict(given).predictions == plain).all()


def test_a_nan_is_seen_in_the_log(tmp_path: Path) -> None:
    one = trainer("bart", tmp_path, max_steps=2)
    with torch.no_grad():
        one.model.model.encoder.layernorm_embedding.weight[0] = float("nan")
    one.train()
    assert all(row["loss"] != row["loss"] for row in losses(one))


def test_settings_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"label_smoothing_factor=0\.1: set Criterion"):
        trainer("bart", tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(BadInput, match="compute_loss_func and criterion"):
        RegularizedTrainer(
            tiny_models.make("roberta"),
            transformers.TrainingArguments(output_dir=str(tmp_path), report_to="none"),
            compute_loss_func=lambda *_: 0,
            criterion=Criterion(),
        )
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    arguments._n_gpu = 2
    with pytest.raises(BadInput, match="use torchrun"):
        RegularizedTrainer(tiny_models.make("roberta"), arguments, criterion=Criterion())
    for wrong in ({"terms": {"r3f": {}}}, R3F(), Criterion, None):
        with pytest.raises(BadInput, match="expected a Criterion"):
            RegularizedTrainer(tiny_models.make("roberta"), criterion=wrong)


def test_mixed_precision_does_not_hide_noise_that_is_lost(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="below what bfloat16 resolves"):
        trainer("bart", tmp_path, R3F(), bf16=True).train()


def test_tensorboard_has_every_part(tmp_path: Path, monkeypatch: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer("bart", tmp_path, R3F(), report_to=["tensorboard"]).train()
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/part/base", "train/part/r3f", "train/value/nll", "train/value/r3f", "train/weight/r3f"} <= tags


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Examples one after the other; none has a label if asked."""

    def __init__(self, labelled: bool = True) -> None:
        self.labelled = labelled

    def __iter__(self) -> Any:
        for row in rows("bart"):
            yield row if self.labelled else {**row, "labels": torch.full_like(row["labels"], -100)}


@pytest.mark.filterwarnings("ignore:.*no example has a label")
def test_what_needs_examples_that_can_be_indexed_says_so_of_a_stream(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^unlabelled_dataset: expected examples that can be counted and indexed, at"):
        trainer("bart", tmp_path, JacHess(mode="alternate"), streams={"unlabelled_dataset": Stream()})
    for settings, line in (
        ({"smoothness_steps": 1}, "^smoothness_steps: it needs"),
        ({"update": ChildTuningD()}, "^ChildTuningD measures the training set first"),
    ):
        one = trainer("bart", tmp_path, **settings)
        one.train_dataset, one.eval_dataset = Stream(), None
        with pytest.raises(BadInput, match=line):
            one.train()
    one = trainer("bart", tmp_path)
    one.train_dataset = Stream(labelled=False)
    one.train()
    assert losses(one)[0]["loss"] == 0
