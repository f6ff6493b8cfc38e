"""Loss and gradient under DDP, FSDP2 and FSDP1 are those of one process, for every term; anything else is refused."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from seqreg import BadInput, Criterion
from seqreg.ascent import Ascent
from seqreg.context import Count
from seqreg.engines.detect import engine_of, is_sharded
from seqreg.engines.shards import full
from seqreg.integrations.hf import context, count, r4f, shard
from seqreg.selective_update import ChildTuningF, StochasticUpdate
from seqreg.terms.anchor import Anchor
from seqreg.terms.bregman import Bregman
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.smart import SMART
from tests import support
from tests.helpers import tiny_models
from tests.helpers.engine_cases import (
    R4F,
    TERMS,
    VOCAB,
    Case,
    Result,
    batch,
    gradients,
    layers,
    make,
    on_ranks,
    status,
    wrap,
)
from tests.integrations.test_module import encoder, of_pairs
from tests.integrations.test_trainer import trainer

EVERY = [Case("bart", term, engine) for engine in ("ddp", "fsdp2") for term in TERMS]
EVERY += [Case("llama", term, "ddp", way="find_unused") for term in TERMS]
EVERY += [Case("roberta", R4F, engine) for engine in ("ddp", "fsdp2")]
LORA_HEAD = ("q_proj", "lm_head")
COMPILED = ("base", "r3f", "smart", "bregman", "rdrop")
SOME = [
    *(Case("llama", term, "fsdp2", way="head") for term in ("r3f", "smart", "bregman", "jachess")),
    *(Case("bart", term, "fsdp1") for term in ("base", "r3f", "bregman")),
    Case("llama", "r3f", "fsdp2", way="root", unlabelled=True),
    Case("llama", "jachess", "fsdp2", unlabelled=True),
    Case("llama", "smart", "fsdp2", way="head", checkpointing=True),
    *(Case("llama", term, "fsdp2", lora=("q_proj", "v_proj")) for term in ("r3f", "bregman", "smart")),
    *(Case("bart", term, "ddp", way="find_unused") for term in ("base", "r3f", "smart")),
    Case("llama", "r3f", "ddp", way="find_unused", lora=LORA_HEAD),
    *(Case("llama", term, engine, lora=LORA_HEAD) for engine in ("ddp", "fsdp2") for term in ("r3f", "bregman")),
    *(Case("bart", term, "fsdp2", dtype=torch.bfloat16) for term in ("base", "r3f", "jachess")),
    Case("roberta", R4F, "fsdp2", dtype=torch.bfloat16),
    *(Case("llama", term, engine, compiled=True) for engine in ("ddp", "fsdp2") for term in COMPILED),
]
HEAD = (VOCAB + 1) * 16
"""Numbers in the head; the shards are padded to one size."""
GROUPS = {"head": HEAD, "layers": 2 * HEAD + 16}
"""Numbers that are gathered with the head: alone, or with the embeddings and the last norm."""
COUNTED = {"base": (), "r3f": (R3F(scale=0.1),), "smart": (SMART(attack=Ascent(steps=2)),), "rdrop": (RDrop(),)}


def _gathered_once(rank: int, world: int) -> dict[tuple[str, str], tuple[int, int]]:
    """All-gathers and reduce-scatters of the group of the head in one step."""
    seen: list[tuple[str, int]] = []
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_single", "reduce_scatter_single"):
            original = getattr(torch.distributed, name)

            def counted(*args: Any, original: Any = original, name: str = name, **named: Any) -> Any:
                sizes = [one.numel() for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
                seen.append((name, max(sizes)))
                return original(*args, **named)

            patch.setattr(torch.distributed, name, counted)
        for (way, size), (name, terms) in itertools.product(GROUPS.items(), COUNTED.items()):
            case = Case("llama", "", "fsdp2", way=way)
            net, one = wrap(make(case), case, world), batch(case, rank, world, 0)
            whole = count(net, [one])
            for _ in range(2):  # the first step also sets FSDP2 up
                seen.clear()
                Criterion(*terms)(context(net, one, step=0, count=whole)).total.backward()
            found[way, name] = seen.count(("all_gather_single", size)), seen.count(("reduce_scatter_single", size))
            group = (net.get_output_embeddings() if way == "head" else net)._get_fsdp_state()._fsdp_param_groups[0]
            assert group.is_sharded
            assert group.reshard_after_backward, "as it was"
            assert (group.post_forward_mesh_info is not None) == (way == "head"), "as it was"
    return found


def _count_is_required(rank: int, world: int) -> None:
    case = Case("bart", "", "fsdp2")
    net, one = wrap(make(case), case, world), batch(case, rank, world, 0)
    with pytest.raises(BadInput, match="pass count="):
        context(net, one)
    assert engine_of(net) == "FSDP2"
    layerdrop = wrap(tiny_models.make("bart", encoder_layerdrop=0.5), case, world)
    with pytest.raises(BadInput, match="FSDP2: layerdrop skips layers that other ranks gather"):
        context(layerdrop, one, count=count(net, [one]))
    mixed = make(case)
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(mixed.model.encoder.layers[0], mp_policy=policy)
    fully_shard(mixed)
    with pytest.raises(BadInput, match=r"mp_policy\.param_dtype is None and torch\.bfloat16 in one model"):
        context(mixed, one, count=count(net, [one]))
    Criterion()(context(net, one, count=count(net, [one]))).total.backward()
    with pytest.raises(BadInput, match="ChildTuningF: parameters are sharded"), ChildTuningF().around(net.parameters()):
        pass


def _nothing_stale(rank: int, world: int) -> None:
    """Diagnostics between backward and the optimizer's step leave no whole weights behind."""
    case = Case("gpt2", "", "fsdp2")
    losses = []
    for look in (False, True):
        net, one = wrap(make(case), case, world), batch(case, rank, world, 0)
        optimizer, criterion = torch.optim.SGD(net.parameters(), lr=0.5), Criterion(Bregman(weight=1.0, beta=0.5))
        for step in range(2):
            ctx = context(net, one, step=step, count=count(net, [one]))
            torch.manual_seed(step)
            criterion(ctx).total.backward()
            if look:
                numbers = criterion.diagnostics(ctx)
                assert step == 0 or numbers["bregman/distance"] > 0
            optimizer.step()
            optimizer.zero_grad()
        torch.manual_seed(3)
        losses.append(float(criterion(context(net, one, step=2, count=count(net, [one]))).total))
    assert losses[0] == losses[1]


