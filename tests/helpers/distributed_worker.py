"""Run by test_distributed under torchrun: gradients and logs of one optimizer step, cut in every way.

torchrun --nproc-per-node 2 -m tests.helpers.distributed_worker OUT
"""

from __future__ import annotations

import functools
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from transformers import BartForConditionalGeneration

from seqreg import BadInput, Criterion
from seqreg.ascent import Ascent
from seqreg.engines.shards import full, whole_state
from seqreg.integrations.hf import context, count, optimizer_steps, shard
from seqreg.losses import label_smoothed_nll
from seqreg.selective_update import StochasticUpdate
from seqreg.terms.anchor import Anchor
from seqreg.terms.bregman import Bregman
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from seqreg.terms.smart import SMART
from tests.helpers import tiny_models
from tests.integrations.test_hf_context import fixed_noise
from tests.integrations.test_trainer import Gradients, losses, rows, trainer

TERMS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "r3f": (R3F(scale=0.1),),
    "r3f_rows": (R3F(scale=0.1, per="sequence"),),
    "smart": (SMART(attack=Ascent(relative=False)),),
    "jachess": (JacHess(weight=1.0, epsilon=1.0),),
}
STREAMS: dict[str, tuple[Any, ...]] = {**TERMS, "streams": (R3F(scale=0.1, on="both"),)}
"""Of trainers, which have further examples of a step."""


def streams_of(model: str, name: str) -> dict[str, Any]:
    """Eight texts without labels and eight old examples for the step."""
    further = rows(model, 8)
    return {"unlabelled_dataset": further, "replay_dataset": further, "replay_share": 0.5} if name == "streams" else {}


ANCHORS = (
    Anchor(weight=1.0),
    Anchor(name="all", positions="all"),
    Anchor(name="weights", divergence="l2", weight=0.01),
)


def anchored() -> Criterion:
    """Held by a model that is elsewhere, as after some steps."""
    criterion, start = Criterion(*ANCHORS, loss="dft"), tiny_models.make("bart", seed=3)
    criterion.load_state_dict({f"{t.name}/w/{name}": p for t in ANCHORS for name, p in start.named_parameters()})
    return criterion


def through_trainer(world: int) -> Iterator[tuple[str, Tensor, dict[str, float]]]:
    for model in ("bart", "roberta", "llama"):
        for name, terms in STREAMS.items():
            for accumulate in (1, 2, 4) if model != "llama" else (1,):
                with tempfile.TemporaryDirectory() as out:
                    one = trainer(
                        model, Path(out), *terms, net=tiny_models.dropout_off(tiny_models.make(model)), max_steps=1,
                        gradient_accumulation_steps=accumulate, per_device_train_batch_size=8 // accumulate // world,
                        streams=streams_of(model, name),
                    )  # fmt: skip
                    one.add_callback(gradients := Gradients())
                    one.train()
                yield f"trainer/{model}/{name}/{accumulate}", gradients.steps[0], losses(one)[0]


def sharded(model: str, **settings: Any) -> Any:
    return shard(tiny_models.dropout_off(tiny_models.make(model)), **settings)


def sharded_trainer(model: str, out: Path, *terms: Any, **settings: Any) -> Any:
    return trainer(model, out, *terms, net=sharded(model), **settings)


def under_fsdp2(world: int) -> Iterator[tuple[str, Tensor, dict[str, float]]]:
    """The same trainers, whose models are sharded."""
    for model, name in itertools.product(("bart", "roberta", "llama"), STREAMS):
        for accumulate in (1, 2) if model == "bart" else (1,):
            with tempfile.TemporaryDirectory() as out:
                one = sharded_trainer(
                    model, Path(out), *STREAMS[name], max_steps=1, gradient_accumulation_steps=accumulate,
                    per_device_train_batch_size=8 // accumulate // world, streams=streams_of(model, name),
                )  # fmt: skip
                one.add_callback(gradients := Gradients())
                one.train()
            yield f"fsdp2/{model}/{name}/{accumulate}", gradients.steps[0], losses(one)[0]


def in_bf16(rank: int, world: int, model: str, name: str) -> tuple[Tensor, Tensor]:
    """The gradient of a trainer whose model is sharded, and computes in bf16, and that of a loop over the same rows."""
    with tempfile.TemporaryDirectory() as out:
        one = trainer(
            model, Path(out), *TERMS[name], net=sharded(model, param_dtype=torch.bfloat16), max_steps=1,
            per_device_train_batch_size=8 // world,
        )  # fmt: skip
        one.add_callback(gradients := Gradients())
        one.train()
    net = sharded(model, param_dtype=torch.bfloat16)
    batch = {key: value[rank::world] for key, value in tiny_models.batch(model, rows=8).items()}
    criterion = Criterion(*TERMS[name], label_smoothing=0.1)
    criterion(context(net, batch, step=0, count=count(net, [batch]))).total.backward()
    return gradients.steps[0], torch.cat([full(p.grad).flatten() for p in net.parameters() if p.grad is not None])


