"""DeepSpeed itself on gloo ranks: optimizer steps, trainers and checkpoints are those of one process, or of DDP."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from seqreg import BadInput, Criterion
from seqreg.context import Count
from seqreg.engines.detect import engine_of
from seqreg.integrations.hf import context, count, optimizer_steps
from seqreg.integrations.module import loss_context
from seqreg.terms.bregman import Bregman
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from tests.helpers import tiny_models, zero
from tests.helpers.engine_cases import Result, on_ranks
from tests.helpers.engine_steps import TERMS, apart, make, micro_batches, one_process
from tests.integrations.test_hf_context import fixed_noise
from tests.integrations.test_trainer import losses, rows, trainer

pytest.importorskip("deepspeed")
STAGES = (0, 1, 2, 3)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clipping": 0.05},
    "offloaded": {
        "zero": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
}


def weights(module: Any) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    found = {name: safe_get_full_fp32_param(p) if hasattr(p, "ds_id") else p for name, p in module.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _steps(rank: int, world: int, *, stage: int, name: str) -> float:
    """How far three steps of an engine are from those of one process."""
    settings = copy.deepcopy(SETTINGS[name])
    with pytest.MonkeyPatch.context() as patch:
        fixed_noise(patch)
        net = make()
        engine = zero.initialize(net, stage=stage, gradient_accumulation_steps=2, **settings)
        criterion = Criterion(*TERMS, label_smoothing=0.1)
        for _, contexts in optimizer_steps(engine, micro_batches(rank)):
            for ctx in contexts:
                engine.backward(criterion(ctx).total)
                engine.step()
        assert engine.global_steps == 3
        return apart(weights(net), one_process(world, settings.get("gradient_clipping", 0.0)))


def _through_accelerate(rank: int, world: int, *, stage: int) -> float:
    zero.as_under_torchrun(rank, world)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.PartialState(cpu=True)
    config = zero.config(stage=stage, gradient_accumulation_steps=2)
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        fixed_noise(patch)
        net = make()
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5)
        engine, optimizer = accelerator.prepare(net, optimizer)
        assert engine_of(engine) == f"ZeRO-{stage}"
        engine.train()
        criterion = Criterion(*TERMS, label_smoothing=0.1)
        for _, contexts in optimizer_steps(engine, micro_batches(rank), accelerator=accelerator):
            for ctx in contexts:
                accelerator.backward(criterion(ctx).total)
            optimizer.step()
            optimizer.zero_grad()
        assert engine.global_steps == 3
        return apart(weights(net), one_process(world))


def _streams(rank: int, world: int, *, stage: int) -> float:
    """How far steps on labelled, replayed and unlabelled batches are from those of DDP."""
    with pytest.MonkeyPatch.context() as patch:
        fixed_noise(patch)
        net, plain = make(), make()
        engine = zero.initialize(net, stage=stage, gradient_accumulation_steps=2)
        ddp = torch.nn.parallel.DistributedDataParallel(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        further = {"replay": micro_batches(rank + 100), "unlabelled": micro_batches(rank + 200)}
        for trained in (engine, ddp):
            criterion = Criterion(R3F(weight=0.5, scale=0.1, on="both"), label_smoothing=0.1)
            for _, contexts in optimizer_steps(trained, micro_batches(rank), 2, **further):
                for streams in contexts:
                    total = criterion(*streams).total
                    engine.backward(total) if trained is engine else total.backward()
                    if trained is engine:
                        engine.step()
                if trained is ddp:
                    optimizer.step()
                    optimizer.zero_grad()
        return apart(weights(net), weights(plain))


def _trainers(rank: int, world: int, *, folder: Path, stages: Sequence[int]) -> dict[str, Any]:
    """Logs and final weights of trainers under DDP and every stage; of the latter also of a resumed run."""
    zero.as_under_torchrun(rank, world)
    found = {}
    settings: dict[str, Any] = {
        "max_steps": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "save_steps": 2,
        "save_strategy": "steps", "max_grad_norm": 0.5, "optim": "sgd", "learning_rate": 0.1,
    }  # fmt: skip
    for stage in (None, *stages):
        AcceleratorState._reset_state(reset_partial_state=True)
        terms = (R3F(scale=0.1), JacHess(weight=0.1), *(() if stage == 3 else (Bregman(beta=0.5),)))
        config = {
            **zero.config(stage=stage or 0, gradient_clipping="auto", gradient_accumulation_steps="auto"),
            "train_micro_batch_size_per_gpu": "auto",
        }
        engine = {} if stage is None else {"deepspeed": config}
        out = folder / str(stage)
        for checkpoint in (None,) if stage is None else (None, str(out / "checkpoint-2")):
            AcceleratorState._reset_state(reset_partial_state=True)
            one = trainer("bart", out, *terms, **settings, **copy.deepcopy(engine))
            one.train(resume_from_checkpoint=checkpoint)
            found[f"{stage}{'' if checkpoint is None else '/resumed'}"] = losses(one), weights(one.model)
    return found


def _refused_trainers(rank: int, world: int, *, folder: Path) -> dict[str, str]:
    """Without use_cpu, and without a GPU, Accelerate counts one process; further streams have not been tried."""
    zero.as_under_torchrun(rank, world)
    AcceleratorState._reset_state(reset_partial_state=True)
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "max_grad_norm": 0.0, "use_cpu": False}
    one = trainer("bart", folder / f"alone-{rank}", deepspeed=zero.config(stage=2), **settings)
    with pytest.raises(BadInput) as alone:
        one.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    streams, settings["use_cpu"] = {"unlabelled_dataset": rows("bart")}, True
    with pytest.raises(BadInput) as further:
        trainer("bart", folder, R3F(on="both"), streams=streams, deepspeed=zero.config(stage=2), **settings)
    return {"alone": str(alone.value), "streams": str(further.value)}


def _refused(rank: int, world: int) -> dict[str, str]:
    """Messages about what DeepSpeed cannot do."""
    net, messages = tiny_models.make("bart", encoder_layerdrop=0.5), {}
    batch = tiny_models.batch("bart")
    engine = zero.initialize(net, stage=2)
    with pytest.raises(BadInput) as layerdrop:
        context(engine, batch, count=Count(6, 3, world))
    with pytest.raises(BadInput) as no_count:
        context(zero.initialize(tiny_models.make("bart"), stage=2), batch)
    with pytest.raises(BadInput) as module:
        loss_context(engine, lambda: engine(**batch).logits, torch.sum, mask=batch["labels"] > 0, embedding=net)
    messages = {"layerdrop": layerdrop, "count": no_count, "module": module}
    return {name: str(error.value) for name, error in messages.items()}


def _saved(rank: int, world: int, *, folder: Path, stage: int, resume: bool, steps: int) -> dict[str, Tensor]:
    """Steps on the same eight rows, over any number of ranks, before or after a checkpoint; weights in the end."""
    mine = {key: value[rank::world] for key, value in tiny_models.batch("bart", rows=8).items()}
    with pytest.MonkeyPatch.context() as patch:
        fixed_noise(patch)
        net = tiny_models.dropout_off(tiny_models.make("bart", seed=7 if resume else 0))
        universal = {"checkpoint": {"load_universal": True}} if resume else {}
        engine = zero.initialize(net, stage=stage, adam=True, **universal)
        criterion, first = Criterion(R3F(scale=0.1), *(() if stage == 3 else (Bregman(weight=10.0, beta=0.5),))), 0
        if resume:
            _, state = engine.load_checkpoint(str(folder))
            criterion.load_state_dict(state["criterion"])
            first = engine.global_steps
        for step in range(first, first + steps):
            whole = count(engine, [mine])
            engine.backward(criterion(context(engine, mine, step=step, count=whole)).total)
            engine.step()
            if not resume and step == 1:
                info = {"universal_checkpoint_version": 0.2}
                state = {"criterion": criterion.state_dict(), "universal_checkpoint_info": info}
                engine.save_checkpoint(str(folder), tag="two", client_state=state)
        return weights(net)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


WORK = {
    **{f"steps/{name}/{stage}": partial(_steps, stage=stage, name=name) for name in SETTINGS for stage in STAGES},
    **{f"accelerate/{stage}": partial(_through_accelerate, stage=stage) for stage in STAGES[1:]},
    **{f"streams/{stage}": partial(_streams, stage=stage) for stage in STAGES},
    "refused": _refused,
}


def _all(rank: int, world: int, *, folder: Path) -> dict[str, Any]:
    found = {name: work(rank, world) for name, work in WORK.items()}
    found["trainers"] = _trainers(rank, world, folder=folder, stages=STAGES[1:])
    found["refused"] |= _refused_trainers(rank, world, folder=folder)
    for stage in STAGES[1:]:
        found[f"saved/{stage}"] = _saved(
            rank, world, folder=folder / f"zero{stage}", stage=stage, resume=False, steps=4
        )
    return found


def on(world: int, folder: Path, work: Any, seconds: float = 600) -> Any:
    (folder / "ranks").mkdir(exist_ok=True)
    results = [rank.popitem()[1] for rank in on_ranks(world, folder / "ranks", [work], seconds=seconds)]
    for result in results:
        assert not isinstance(result, Result), result.error
    (folder / "ranks" / "store").unlink(missing_ok=True)
    return results[0]


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return on(2, folder, partial(_all, folder=folder))  # type: ignore[no-any-return]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name in WORK if name != "refused"])
def test_steps_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    assert found[name] <= 1e-6


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_trainer_is_that_of_ddp_and_resumes(found: dict[str, Any], stage: int) -> None:
    (logs, ended), (_, resumed) = found["trainers"][str(stage)], found["trainers"][f"{stage}/resumed"]
    assert all(torch.equal(ended[name], resumed[name]) for name in ended)
    if stage < 3:  # which has a term less
        expected, plain = found["trainers"]["None"]
        assert apart(ended, plain) <= 1e-6
        for row, other in zip(logs, expected, strict=True):
            assert row.keys() == other.keys()
            assert all(row[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6) for key in row)


def test_what_deepspeed_cannot_do_is_refused(found: dict[str, Any]) -> None:
    messages = found["refused"]
    assert messages["layerdrop"].startswith("ZeRO-2: layerdrop skips layers")
    assert messages["count"].startswith("several ranks train one model: pass count=")
    assert messages["module"].startswith("ZeRO-2: DeepSpeed cannot be told of the loss of any module")
    assert messages["alone"].startswith("gradients are averaged over 2 ranks, and Accelerate counts 1")
    assert messages["streams"].startswith("unlabelled_dataset has not been tried with DeepSpeed in a Trainer")
    assert not any("\n" in message for message in messages.values())


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("stage", STAGES[1:])
def test_checkpoint_resumes_on_other_numbers_of_ranks(
    found: dict[str, Any], folder: Path, stage: int, ranks: int
) -> None:
    saved = folder / f"zero{stage}"
    if not (saved / "universal").exists():
        zero.to_universal(saved / "two", saved / "universal")
    resumed = on(ranks, folder, partial(_saved, folder=saved, stage=stage, resume=True, steps=2))
    assert apart(resumed, found[f"saved/{stage}"]) <= 2e-6