def _diagnostics_of_adapters(rank: int, world: int) -> None:
    """FSDP2 gathers weights in the forward of the model that it was called on, which is PEFT's."""
    case = Case("llama", "", "fsdp2", way="root", lora=("q_proj", "v_proj"))
    net, one = wrap(make(case), case, world), batch(case, rank, world, 0)
    numbers = Criterion(R3F(scale=0.1)).diagnostics(context(net, one, step=0, count=count(net, [one])))
    assert numbers["r3f/part_over_base"] > 0


def _average_is_sharded(rank: int, world: int) -> None:
    """The average of Bregman is kept as shards, saved whole, and taken up again as it was."""
    case = Case("llama", "", "fsdp2")
    net, one = wrap(make(case), case, world), batch(case, rank, world, 0)
    whole, optimizer = count(net, [one]), torch.optim.SGD(net.parameters(), lr=0.5)
    criterion = Criterion(Bregman(weight=1.0, beta=0.5))

    def step(number: int, using: Criterion) -> float:
        torch.manual_seed(number)
        optimizer.zero_grad()
        report = using(context(net, one, step=number, count=whole))
        report.total.backward()
        return float(report.values["bregman"])

    for number in range(2):
        step(number, criterion)
        optimizer.step()
    kept = criterion.memory["bregman"]
    assert all(is_sharded(value) for key, value in kept.items() if key.startswith("w/"))
    state = {key: full(value).clone() for key, value in criterion.state_dict().items()}
    again = Criterion(Bregman(weight=1.0, beta=0.5))
    again.load_state_dict(state)
    values = step(2, criterion), step(2, again)
    assert values[0] == values[1] > 0
    assert all(is_sharded(value) for key, value in again.memory["bregman"].items() if key.startswith("w/"))


