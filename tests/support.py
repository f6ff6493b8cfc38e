"""What is exact where: the table that `docs/support.md` prints, and that tests hold to be true, cell by cell.

python -m tests.support    writes the page
"""

from __future__ import annotations

from pathlib import Path

from seqreg.build import term_names

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
STATUS = {"F": "exact and fused", "E": "exact", "R": "refused", "-": "not tested"}
ENGINES, CONDITIONS, MATRIX = (
    "tests/integrations/test_engines.py::test_exact_or_refused",
    "tests/integrations/test_support.py::test_condition",
    "tests/engines/test_matrix.py::test_exact_or_refused",
)
COLUMNS = {
    "DDP": (ENGINES, "two ranks with unequal numbers of labels, against one process"),
    "FSDP2": (ENGINES, "`fully_shard` on every layer and the model, as above"),
    "FSDP2, bf16 policy": (
        MATRIX,
        "as above with `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`, against bf16 weights",
    ),
    "FSDP1": (MATRIX, "`FullyShardedDataParallel(use_orig_params=True)`, as above"),
    "ZeRO-1": (
        MATRIX,
        "DeepSpeed 0.19.8 itself, stage 1, two ranks, as DDP; more in `tests/engines/test_deepspeed.py`",
    ),
    "ZeRO-2": (MATRIX, "stage 2, as above"),
    "ZeRO-2, bf16": (MATRIX, "stage 2 with `bf16: {enabled: true}`, against bf16 weights"),
    "ZeRO-3": (MATRIX, "stage 3, no parameter kept whole, as above"),
    "TP": (
        "tests/engines/test_tensor_parallel.py::test_exact_or_refused",
        "`from_pretrained(..., tp_plan='auto')`, the same batch on two ranks, without dropout, against one process",
    ),
    "compile": (
        CONDITIONS,
        "`model.compile(backend='eager')`, against the same without; more in `tests/integrations/test_compile.py`",
    ),
    "LoRA": (CONDITIONS, "against the merged model, by the chain rule; Bregman against the loss from all logits"),
    "DoRA": (CONDITIONS, "against the loss from all logits; against PEFT's own: `tests/integrations/test_peft.py`"),
    "IA3": (CONDITIONS, "as DoRA"),
    "prefix": (CONDITIONS, "prefix tuning, against the loss from all logits"),
    "LoRA on embeddings": (CONDITIONS, "as DoRA"),
    "LoRA on head": (
        CONDITIONS,
        "as DoRA, with dropout; against PEFT's own: `tests/integrations/test_peft.py`",
    ),
    "modules_to_save": (CONDITIONS, "as DoRA, with a language-model head that is trained whole"),
    "checkpointing": (CONDITIONS, "non-reentrant gradient checkpointing, against the same without"),
    "bf16 autocast": (CONDITIONS, "against the loss from all logits, to bf16's rounding"),
    "bf16 weights": (CONDITIONS, "as above"),
    "packing": (
        CONDITIONS,
        "documents in one row, against a row each; without dropout or random noise",
    ),
    "accumulation": (
        CONDITIONS,
        "a batch in two pieces, against all of it; as above, with absolute sizes",
    ),
}
TABLE = """
base     F F F E F F F E E F F F F F F F F F F F F F
r3f      F F F E F F F E E F F F F F F F F F F F F F
smart    F F R E F F R E E F F F F F F F F F F R F F
bregman  F F F R F F F R R F F F F F F F F F F F F F
anchor   F F F R F F F R R F F F F F F F F F F F F F
sift     F F R E F F R E E F F F F F F F F F F F F F
alum     F F R E F F R E E F F F F F F F F F F R F F
vat      F F R E F F R E E F F F F F F F F F F R R F
freelb   F F R E F F R E E F F F F F F F F F F R R F
rdrop    F F F E F F F E E F F F F F F F F F F F F F
neftune  F F F E F F F E E F F F F F F F F F F F F F
jachess  F F R E F F R R R F F F F F F F F F F R F F
uegr     E E R E E E R E R E E E E E E E E R E R R E
r4f      E E E E E E E E R E E E E R E R E E E E R E
"""
"""A letter a column, in their order; see `STATUS`."""


