"""FSDP2 as Accelerate sets it up, in a loop and in a Trainer, on two gloo ranks: steps are those of one process.

Accelerate gives DDP for FSDP on CPUs; here it is told that its ranks are GPUs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor

from seqreg import BadInput, Criterion
from seqreg.engines.detect import check_engine, engine_of
from seqreg.engines.shards import full, whole_state
from seqreg.integrations.hf import optimizer_steps
from seqreg.terms.bregman import Bregman
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models, zero
from tests.helpers.engine_cases import Case, Result, on_ranks, wrap
from tests.helpers.engine_steps import TERMS, apart, make, micro_batches, one_process
from tests.integrations.test_hf_context import fixed_noise
from tests.integrations.test_trainer import losses, trainer

LOOPS = ("llama", "gpt2")
ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip
"""What `accelerate launch` sets for a configuration with `fsdp_version: 2`."""


def as_if_on_gpus(patch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    patch.setattr(accelerate.PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU))
    patch.setattr(accelerate.PartialState, "set_device", lambda state: setattr(state, "device", torch.device("cpu")))
    accelerate.PartialState(cpu=True)


def gathered(model: Any) -> dict[str, Tensor]:
    return {name: full(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def _loop(rank: int, world: int, *, model: str) -> float:
    zero.as_under_torchrun(rank, world)
    with pytest.MonkeyPatch.context() as patch:
        fixed_noise(patch)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        as_if_on_gpus(patch)
        accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
        net: Any = make(model)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5)
        net, optimizer = accelerator.prepare(net, optimizer)
        assert engine_of(net) == "FSDP2"
        criterion = Criterion(*TERMS, label_smoothing=0.1)
        for _, contexts in optimizer_steps(net, micro_batches(rank, model), accelerator=accelerator):
            for ctx in contexts:
                accelerator.backward(criterion(ctx).total)
            optimizer.step()
            optimizer.zero_grad()
        return apart(gathered(net), one_process(world, model=model))


def _trainers(rank: int, world: int, *, folder: Path) -> dict[str, Any]:
    """Logs and weights of a Trainer under DDP, and with fsdp=, which is then resumed."""
    zero.as_under_torchrun(rank, world)
    found = {}
    settings: dict[str, Any] = {
        "max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "save_steps": 2,
        "save_strategy": "steps", "max_grad_norm": 0.5,
    }  # fmt: skip
    terms = (R3F(scale=0.1), Bregman(beta=0.5))
    fsdp = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
    for name, checkpoint in (("ddp", None), ("fsdp", None), ("fsdp/resumed", str(folder / "fsdp" / "checkpoint-2"))):
        AcceleratorState._reset_state(reset_partial_state=True)
        with pytest.MonkeyPatch.context() as patch:
            if name != "ddp":
                as_if_on_gpus(patch)
            out = folder / name.partition("/")[0]
            one = trainer("llama", out, *terms, **settings, **({} if name == "ddp" else fsdp))
            one.train(resume_from_checkpoint=checkpoint)
            assert engine_of(one.model_wrapped) == ("DDP" if name == "ddp" else "FSDP2")
            found[name] = losses(one), whole_state(one.model, keep=True)
    return found


def _fsdp1(rank: int, world: int) -> str:
    """FSDP1, which fsdp_version 1 asks for."""
    net = wrap(tiny_models.make("llama"), Case("llama", "base", "fsdp1"), world)
    with pytest.raises(BadInput) as refused:
        check_engine(net, "fsdp=True")
    return str(refused.value)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fsdp2")
    work = {
        **{model: partial(_loop, model=model) for model in LOOPS},
        "trainers": partial(_trainers, folder=folder),
        "fsdp1": _fsdp1,
    }
    ranks = on_ranks(2, folder, list(work.values()), seconds=600)
    results = dict(zip(work, ranks[0].values(), strict=True))
    for result in results.values():
        assert not isinstance(result, Result), result.error
    return results


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", LOOPS)
def test_loop_is_that_of_one_process(found: dict[str, Any], model: str) -> None:
    assert found[model] <= 1e-6


@pytest.mark.timeout(900)
def test_trainer_is_that_of_ddp_and_resumes(found: dict[str, Any]) -> None:
    trainers = found["trainers"]
    (expected, plain), (logs, ended), (_, resumed) = (trainers[name] for name in ("ddp", "fsdp", "fsdp/resumed"))
    assert all(torch.equal(ended[name], resumed[name]) for name in ended)
    assert apart({name: ended[name] for name in plain}, plain) <= 1e-5
    for row, other in zip(logs, expected, strict=True):
        assert all(row[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6) for key in other)


def test_fsdp1_is_refused(found: dict[str, Any]) -> None:
    assert found["fsdp1"] == "fsdp=True gave FSDP1, whose trainers have not been tried: set fsdp_version to 2"