def resumed(out: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Whole weights of a run under FSDP2 with two terms that remember, of the same resumed half way, and as saved."""
    terms, weights = (Bregman(), Anchor(weight=1.0)), []
    for checkpoint in (None, str(out / "checkpoint-2")):
        one = sharded_trainer("bart", out, *terms, max_steps=4, save_steps=2, save_strategy="steps")
        one.train(resume_from_checkpoint=checkpoint)
        weights.append(whole_state(one.model, keep=True))
    one.save_model(str(out / "final"))
    one.accelerator.wait_for_everyone()
    loaded = BartForConditionalGeneration.from_pretrained(out / "final")
    return weights[0], weights[1], loaded.state_dict()


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return label_smoothed_nll(logits, labels, 0.1)[0]


def by_hand(rank: int, world: int, accelerator: Any) -> Iterator[tuple[str, Tensor]]:
    """A raw DistributedDataParallel loop, by hand and by `optimizer_steps`, and an Accelerate loop by the latter.

    Accelerate divides by the accumulation steps itself.
    """
    for name, terms in {**TERMS, "anchor": ()}.items():
        for accumulate in (1, 2, 4):
            size = 8 // accumulate // world
            pieces = [
                {key: value[start : start + size] for key, value in tiny_models.batch("bart", rows=8).items()}
                for start in range(rank * size, 8, size * world)
            ]
            for kind in ("ddp", "ddp_steps", "accelerate"):
                net: Any = tiny_models.dropout_off(tiny_models.make("bart"))
                model: Any = net
                if world > 1:
                    model = torch.nn.parallel.DistributedDataParallel(net)
                    with pytest.raises(BadInput, match="pass count="):
                        context(model, pieces[0])
                accelerator.gradient_accumulation_steps = accumulate
                criterion = anchored() if name == "anchor" else Criterion(*terms, label_smoothing=0.1)
                if kind == "ddp":
                    whole = count(model, pieces)
                    for piece in pieces:
                        criterion(context(model, piece, count=whole)).total.backward()
                elif kind == "ddp_steps":
                    own = functools.partial(context, loss=smoothed)  # the same loss, as if it were another
                    for _, contexts in optimizer_steps(model, pieces, accumulate, build_context=own):
                        for ctx in contexts:
                            Criterion(*terms)(ctx).total.backward()
                else:
                    for _, contexts in optimizer_steps(model, pieces, accelerator=accelerator):
                        for ctx in contexts:
                            accelerator.backward(criterion(ctx).total)
                gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
                yield f"{kind}/bart/{name}/{accumulate}", gradient


def masks() -> Tensor:
    """What a stochastic update multiplies the gradient by. Of two ranks, the second has no example to measure."""
    net, update = tiny_models.dropout_off(tiny_models.make("bart")), StochasticUpdate()
    with tempfile.TemporaryDirectory() as out:
        trainer("bart", Path(out), net=net, update=update, max_steps=1, per_device_train_batch_size=8).train()
    return torch.cat([factor.flatten() for factor in update.factors.values()])


def layerdrop_is_refused(world: int) -> None:
    """Passes that drop different layers cannot be synchronised; torch would fail in the middle of training."""
    if world == 1:
        return
    model = torch.nn.parallel.DistributedDataParallel(tiny_models.make("bart", encoder_layerdrop=0.5))
    batch = tiny_models.batch("bart")
    whole = count(model, [batch])
    with pytest.raises(BadInput, match="set the model's layerdrop to 0, or dropout='shared'"):
        Criterion(R3F())(context(model, batch, count=whole))
    Criterion(R3F(dropout="shared"))(context(model, batch, count=whole)).total.backward()


def main(out: str) -> None:
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    gradients, logs = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        fixed_noise(patch)
        layerdrop_is_refused(world)
        for key, gradient in by_hand(rank, world, accelerator):
            gradients[key] = gradient
        for key, gradient, log in through_trainer(world):
            gradients[key], logs[key] = gradient, log
        gradients["masks"] = masks()
        if world > 1:
            for key, gradient, log in under_fsdp2(world):
                gradients[key], logs[key] = gradient, log
            for model, name in itertools.product(("bart", "llama"), ("none", "r3f_rows")):
                gradients[f"bf16/{model}/{name}"] = in_bf16(rank, world, model, name)  # type: ignore[assignment]
            gradients["resumed"] = resumed(Path(out) / "fsdp2")  # type: ignore[assignment]
    torch.save((gradients, logs), f"{out}/{world}-{rank}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
