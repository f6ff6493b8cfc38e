"""What a step would take on many GPUs, on paper: memory and time of every term, by a model that is stated here.

No GPU was used for any of it. Operations of a plain step are counted on torch's meta device, which has shapes and no
numbers; what a term adds are its passes, by `Term.cost`. The rest are the assumptions of `Cluster` and the formulas
below.

python -m benchmarks scaling    writes docs/scaling.md
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

from benchmarks.worker_process import count_flops
from seqreg.ascent import Ascent
from seqreg.build import build_term, term_names
from seqreg.context import Context, Evaluation
from seqreg.forward import Forward, Pass, PassRequest, PerturbationSite
from seqreg.fused.block_sizes import ROWS
from seqreg.integrations.hf.model import unwrap
from seqreg.settings import held
from seqreg.term import Passes, Term
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import completions
from seqreg.workbench.run.train import prepare

GB = 1e9
Engine = Literal["DDP", "FSDP2"]


@dataclass(frozen=True)
class Cluster:
    """GPUs, and what we assume of them: round numbers, none of them measured.

    Args:
        memory: GB of one
        tflops: bfloat16 operations a second of one, in 10^12
        utilisation: the share of them that a training step reaches
        link: GB a second that a GPU sends to others of its node
        network: GB a second that a GPU sends to other nodes
        node: GPUs of a node
    """

    gpus: int = 8
    memory: float = 80
    tflops: float = 312
    utilisation: float = 0.4
    link: float = 200
    network: float = 25
    node: int = 8

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a ring through all GPUs: that of its slowest part."""
        return GB * (self.link if self.gpus <= self.node else min(self.link, self.network))


@dataclass(frozen=True)
class Workload:
    """A model and the batch of one GPU.

    Args:
        trained: parameters that are trained; the others have no gradient and no optimizer state
        encoder, decoder: layers; a model with one stack has it as decoder
        classes: of the vocabulary; 0 for a classifier
        source, target: tokens of an example; those of the target go through the decoder
        flops: of a plain step, forward and backward
    """

    name: str
    parameters: int
    trained: int
    width: int
    encoder: int
    decoder: int
    classes: int
    batch: int
    source: int
    target: int
    flops: int

    @property
    def layer(self) -> float:
        """Parameters of a layer, about: those of the whole without the embeddings, evenly."""
        return (self.parameters - self.classes * self.width) / max(1, self.encoder + self.decoder)

    def activations(self, checkpointing: bool) -> float:
        """Bytes that a forward pass keeps for its backward: 34 a value of a layer's input, 47 with cross attention.

        That is a layer in bfloat16 with dropout, whose attention keeps no matrix of scores. With checkpointing the
        input of every layer, and all of one.
        """
        inside = {"encoder": 34 * self.source, "decoder": (47 if self.encoder else 34) * self.target}
        layers = {"encoder": self.encoder, "decoder": self.decoder}
        tokens = {"encoder": self.source, "decoder": self.target}
        rows = self.batch * self.width
        if not checkpointing:
            return float(rows * sum(layers[stack] * size for stack, size in inside.items()))
        return float(rows * (sum(2 * layers[stack] * size for stack, size in tokens.items()) + max(inside.values())))


@dataclass(frozen=True)
class Estimate:
    """Bytes a GPU and seconds a step; nothing of it is measured."""

    term: str
    engine: Engine
    checkpointing: bool
    states: float
    kept_weights: float
    activations: float
    head: float
    compute: float
    communication: float

    @property
    def memory(self) -> float:
        return self.states + self.kept_weights + self.activations + self.head

    @property
    def seconds(self) -> float:
        """Where communication is hidden behind computation as far as it can be."""
        return max(self.compute, self.communication)


def workload(name: str, model: Any, batch: int, source: int, target: int) -> Workload:
    """The numbers of a transformers model; its operations are counted on a copy without numbers."""
    model = unwrap(model)
    config = model.config
    seq2seq = bool(getattr(config, "is_encoder_decoder", False))
    layers = config.num_hidden_layers
    decoder = getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None) or layers
    sizes = [parameter.numel() for parameter in model.parameters()]
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    generates = model.get_output_embeddings() is not None
    shape = Workload(
        name, sum(sizes), sum(trained), config.hidden_size, layers if seq2seq else 0, decoder if seq2seq else layers,
        config.vocab_size if generates else 0, batch, source if seq2seq else 0, target, 0,
    )  # fmt: skip
    return replace(shape, flops=_flops(type(model), config, shape))


