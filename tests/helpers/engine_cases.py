"""Two optimizer steps of every term under every engine, on gloo ranks and in one process: losses, gradients, paths.

Ranks are forked from a server that has imported everything, and run all cases in one process group.
"""

from __future__ import annotations

import datetime
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from seqreg import Criterion
from seqreg.context import Count
from seqreg.engines.deepspeed import is_deepspeed
from seqreg.engines.shards import full
from seqreg.integrations.hf import context, count, r4f
from seqreg.term import Term
from seqreg.terms.alum import ALUM
from seqreg.terms.anchor import Anchor
from seqreg.terms.bregman import Bregman
from seqreg.terms.freelb import FreeLB
from seqreg.terms.jachess import JacHess
from seqreg.terms.neftune import NEFTune
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from seqreg.terms.sift import SiFT
from seqreg.terms.smart import SMART
from seqreg.terms.uegr import UEGR
from seqreg.terms.vat import VAT
from tests.helpers import tiny_models, zero

TERMS: dict[str, Callable[[], tuple[Term, ...]]] = {
    "base": lambda: (),
    "r3f": lambda: (R3F(weight=1.0, scale=0.1, relative=True),),
    "smart": lambda: (SMART(weight=1.0),),
    "bregman": lambda: (Bregman(weight=10.0, beta=0.5),),
    "sift": lambda: (SiFT(),),
    "alum": lambda: (ALUM(weight=1.0),),
    "vat": lambda: (VAT(weight=1.0),),
    "freelb": lambda: (FreeLB(weight=0.5),),
    "rdrop": lambda: (RDrop(weight=1.0),),
    "neftune": lambda: (NEFTune(),),
    "jachess": lambda: (JacHess(weight=0.1),),
    "anchor": lambda: (Anchor(weight=10.0),),
    "uegr": lambda: (UEGR(weight=0.5),),
}
R4F = "r4f"
"""R3F, on a classifier whose head is normalised."""
LAYERS = ("BartEncoderLayer", "BartDecoderLayer", "T5Block", "GPT2Block", "RobertaLayer", "LlamaDecoderLayer")
VOCAB = 49
"""Not a multiple of the ranks: shards are of unequal size."""


@dataclass(frozen=True)
class Case:
    """One term on one model under one engine.

    Args:
        engine: "" for one process, "ddp", "fsdp2", "fsdp1", or "zero0" to "zero3": DeepSpeed's
        way: how FSDP2 is applied: "layers" and the root, "root" alone, "head" in a group of its own that is freed after
            every pass, or "hsdp": shards in pairs of ranks, copied between pairs; of DDP: "find_unused" parameters, as
            transformers' Trainer does
        dtype: of MixedPrecisionPolicy; of the model itself in one process
        unlabelled: the last rank has no label at all
        lora: modules with adapters, which alone learn
        compiled: `model.compile(backend="eager")`, before it is wrapped
    """

    model: str
    term: str
    engine: str = ""
    way: str = "layers"
    fused: bool = True
    dtype: torch.dtype | None = None
    unlabelled: bool = False
    checkpointing: bool = False
    lora: tuple[str, ...] = ()
    compiled: bool = False

    @property
    def reference(self) -> Case:
        return Case(
            self.model, self.term, fused=self.fused, dtype=self.dtype, unlabelled=self.unlabelled,
            lora=self.lora,
        )  # fmt: skip


@dataclass
class Result:
    losses: list[float]
    gradients: dict[str, Tensor]
    paths: dict[str, str]
    parts: dict[str, float]
    error: str = ""


def layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in LAYERS]