def expected(term: str, column: str) -> str:
    """What holds of a term: a value of `STATUS`."""
    rows = {name: letters for name, *letters in (line.split() for line in TABLE.strip().splitlines())}
    return STATUS[rows[term][list(COLUMNS).index(column)]] if term in rows else STATUS["-"]


def terms() -> list[str]:
    """The rows: the loss without a term, every term, and R4F, which is R3F with a normalised classification head."""
    known = [line.split()[0] for line in TABLE.strip().splitlines()]
    return [*known, *(name for name in sorted(term_names()) if name not in known)]


HEAD = """# What is exact where

<!-- Written by `python -m tests.support`; a test fails where it is not what the tests say. -->

*Exact*: loss and whole gradient are those of the reference that the column names, to rounding. *Fused*: the head and
its loss are computed in chunks of tokens, and no logits of all tokens are held. *Refused*: a `BadInput` of one line
that names the term, the engine or setting, and what to use; nothing is computed. All of it runs on CPUs, with gloo
between ranks; no GPU was used.
"""
NOTES = """
R4F is R3F on a classifier, which has no vocabulary to fuse: RoBERTa, against the plain model whose head has the
normalised weights, by the chain rule (`tests/integrations/test_support.py::test_r4f_condition`). UEGR compares
several outputs at once, from all logits.
In bf16 terms with an ascent are refused at their default `scale`, which bf16 cannot resolve: make it larger, or train
in float32 under autocast. JacHess measures its start in the first optimizer step, over all micro-batches and ranks. A
size that is relative to the RMS of embeddings (`relative`) is that of the micro-batch; the column *accumulation* is
with `relative=False`, and JacHess with `epsilon=1e-4`.

A head with a LoRA adapter is fused as one wider head, [W, B], of wider states, [x, s A x]: nothing is merged, and its
dropout stays. With DoRA, several active adapters or a bias in the adapter, under FSDP2 and compiled, its logits are
held.

Under FSDP2 `count=count(model, batches)` is required, as under DDP. The head is gathered once a step and its gradient
reduce-scattered once, however many passes a term makes (`tests/integrations/test_engines.py`); alone in its FSDP
group it is gathered once more for the backward of each further pass. Held meanwhile, a rank: the whole head, its
whole gradient in float32 (FSDP2 holds it with a plain head too, in the parameters' dtype), and a buffer of 1,024 rows
of logits. The average of Bregman is kept as shards; `Criterion.state_dict()` has them as DTensors for
`torch.distributed.checkpoint`, and what was saved whole is sharded when it is loaded. HSDP, a mesh of copies by
shards, is exact too (two by two ranks, `tests/engines/test_matrix.py`). Layerdrop, different `mp_policy.param_dtype` in
one model, meshes with tensor or pipeline parallelism, selective updates, `set_gradient_divide_factor`, and what learns
and no `fully_shard` holds (call it on the layers, and then on the model too) are refused. Between `backward` and the
optimizer's step evaluate by the criterion, `criterion(context(model, batch))`, or not at all: FSDP2 leaves weights
whole after a pass of your own without a backward, and the step does not reach them.
`python -m benchmarks engine fsdp2` measures the fused head against a plain one.

FSDP2 that others set up: a loop under `accelerate launch` with `fsdp_version: 2`, and a Trainer with `fsdp=True` and
`fsdp_config` of version 2, make the steps of one process and of DDP, and such a Trainer resumes to the same bits
(`tests/engines/test_fsdp2_launchers.py`, where Accelerate is told that ranks of gloo are GPUs: on CPUs it gives DDP).
What a Trainer with `fsdp=` gets besides FSDP2 is refused. Accelerate 1.15 itself fails on models whose stacks share one
embedding (BART): "Parameter 'model.shared.weight' is shared with a parameter already managed by another FSDP group".
Use `shard(model)` of `seqreg.integrations.hf` for those.

DeepSpeed: give `context`, `count` and `optimizer_steps` the engine that `deepspeed.initialize` or `accelerator.prepare`
made, and call `engine.backward(report.total)` and `engine.step()`, or `accelerator.backward(report.total)`. An engine
that is called reduces gradients whenever a gradient passes its outputs, also that of a perturbation; so passes are made
on the model inside it, and the engine is told of the loss. Stages 0 to 2 keep the head fused; under stage 3 logits are
held, and terms that make a pass with other weights are refused. Equal to one process, to rounding, under all stages:
accumulation with a last step of fewer micro-batches, clipping, optimizer and parameters offloaded to the CPU,
Accelerate. A Trainer with `deepspeed=` and `attach` makes the steps of DDP, and resumes to the same bits. DeepSpeed's
checkpoints resume on one and four ranks after `python -m deepspeed.checkpoint.ds_to_universal`: save them with
`client_state={"criterion": criterion.state_dict(), "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}`
and load them with `{"checkpoint": {"load_universal": true}}` (`tests/engines/test_deepspeed.py`). DeepSpeed names a
checkpoint the latest before all ranks have written it: where ranks may be killed, save with `save_latest=False`, and
write its `latest` when `save_checkpoint` has returned (`tests/helpers/zero_run.py`, killed by `tests/faults.py`).
DeepSpeed clips gradients to a norm of 1 where its configuration has no `gradient_clipping`. Texts without
labels and replayed examples are exact in a loop, where a micro-batch has one backward. Refused: layerdrop, in a Trainer
selective updates, further streams (`unlabelled_dataset=`, `replay_dataset=`) and R4F heads, `loss_context`, and
pipeline, tensor and sequence parallelism of DeepSpeed.

Tensor parallelism: every rank is given the same batch, `count=count(model, batches)`, and the generators of the first
rank at every loss, so that all draw the same noise. Logits are held. Dropout inside a layer that is cut (attention) is
that of transformers: each rank draws masks for its heads, which are not those of one process. Refused: terms that make
a pass with other weights, UEGR, whose dropout is never 0, JacHess, whose finite differences enlarge the rounding of
the cut sums (3e-4 of the gradient), R4F heads, Trainers, and tensor parallelism beside data parallelism.

DeepSpeed without a GPU: Accelerate counts one process under `accelerate launch`, also with `use_cpu: true`, and
DeepSpeed stops: "Check batch related parameters. train_batch_size is not equal to ...". Call
`accelerate.PartialState(cpu=True)` before `Accelerator()`; `Accelerator(cpu=True)` gives DDP instead, without a word. A
Trainer needs `use_cpu=True`; without it every rank would read the same examples, which is refused.

Trainers: `shard(model)` of `seqreg.integrations.hf` before a `RegularizedTrainer` is made, or `attach` is called, and
`engine.name=fsdp2` in a recipe ([several processes](recipes.md#several-processes-and-nodes)), give the gradient of one
process (`tests/integrations/test_distributed.py::test_gradient_under_fsdp2`: seq2seq, causal and classification; with
`param_dtype` bf16 that of a loop in bf16), resume exactly and save a plain model
(`tests/nightly/test_torchrun.py`). Adafactor, R4F heads, selective updates, averages of weights and
adapters are refused there, and `cpu_offload` where there is no GPU; on GPUs it was not run.

Compiled models under DDP and FSDP2 are exact and fused (`tests/integrations/test_engines.py`). A compiled model is
compiled once: hooks on its embeddings and its stopped head are part of the graph, and later steps
compile nothing (`tests/integrations/test_compile.py`). A graph ends at the embedding where a perturbation looks at the
embeddings (R3F, NEFTune and others with a random start), and where two stacks share one lookup; those of transformers
itself, as BART's masks, stay. A compiled model that shifts or scales its logits (BART's bias) has them computed: exact,
and not fused; `LossReport.paths` tells. Inductor draws dropout masks of its own
(`torch._inductor.config.fallback_random` has torch's), which passes that share their dropout share too.
"""


def render() -> str:
    lines = [HEAD, f"| | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]
    for term in terms():
        lines.append(f"| {term} | {' | '.join(expected(term, column) for column in COLUMNS)} |")
    lines += ["", "| column | what it is | test |", "|---|---|---|"]
    lines += [f"| {name} | {meaning} | `{test}` |" for name, (test, meaning) in COLUMNS.items()]
    return "\n".join(lines) + "\n" + NOTES


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"{PAGE} written")
