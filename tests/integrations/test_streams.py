"""Texts without labels and old examples in trainers and loops: which are drawn, what is logged, exact resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqreg import Criterion
from seqreg.errors import BadInput
from seqreg.integrations.hf import optimizer_steps, written_targets
from seqreg.integrations.hf.streams import StreamSampler, padded_labels, replay_ratio
from seqreg.terms.anchor import Anchor
from seqreg.terms.vat import VAT
from tests.helpers import tiny_models
from tests.integrations.test_trainer import losses, rows, trainer


def drawn(sampler: StreamSampler, steps: int, labelled: int, micro_batches: int) -> list[list[list[int]]]:
    return [sampler.draw(labelled, micro_batches) for _ in range(steps)]


@pytest.mark.parametrize(
    ("ratio", "labelled", "micro_batches"), [(1.0, 4, 2), (2.5, 4, 1), (0.3, 2, 2), (1 / 19, 4, 4)]
)
def test_every_example_is_drawn_once_per_epoch(ratio: float, labelled: int, micro_batches: int) -> None:
    """Two ranks draw different examples, together the asked share of the labelled ones, none twice before all once."""
    ranks = [StreamSampler(range(10), ratio, seed=3, rank=rank, world=2) for rank in range(2)]
    steps = 40
    by_rank = [drawn(sampler, steps, labelled, micro_batches) for sampler in ranks]
    everything = [
        index for step in range(steps) for each in by_rank for micro in each[step] for index in micro
    ]  # in the order of their places
    total = int(ratio * steps * labelled * 2 + 1e-9)
    assert total - 1 <= len(everything) <= total
    for start in range(0, len(everything) - 9, 10):
        assert sorted(everything[start : start + 10]) == list(range(10))
    assert all(len(step) == micro_batches for each in by_rank for step in each)


def test_a_restored_sampler_goes_on_where_it_was() -> None:
    whole = StreamSampler(range(7), 0.7, seed=1)
    first = drawn(whole, 3, 4, 2)
    state, rest = whole.state(), drawn(whole, 5, 4, 2)
    again = StreamSampler(range(7), 0.7, seed=1)
    again.load_state(state)
    assert drawn(again, 5, 4, 2) == rest != first


def test_a_share_of_replay_is_of_all_labelled_examples() -> None:
    assert replay_ratio(0.2) == pytest.approx(0.25)
    for wrong in (0, 1, 5, True, "0.1"):
        with pytest.raises(BadInput, match="replay_share"):
            replay_ratio(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["bart", "roberta", "gpt2"])
def test_trainers_log_every_stream_and_resume_exactly(model: str, tmp_path: Path) -> None:
    streams = {
        "unlabelled_dataset": rows(model, 5), "unlabelled_ratio": 1.0, "replay_dataset": rows(model, 3),
        "replay_share": 0.25,
    }  # fmt: skip
    settings = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip

    def build(out: str) -> Any:
        return trainer(model, tmp_path / out, VAT(on="both"), Anchor(on="unlabelled"), streams=streams, **settings)

    whole, again = build("whole"), build("again")
    whole.train()
    for row in losses(whole):
        assert {"value/nll", "value/nll.replay", "value/vat", "value/vat.unlabelled", "part/base.replay"} <= row.keys()
        assert "value/anchor" not in row
        assert sum(value for key, value in row.items() if key.startswith("part/")) == pytest.approx(
            row["loss"], rel=1e-5
        )
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_gradient_does_not_depend_on_accumulation(tmp_path: Path) -> None:
    found: list[Tensor] = []
    streams = {"unlabelled_dataset": rows("bart", 8), "replay_dataset": rows("bart", 8), "replay_share": 0.5}
    for accumulate in (1, 2, 4):
        one = trainer(
            "bart", tmp_path / str(accumulate), Anchor(on="both", weight=1.0, reference="average"),
            net=tiny_models.dropout_off(tiny_models.make("bart")), streams=streams, max_steps=2,
            gradient_accumulation_steps=accumulate, per_device_train_batch_size=8 // accumulate, optim="sgd",
        )  # fmt: skip
        one.train()
        found.append(torch.cat([parameter.detach().flatten() for parameter in one.model.parameters()]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-6)


def test_old_examples_keep_the_old_skill_in_a_loop() -> None:
    """The loop gives a tuple of contexts for every micro-batch; loaders of streams begin again when they end."""
    net = tiny_models.make("roberta")
    loader, old = [tiny_models.batch("roberta", seed=seed) for seed in range(4)], [tiny_models.batch("roberta", seed=9)]
    texts = [{key: value for key, value in batch.items() if key != "labels"} for batch in loader[:3]]
    criterion, seen = Criterion(VAT(on="both")), []
    for _, contexts in optimizer_steps(net, loader, 2, unlabelled=texts, replay=old):
        for streams in contexts:
            report = criterion(*streams)
            report.total.backward()
            seen.append(set(report.parts))
    assert seen == [{"base", "base.replay", "vat", "vat.replay", "vat.unlabelled"}] * 4
    with pytest.raises(BadInput, match="replay: the loader gives no batch"):
        next(iter(optimizer_steps(net, loader, replay=[])))


def test_trainers_refuse_streams_that_nothing_counts_on(tmp_path: Path) -> None:
    for terms, streams, message in (
        ((VAT(),), {"unlabelled_dataset": rows("bart")}, "no term counts on them: set on='both'"),
        ((VAT(on="both"),), {}, "vat: on='both' counts on texts without labels, and there are none"),
        ((VAT(on="both"),), {"unlabelled_dataset": []}, "unlabelled_dataset: .* at least one"),
        ((VAT(on="both"),), {"unlabelled_dataset": rows("bart"), "unlabelled_ratio": 0}, "unlabelled_ratio=0"),
        ((), {"replay_dataset": rows("bart"), "replay_share": 1.5}, "replay_share=1.5"),
    ):
        with pytest.raises(BadInput, match=message):
            trainer("bart", tmp_path, *terms, streams=streams)


@pytest.mark.parametrize("model", ["bart", "t5"])
def test_the_starting_model_writes_targets(model: str) -> None:
    """As `generate` writes them, from the first token after the start up to the first end; the mode is restored."""
    net = tiny_models.make(model).train()
    batch = tiny_models.batch(model)
    rows_written = written_targets(net, [batch], max_new_tokens=5)
    assert net.training
    net.eval()
    source = {key: batch[key] for key in ("input_ids", "attention_mask")}
    whole = net.generate(**source, num_beams=1, do_sample=False, max_new_tokens=5).tolist()
    ends = net.generation_config.eos_token_id
    for ours, row in zip(rows_written, whole, strict=True):
        assert ours == row[1 : 1 + len(ours)]
        assert ends not in ours[:-1]
    labels = padded_labels(rows_written)
    assert labels.shape == (3, max(len(row) for row in rows_written))
    assert [int((row != -100).sum()) for row in labels] == [len(row) for row in rows_written]
