"""Run by test_distributed under torchrun: gradients and logs of one optimizer step, cut in every way.

torchrun --nproc-per-node 2 -m tests.helpers.distributed_worker OUT
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor

from seqreg import BadInput, Criterion
from seqreg.integrations.hf import context, count
from seqreg.selective_update import StochasticUpdate
from seqreg.terms.r3f import R3F
from seqreg.terms.smart import SMART
from tests.helpers import tiny_models
from tests.integrations.test_hf_context import fixed_noise
from tests.integrations.test_trainer import Gradients, losses, trainer

TERMS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "r3f": (R3F(scale=0.1),),
    "r3f_rows": (R3F(scale=0.1, per="sequence"),),
    "smart": (SMART(relative=False),),
}


def through_trainer(world: int) -> Iterator[tuple[str, Tensor, dict[str, float]]]:
    for model in ("bart", "roberta"):
        for name, terms in TERMS.items():
            for accumulate in (1, 2, 4):
                with tempfile.TemporaryDirectory() as out:
                    one = trainer(
                        model, Path(out), *terms, net=tiny_models.dropout_off(tiny_models.make(model)), max_steps=1,
                        gradient_accumulation_steps=accumulate, per_device_train_batch_size=8 // accumulate // world,
                    )  # fmt: skip
                    one.add_callback(gradients := Gradients())
                    one.train()
                yield f"trainer/{model}/{name}/{accumulate}", gradients.steps[0], losses(one)[0]


def by_hand(rank: int, world: int, accelerator: Any) -> Iterator[tuple[str, Tensor]]:
    """A raw DistributedDataParallel loop, and an Accelerate loop that divides by the accumulation steps itself."""
    for name, terms in TERMS.items():
        for accumulate in (1, 2, 4):
            size = 8 // accumulate // world
            pieces = [
                {key: value[start : start + size] for key, value in tiny_models.batch("bart", rows=8).items()}
                for start in range(rank * size, 8, size * world)
            ]
            for kind in ("ddp", "accelerate"):
                net: Any = tiny_models.dropout_off(tiny_models.make("bart"))
                model: Any = net
                if world > 1:
                    model = torch.nn.parallel.DistributedDataParallel(net)
                    with pytest.raises(BadInput, match="pass count="):
                        context(model, pieces[0])
                accelerator.gradient_accumulation_steps = accumulate
                whole = count(model, pieces, accelerator if kind == "accelerate" else None)
                for piece in pieces:
                    total = Criterion(*terms, label_smoothing=0.1)(context(model, piece, count=whole)).total
                    if kind == "accelerate":
                        accelerator.backward(total)
                    else:
                        total.backward()
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
    torch.save((gradients, logs), f"{out}/{world}-{rank}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