def wrap(model: Any, case: Case, world: int) -> Any:
    if case.engine == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=case.way == "find_unused")
    if case.engine.startswith("zero"):
        return zero.initialize(model, stage=int(case.engine[-1]), dtype=case.dtype)
    if case.engine == "fsdp1":
        policy = ModuleWrapPolicy({type(layer) for layer in layers(model)})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    if case.engine == "fsdp2":
        shape, names = ((world // 2, 2), ("copy", "shard")) if case.way == "hsdp" else ((world,), ("shard",))
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        shard = partial(fully_shard, mesh=mesh)
        if case.dtype is not None:
            shard = partial(shard, mp_policy=MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=torch.float32))
        for layer in layers(model) if case.way != "root" else ():
            shard(layer)
        if case.way == "head":
            shard(model.get_output_embeddings(), reshard_after_forward=True)
        shard(model)
    return model


def batch(case: Case, rank: int, world: int, step: int) -> dict[str, Tensor]:
    """Ranks have unequal numbers of labels."""
    made = tiny_models.batch(case.model, rows=3, seed=100 + 17 * step + rank)
    if made["labels"].dim() == 2:
        made["labels"][0, 2 + rank % 3 :] = -100
        if case.unlabelled and rank == world - 1:
            made["labels"][:] = -100
    return made


def alone(case: Case, batches: Iterable[dict[str, Tensor]]) -> Count:
    """The count of a process without others, although there are some."""
    causal = case.model in tiny_models.CAUSAL
    counts = [Count.of((one["labels"][:, 1:] if causal else one["labels"]) != -100) for one in batches]
    return Count(sum(one.labels for one in counts), sum(one.sequences for one in counts))


def settled(criterion: Criterion, model: str) -> None:
    """JacHess starts from the first batch, which is the whole step or a part of it: begin from given numbers."""
    stacks = ("encoder", "decoder") if model in ("bart", "t5") else ("encoder",) if model == "roberta" else ("decoder",)
    if criterion.terms and criterion.terms[0].name == "jachess":
        start = {**{f"{stack}.1": 400.0 for stack in stacks}, "logits": 400.0, "rms": 1.0 if model == "t5" else 0.1}
        criterion.load_state_dict({f"jachess/{name}": torch.tensor(number) for name, number in start.items()})


def terms_of(case: Case) -> tuple[Term, ...]:
    return TERMS["r3f" if case.term == R4F else case.term]()


def make(case: Case) -> Any:
    spread = 1.0 if case.model == "t5" else 4.0  # whose weights are large as they are
    model = tiny_models.make(case.model, vocab_size=VOCAB, spread=spread)
    if case.lora:
        torch.manual_seed(7)
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=list(case.lora), init_lora_weights=False, lora_dropout=0.1)
        )
    if case.term == R4F:
        torch.manual_seed(7)
        r4f(model)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def run(case: Case, rank: int, world: int) -> Result:
    """Two steps of gradient descent; the gradients are those of the second."""
    model = make(case)
    if case.dtype is not None and not case.engine:
        return _low_precision(model, case, world)
    if case.compiled:
        torch._dynamo.reset()
        counters.clear()
        model.compile(backend="eager")
    net = wrap(model, case, world)
    optimizer = net if case.engine.startswith("zero") else torch.optim.SGD(net.parameters(), lr=0.5)
    criterion = Criterion(*terms_of(case), label_smoothing=0.1, fused=case.fused)
    settled(criterion, case.model)
    result = Result([], {}, {}, {})
    for step in range(2):
        optimizer.zero_grad()
        mine = [rank] if case.engine else list(range(world))
        batches = {number: batch(case, number, world, step) for number in mine}
        whole = count(net, list(batches.values())) if case.engine else alone(case, batches.values())
        total = torch.zeros((), dtype=torch.float64)
        for number, one in batches.items():
            torch.manual_seed(500 + 10 * step + number)
            report = criterion(context(net, one, step=step, count=whole))
            net.backward(report.total) if optimizer is net else report.total.backward()  # type: ignore[no-untyped-call]
            total += float(report.total.detach())
        if case.engine:
            torch.distributed.all_reduce(total)
            total /= world
        result.losses.append(float(total))
        result.paths, result.parts = dict(report.paths), {key: float(part) for key, part in report.parts.items()}
        result.gradients = gradients(net)
        optimizer.step()
    assert not case.compiled or counters["stats"]["unique_graphs"] > 0
    return result


