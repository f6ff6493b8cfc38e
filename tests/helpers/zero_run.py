"""A run of a tiny BART under DeepSpeed's ZeRO-2, started by torchrun's agent, that resumes from its checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors.torch
import torch

from seqreg import Criterion
from seqreg.integrations.hf import context, count
from seqreg.terms.anchor import Anchor
from seqreg.terms.bregman import Bregman
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models, zero

STEPS, SAVE_STEPS = 8, 2


def unfinished(output: Path) -> bool:
    """Whether a checkpoint has been begun that is not the latest."""
    named = (output / "latest").read_text() if (output / "latest").exists() else "step-0"
    steps = [int(folder.name.partition("-")[2]) for folder in output.glob("step-*")]
    return any(step > int(named.partition("-")[2]) for step in steps)


def rank(output: str) -> None:
    """What every rank does."""
    folder = Path(output)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    number = torch.distributed.get_rank()
    engine = zero.initialize(tiny_models.make("bart"), stage=2, adam=True)
    criterion = Criterion(R3F(scale=0.1), Bregman(weight=10.0, beta=0.5), Anchor(weight=1.0), label_smoothing=0.1)
    first = 0
    if (folder / "latest").exists():
        _, state = engine.load_checkpoint(output)
        criterion.load_state_dict(state["criterion"])
        first = engine.global_steps
    for step in range(first, STEPS):
        torch.manual_seed(10 * step + number)
        batch = tiny_models.batch("bart", rows=3, seed=10 * step + number)
        ctx = context(engine, batch, step=step, count=count(engine, [batch]))
        engine.backward(criterion(ctx).total)
        engine.step()
        if (step + 1) % SAVE_STEPS == 0:
            state = {"criterion": criterion.state_dict()}
            tag = f"step-{step + 1}"
            engine.save_checkpoint(output, tag=tag, client_state=state, save_latest=False)
            if number == 0:  # all ranks have written now: DeepSpeed itself names it before they have
                (folder / "named").write_text(tag)
                os.replace(folder / "named", folder / "latest")
            torch.distributed.barrier()
    if number == 0:
        weights = {name: tensor.detach().contiguous() for name, tensor in engine.module.named_parameters()}
        safetensors.torch.save_file(weights, folder / "written")
        os.replace(folder / "written", folder / "model.safetensors")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