def _flops(kind: Any, config: Any, shape: Workload) -> int:
    """Operations of one forward and backward, counted; masks, dropout and layerdrop must not look at numbers."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = kind(config).eval()
        ids = torch.zeros(shape.batch, shape.source or shape.target, dtype=torch.long)
        labels = torch.zeros(shape.batch, shape.target, dtype=torch.long) if shape.classes else torch.zeros(shape.batch)

    def step() -> None:
        output = model(input_ids=ids, **({"decoder_input_ids": labels} if shape.source and shape.classes else {}))
        output.logits.float().sum().backward()

    return count_flops(step)


def estimate(shape: Workload, cluster: Cluster, term: Term | None, engine: Engine, checkpointing: bool) -> Estimate:
    """What a step takes with a term, or without one."""
    forwards, backwards = (0, 0) if term is None else (term.cost.forwards, term.cost.backwards)
    shards = cluster.gpus if engine == "FSDP2" else 1
    states = (4 * shape.parameters + 12 * shape.trained) / shards  # float32 weights; gradient and two moments of Adam
    gathered = 4 * shape.layer if engine == "FSDP2" else 2 * shape.layer  # bfloat16; FSDP2 gathers one ahead
    asked = Passes() if term is None else _declared(term)
    keeps = asked.other_weights and shape.trained == shape.parameters  # else adapters are left out
    kept = 4 * shape.parameters / shards if keeps else 0.0
    graphs = 1 + _graphs(term, forwards, backwards)
    head = (4.0 + 2.0) * shape.classes * shape.width + 4.0 * ROWS * shape.classes  # gradient, weight, logits
    compared = shape.batch * shape.target * shape.classes * 4.0
    if term is not None and term.name == "uegr":  # which compares all outputs at once, from logits
        head = 5 * graphs * compared
    recomputed = (1 + backwards) / 3 if checkpointing else 0.0
    cost = (3 + forwards + 2 * backwards) / 3 + recomputed
    stacked = bool(asked.extra) and all(extra.batchable for extra in asked.extra)
    return Estimate(
        "base" if term is None else term.name, engine, checkpointing, states + gathered, kept,
        graphs * shape.activations(checkpointing), head,
        cost * shape.flops / (cluster.tflops * 1e12 * cluster.utilisation),
        _communicated(shape, cluster, engine, 0 if stacked else forwards, 0 if stacked else backwards, checkpointing)
        / cluster.bandwidth,
    )  # fmt: skip


class _NoModel(Forward):
    """Has the sites of an encoder-decoder, and makes no pass."""

    def __init__(self) -> None:
        self.module, self.sites = torch.nn.Module(), {"encoder": PerturbationSite(), "decoder": PerturbationSite()}

    def run(self, request: PassRequest) -> Pass:
        raise NotImplementedError


def _declared(term: Term) -> Passes:
    """What a term asks of a batch; declaring passes makes none."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    return term.declare(Evaluation(Context(_NoModel(), None, kind="tokens", mask=mask, step=0)))


def _graphs(term: Term | None, forwards: int, backwards: int) -> int:
    """Further forward passes that wait for their backward at the same time; those of an ascent wait one by one."""
    attacks = [one for one in ([] if term is None else held(term)) if isinstance(one, Ascent)]
    return max(min(backwards, forwards - sum(one.steps for one in attacks)), min(1, backwards))


def _communicated(
    shape: Workload, cluster: Cluster, engine: Engine, forwards: int, backwards: int, checkpointing: bool
) -> float:
    """Bytes that a GPU sends in a step: all weights in bfloat16 for every pass, and one gradient in float32.

    Under FSDP2 a forward pass gathers the weights, and its backward does so again; a pass that is stacked on the clean
    one shares both. Recomputation needs them when the backward has them. DDP reduces the gradient alone.
    """
    share = (cluster.gpus - 1) / cluster.gpus
    if engine == "DDP":
        return 2 * share * 4 * shape.trained
    return share * (2 * shape.parameters * (2 + forwards + backwards) + 4 * shape.trained)


def best(shape: Workload, cluster: Cluster, term: Term | None) -> Estimate:
    """The first that fits of DDP, FSDP2, and both with checkpointing; else the smallest."""
    ways: list[tuple[Engine, bool]] = [("DDP", False), ("FSDP2", False), ("DDP", True), ("FSDP2", True)]
    estimates = [estimate(shape, cluster, term, *way) for way in ways]
    fitting = [each for each in estimates if each.memory <= cluster.memory * GB]
    return min(fitting, key=lambda each: each.seconds) if fitting else min(estimates, key=lambda each: each.memory)


def table(shape: Workload, cluster: Cluster, terms: Sequence[Term | None]) -> list[dict[str, Any]]:
    """A row for every term, as the page and `seqreg check` show it."""
    return [_row(best(shape, cluster, term), cluster) for term in terms]


def _row(found: Estimate, cluster: Cluster) -> dict[str, Any]:
    fits = found.memory <= cluster.memory * GB
    return {**asdict(found), "memory": found.memory, "seconds": found.seconds, "fits": fits}