def _low_precision(model: Any, case: Case, world: int) -> Result:
    """What FSDP2 computes with a MixedPrecisionPolicy: a copy in low precision, gradients added up in float32."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    criterion = Criterion(*terms_of(case), label_smoothing=0.1, fused=case.fused)
    settled(criterion, case.model)
    result = Result([], {}, {}, {})
    copy = make(case)
    for parameter in copy.parameters():  # and not buffers
        parameter.data = parameter.data.to(case.dtype)
    for step in range(2):
        batches = [batch(case, number, world, step) for number in range(world)]
        whole = alone(case, batches)
        copy.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        total = 0.0
        for number, one in enumerate(batches):
            copy.zero_grad()
            torch.manual_seed(500 + 10 * step + number)
            report = criterion(context(copy, one, step=step, count=whole))
            report.total.backward()  # type: ignore[no-untyped-call]
            total += float(report.total.detach())
            for own, low in zip(model.parameters(), copy.parameters(), strict=True):
                if low.grad is not None:
                    own.grad = low.grad.float() if own.grad is None else own.grad + low.grad.float()
        result.losses.append(total)
        result.paths, result.gradients = dict(report.paths), gradients(model)
        optimizer.step()
    return result


def gradients(net: Any) -> dict[str, Tensor]:
    """All of them, whole, by the names that the model itself has for them."""
    if is_deepspeed(net):
        return zero.gradients(net)
    if isinstance(net, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(net, with_grads=True):
            found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        return {name.replace("_fsdp_wrapped_module.", ""): gradient for name, gradient in found.items()}
    found = {name: full(p.grad).clone() for name, p in net.named_parameters() if p.grad is not None}
    return {name.removeprefix("module."): gradient for name, gradient in found.items()}


def _attempt(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return Result([], {}, {}, {}, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def _rank(rank: int, world: int, folder: str, cases: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = torch.distributed.FileStore(f"{folder}/store", world)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=20)
    )
    results = {}
    for number, case in enumerate(cases):
        if not isinstance(case, Case):
            results[case] = _attempt(partial(case, rank, world))
        elif case.engine or number % world == rank:  # one process: each rank does its part of them
            results[case] = _attempt(partial(run, case, rank, world))
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def on_ranks(world: int, folder: Path, cases: Sequence[Any], seconds: float = 300) -> list[dict[Any, Any]]:
    """What every rank found; cases are `Case` or functions of rank and world at the top level of a module."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    ranks = [processes.Process(target=_rank, args=(rank, world, str(folder), cases)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(seconds)
    ended = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert ended == [0] * world, f"ranks ended with {ended}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def difference(found: Result, expected: Result) -> tuple[float, float]:
    """Of the losses of both steps, absolute, and of the whole gradient, relative."""
    losses = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    names = expected.gradients.keys()
    assert found.gradients.keys() == names, found.gradients.keys() ^ names
    apart = sum(float((found.gradients[name] - expected.gradients[name]).square().sum()) for name in names)
    size = sum(float(expected.gradients[name].square().sum()) for name in names)
    assert size > 0
    return losses, (apart / size) ** 0.5


def status(found: dict[Any, Any], case: Case) -> str:
    """What is true of a case: "exact and fused", "exact" or "refused"; anything else fails."""
    result = found[case]
    if result.error.startswith("BadInput: "):
        assert result.error.startswith(f"BadInput: {case.term}: "), result.error
        assert "\n" not in result.error.partition("Traceback")[0].strip()
        return "refused"
    expected = found[case.reference]
    assert not result.error, result.error
    assert not expected.error, expected.error
    losses, gradients = difference(result, expected)
    low = case.dtype is not None
    assert losses <= (1e-3 if low else 6e-6)
    assert gradients <= (2e-2 if low else 1e-4)
    name = "r3f" if case.term == R4F else case.term
    if name not in ("base", "neftune") and not low:  # or the term could be 0 in both
        assert result.parts[name] != 0 or case.unlabelled
    return "exact" if "plain" in result.paths.values() else "exact and fused"