def _accumulates_without_communication(rank: int, world: int) -> None:
    """Micro-batches before the last are not synchronised, and may be differentiated twice through a retained graph."""
    case, found = Case("llama", "r3f", "fsdp2"), []
    for late in (False, True):
        net = wrap(make(case), case, world)
        batches = [batch(case, rank, world, number) for number in range(2)]
        whole = count(net, batches)
        for number, one in enumerate(batches):
            if late:
                net.set_requires_gradient_sync(number == 1)
            torch.manual_seed(number)
            total = Criterion(R3F(scale=0.1))(context(net, one, step=0, count=whole)).total
            if late:
                total.backward(torch.tensor(0.25), retain_graph=True)
                total.backward(torch.tensor(0.75))
            else:
                total.backward()
        found.append(gradients(net))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def _what_no_engine_holds_is_refused(rank: int, world: int) -> None:
    """Ranks would each learn it from their own batches, and drift apart without a word."""
    case = Case("llama", "", "fsdp2")
    one, groups = batch(case, rank, world, 0), [torch.distributed.new_group([number]) for number in range(world)]

    def refused(net: Any, match: str) -> None:
        with pytest.raises(BadInput, match=match):
            context(net, one, count=Count(8, 3, world))

    net = make(case)
    for layer in layers(net):
        fully_shard(layer)
    refused(net, r"^FSDP2 does not hold model\.embed_tokens\.weight, and its gradient would be that of one rank: wrap")
    for name in ("embed_tokens", "norm"):
        getattr(net.model, name).requires_grad_(False)
    refused(net, r"FSDP2 does not hold lm_head\.weight")
    net.lm_head.requires_grad_(False)
    Criterion(*COUNTED["r3f"])(context(net, one, count=count(net, [one]))).total.backward()  # the rest does not learn
    net = wrap(make(case), case, world)
    net.set_gradient_divide_factor(1.0)
    refused(
        net, r"^FSDP2: set_gradient_divide_factor\(1\.0\): the loss is made for gradients that are averaged over the 2"
    )
    net = make(case)
    net.model = torch.nn.parallel.DistributedDataParallel(net.model)
    with pytest.raises(BadInput, match=r"^DistributedDataParallel does not hold lm_head\.weight"):
        engine_of(net)
    net.model = FullyShardedDataParallel(net.model.module, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(BadInput, match=r"^FSDP1 does not hold lm_head\.weight"):
        engine_of(net)
    net = torch.nn.parallel.DistributedDataParallel(make(case), process_group=groups[rank])
    refused(net, "^DistributedDataParallel is over 1 of 2 ranks: give it all of them")


def _any_module(rank: int, world: int) -> None:
    """A loss of one's own on any module: loss and gradient are those of one process, the average is kept as shards."""
    results = []
    for alone in (True, False):
        net, batches = encoder(), [tiny_models.batch("bert", rows=6, seed=number) for number in range(world)]
        inputs = [{key: one[key] for key in ("input_ids", "attention_mask")} for one in batches]
        if not alone:
            inputs = inputs[rank : rank + 1]
            for layer in net.encoder.layer:
                fully_shard(layer)
            fully_shard(net)
            with pytest.raises(BadInput, match="several ranks train one model: pass count="):
                of_pairs(net, inputs[0])
        whole = Count(3 * world, 3 * world) if alone else count(net, inputs, build_context=of_pairs)
        assert whole.labels == 3 * world
        optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
        criterion = Criterion(Bregman(weight=10.0, beta=0.5, divergence="mse"), Anchor(weight=1.0, divergence="mse"))
        for step in range(2):
            optimizer.zero_grad()
            total = torch.zeros(())
            for number, one in enumerate(inputs):
                torch.manual_seed(10 * step + (number if alone else rank))
                report = criterion(of_pairs(net, one, step=step, count=whole))
                report.total.backward()
                total += report.total.detach() / (1 if alone else world)
            if not alone:
                torch.distributed.all_reduce(total)
            losses.append(float(total))
            learnt = gradients(net)
            optimizer.step()
        assert float(report.values["bregman"]) > 0
        assert alone or all(is_sharded(value) for key, value in criterion.memory["bregman"].items() if "w/" in key)
        results.append((losses, learnt))
    (losses, learnt), (found, sharded) = results
    assert found == pytest.approx(losses, rel=1e-5)
    for name, gradient in learnt.items():
        torch.testing.assert_close(sharded[name], gradient, rtol=1e-4, atol=1e-6)


@contextlib.contextmanager
def _accelerates(rank: int, world: int) -> Iterator[Path]:
    """What Accelerate reads where torchrun has started a rank, and a folder of this rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    with tempfile.TemporaryDirectory() as out, pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, str(value))
        patch.setenv("ACCELERATE_USE_FSDP", "false")
        yield Path(out)


def _the_trainer_stops(rank: int, world: int) -> None:
    """Accelerate takes DDP on CPUs where FSDP is asked for."""
    with _accelerates(rank, world) as out:
        asked = trainer("bart", out, max_steps=1, fsdp=True)
        with pytest.raises(BadInput, match=r"^fsdp=True asks for FSDP, and Accelerate gave DDP: on CPUs it does so"):
            asked.train()


def _what_is_sharded_is_refused(rank: int, world: int) -> None:
    with _accelerates(rank, world) as out:
        net = tiny_models.make("bart")
        with pytest.raises(BadInput, match="cpu_offload: the weights are in the memory of the CPU already"):
            shard(net, cpu_offload=True)
        with pytest.raises(BadInput, match="FSDP2: layerdrop skips layers that other ranks gather"):
            shard(tiny_models.make("bart", encoder_layerdrop=0.5))
        shard(net)
        with pytest.raises(BadInput, match="the model is under FSDP2 already"):
            shard(net)
        with pytest.raises(BadInput, match="optim='adafactor' averages rows and columns"):
            trainer("bart", out, net=net, optim="adafactor")
        adapters = peft.get_peft_model(tiny_models.make("bart"), peft.LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(BadInput, match="adapters are not saved from the shards of FSDP2"):
            trainer("bart", out, net=shard(adapters))
        with pytest.raises(BadInput, match="StochasticUpdate needs whole gradients"):
            trainer("bart", out, net=net, update=StochasticUpdate())
        with pytest.raises(BadInput, match="an R4F head cannot be exported"):
            trainer("roberta", out, net=shard(r4f(tiny_models.make("roberta"))))


CHECKS = [
    _count_is_required,
    _nothing_stale,
    _diagnostics_of_adapters,
    _average_is_sharded,
    _accumulates_without_communication,
    _what_no_engine_holds_is_refused,
    _any_module,
    _the_trainer_stops,
    _what_is_sharded_is_refused,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    cases = [*EVERY, *SOME]
    references = dict.fromkeys(case.reference for case in cases)
    ranks = on_ranks(2, tmp_path_factory.mktemp("ranks"), [*references, *cases, _gathered_once, *CHECKS])
    return {key: value for rank in ranks for key, value in rank.items()}


@pytest.mark.parametrize("case", [*EVERY, *SOME], ids=str)
def test_exact_or_refused(found: dict[Any, Any], case: Case) -> None:
    policy = case.dtype is not None
    column = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2, bf16 policy" if policy else "FSDP2"}[case.engine]
    expected = support.expected(case.term, column)
    if case.lora == LORA_HEAD and case.engine == "fsdp2":  # whose shards of W and B are not joined
        expected = "exact"
    assert status(found, case) == expected


def test_the_head_is_gathered_once_and_its_gradient_scattered_once(found: dict[Any, Any]) -> None:
    """However many passes and inner gradients there are; alone in its group, FSDP2 gathers it again for the backward of
    a second pass."""
    counts = found[_gathered_once]
    assert not isinstance(counts, Result), counts.error
    expected = dict.fromkeys(itertools.product(GROUPS, COUNTED), (1, 1))
    assert counts == {**expected, ("head", "smart"): (2, 1)}


@pytest.mark.parametrize("work", CHECKS, ids=lambda work: work.__name__.strip("_"))
def test_fsdp2(found: dict[Any, Any], work: Any) -> None:
    assert found[work] is None, found[work].error