HEADINGS = ("term", "engine", "states", "kept weights", "activations", "head", "GB a GPU", "compute", "sent", "step")


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.005 else f"{1000 * seconds:.1f} ms"


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, by `HEADINGS`."""
    engine = row["engine"] + (" + checkpointing" if row["checkpointing"] else "")
    sizes = [f"{row[key] / GB:.1f}" for key in ("states", "kept_weights", "activations", "head")]
    total = f"{row['memory'] / GB:.1f}" + ("" if row["fits"] else " (does not fit)")
    times = [_time(row[key]) for key in ("compute", "communication", "seconds")]
    return [row["term"], engine, *sizes, total, *times]


PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
HEAD = """# What a step would take on many GPUs

<!-- Written by `python -m benchmarks scaling`; a test fails where it is not what that computes. -->

**Estimates: no GPU was used for any number here.** `python -m benchmarks scaling RECIPE --gpus 8` prints this table for
a recipe. Operations of a plain step (forward and backward) are counted by torch on its meta device; a term adds its
passes (`Term.cost`, counted in tests), a forward at a third of a plain step, a backward at two thirds.

| assumed | value |
|---|---|
"""
ASSUMED = {
    "states": "float32 weights, gradients and two moments of Adam: 16 bytes a trained parameter, sharded under FSDP2; "
    "two layers gathered in bfloat16",
    "kept weights": "a float32 copy for terms with other weights (`anchor`, `bregman`), sharded as the weights are; "
    "none beside adapters",
    "activations": "34 bytes a layer, token and unit of width, 47 where it has cross attention, in bfloat16 without "
    "matrices of scores; with checkpointing 2, and one layer whole; once for every pass that waits for its backward",
    "head": f"the fused one: its weight in bfloat16, its gradient in float32, {ROWS:,} rows of float32 logits; five "
    "copies of all logits for `uegr`, which is not fused",
    "sent": "under FSDP2 the weights in bfloat16 for every forward and every backward, and one gradient in float32; "
    "passes that are stacked on the clean one share it; under DDP the gradient",
    "step": "the longer of computing and sending: one hides behind the other",
    "engine": "the fastest of DDP and FSDP2, with and without checkpointing, that fits",
}
TAIL = """
Stacking the further pass on the clean one (R3F, R-Drop) holds no more than two passes one after the other, for both
wait for the same backward (`tests/benchmarks/test_scaling.py` measures it); under FSDP2 it sends a third less. So there
is no switch to choose: `criterion(ctx, batched=False)` saves nothing.
"""


def render() -> str:
    """The page."""
    terms: list[Term | None] = [None, *(build_term(name) for name in sorted(term_names()))]
    plain = Cluster()
    gpu = (
        f"{plain.memory:g} GB, {plain.tflops:g} TFLOP/s in bfloat16, {plain.utilisation:.0%} of it used; "
        f"{plain.link:g} GB/s inside a node of {plain.node}, {plain.network:g} GB/s a GPU between nodes"
    )
    parts = [HEAD + "".join(f"| {name} | {text} |\n" for name, text in {"GPU": gpu, **ASSUMED}.items()) + TAIL]
    for shape in shapes():
        for gpus in (8, 64):
            cluster = Cluster(gpus=gpus)
            texts = (
                f"{shape.source:,} source and {shape.target:,} target tokens"
                if shape.source
                else f"{shape.target:,} tokens"
            )
            parts.append(
                f"## {shape.name}, {gpus} GPUs\n\n"
                f"{shape.parameters / 1e9:.2f} billion parameters, {shape.classes:,} classes; "
                f"{shape.batch} examples of {texts} a GPU; {shape.flops / 1e12:.1f} TFLOP a plain step.\n\n"
                f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}\n"
                + "".join(f"| {' | '.join(cells(row))} |\n" for row in table(shape, cluster, terms))
            )
    return "\n".join(parts)


def shapes() -> list[Workload]:
    """The models of the page, on the meta device."""
    small = LlamaConfig(num_hidden_layers=32, hidden_size=4096, intermediate_size=11008, vocab_size=32000)
    large = LlamaConfig(
        num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        bart, seven, seventy = (
            BartForConditionalGeneration(BartConfig()),
            LlamaForCausalLM(small),
            LlamaForCausalLM(large),
        )
    return [
        workload("BART-large", bart, 8, 1024, 128),
        workload("a Llama of 7B", seven, 1, 0, 4096),
        workload("a Llama of 70B", seventy, 1, 0, 4096),
    ]


def of_recipe(run: Run, cluster: Cluster) -> dict[str, Any]:
    """Estimates for a recipe, without a term and with each of its terms, for texts of the greatest lengths."""
    config, model = run.config, prepare(run).model
    data, batch = config.data, config.optimisation.per_device_train_batch_size
    generates, causal = run.card.kind == "generation", completions.is_causal(model)
    source, target = data.max_source_length, data.max_target_length
    target = source + target if causal else target if generates else source
    shape = workload(type(unwrap(model)).__name__, model, batch, source, target)
    terms = [None, *config.criterion().terms]
    return {"cluster": asdict(cluster), "workload": asdict(shape), "terms": table(shape, cluster, terms)}
