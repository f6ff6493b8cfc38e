"""Checks before anything is written: disk space, precision, and one loss on two short examples."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from seqreg.errors import Advice, BadInput, DiskError
from seqreg.integrations.hf import context
from seqreg.integrations.hf.model import unwrap
from seqreg.terms.anchor import Anchor
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import completions
from seqreg.workbench.data.encoding import Encoded, collator
from seqreg.workbench.data.examples import Example
from seqreg.workbench.run import checkpoints, starting_model
from seqreg.workbench.run.nonfinite import not_finite
from seqreg.workbench.text.atomic_files import free_bytes

TOKENS = 32
"""Of a text: enough to see that it works."""
OPTIMIZER_STATE = {"adamw": 2.0, "adafactor": 0.1}
"""Size of an optimizer's state, in copies of the weights."""


def check_disk_space(run: Run, model: Any, folder: Path) -> int:
    """Refuse a run that cannot be saved: all checkpoints that stay, one more that is written, and the model.

    Returns the approximate bytes of one checkpoint.
    """
    config = run.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    averages = sum(term.stateful for term in run.criterion.terms) + (config.optimisation.ema_decay is not None)
    update = config.update()
    stored = weights if config.model.lora is None else sum(p.nbytes for p in model.parameters() if p.requires_grad)
    size = int(stored * (1 + OPTIMIZER_STATE[config.optimisation.optim] + averages))
    size += 0 if update is None else update.state_bytes * sum(p.numel() for p in model.parameters())
    saves = config.checkpoints.save_steps or config.checkpoints.save_minutes
    count = config.checkpoints.save_total_limit + 1 + config.evaluation.load_best_model_at_end if saves else 0
    existing = len(list(folder.glob(f"{checkpoints.PREFIX}*"))) if folder.is_dir() else 0
    needed, free = size * max(count - existing, 1 if saves else 0) + weights, free_bytes(folder)
    if free < needed:
        raise DiskError(
            f"{folder}: {free:,} bytes free, about {needed:,} needed ({count} checkpoints of {size:,}, and the model): "
            "free some space, or set checkpoints.save_total_limit or another output"
        )
    return size


def check_loss(run: Run, model: Any, tokenizer: Any, examples: Sequence[Example]) -> None:
    """Compute the loss once; generators, weights, the mode of the model and the memory of terms stay as they are.

    A term that cannot mean anything on this model is told.
    """
    config = run.config
    short = config.data.updated(
        max_source_length=min(TOKENS, config.data.max_source_length),
        max_target_length=min(TOKENS, config.data.max_target_length),
    )
    prompt = completions.prompt_of(run, model)
    encoded = Encoded(examples[:2], tokenizer, config.updated(data=short), prompt, quiet=True)
    rows = [encoded[index] for index in range(len(encoded))]
    joins = config.data.joins_examples
    collate = completions.PaddingFreeCollator() if joins else collator(tokenizer, run.card.kind, prompt)
    training, bf16 = model.training, config.optimisation.precision == "bf16"
    try:
        batch = collate(rows)
        ctx = context(model.train(), {**batch}, step=0)
        texts = any(term.on != "labelled" for term in run.criterion.terms)  # the same ones, as if without labels
        further = [context(model, {**batch}, step=0, stream="unlabelled")] if texts else []
        if config.engine.name == "fsdp2":
            ctx.forward.engine = "FSDP2"  # which refuses what begins at a layer
        with (
            warnings.catch_warnings(),
            contextlib.ExitStack() as stack,
            _cast(model, config.engine.param_dtype),
            torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16),
        ):
            warnings.simplefilter("ignore", Advice)  # given at the first step, on complete examples
            observed = [stack.enter_context(one.observed()) for one in (ctx, *further)]
            bad = not_finite(copy.deepcopy(run.criterion)(*observed))
        if joins:
            _check_isolation(model, rows, "packing" if config.data.packing else "padding_free")
        if bad:
            raise BadInput(
                f"the loss of the first {len(encoded)} training examples is not finite ({', '.join(bad)}): look at "
                "model.settings, and at the settings of the terms"
            )
    except BadInput:
        raise
    except Exception as error:  # of whatever the settings broke inside the model
        shown = f"model.settings={config.model.settings}: " if config.model.settings else ""
        what = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise BadInput(f"{shown}{type(model).__name__} cannot compute a loss: {what[:200]}") from error
    finally:
        model.train(training)
    _advise_on_anchor(run, model)


@contextlib.contextmanager
def _cast(model: Any, param_dtype: str) -> Iterator[None]:
    """Inside, the weights are as FSDP2 casts them for every pass."""
    weights = {parameter: parameter.data for parameter in model.parameters()} if param_dtype == "bf16" else {}
    try:
        for parameter in weights:
            parameter.data = parameter.data.bfloat16()
        yield
    finally:
        for parameter, data in weights.items():
            parameter.data = data


@torch.no_grad()
def _check_isolation(model: Any, rows: Sequence[Mapping[str, Any]], setting: str) -> None:
    """Refuse a model in which an example sees the one before it in its row."""
    model.eval()
    last = len(rows[-1]["input_ids"])
    joined, alone = (
        context(model, {**completions.PaddingFreeCollator()(some)}).forward(dropout="off", grad=False).logits[0]
        for some in (rows, rows[-1:])
    )
    scale = (alone - alone.mean(-1, keepdim=True)).norm().clamp_min(1e-30)
    difference = float((joined[1 - last :] - alone).norm() / scale)
    if not difference < 1e-3:
        raise BadInput(
            f"data.{setting}: logits of an example change by {difference:.1%} with another one before it in its row: "
            f"{type(unwrap(model)).__name__} does not keep them apart: leave it out"
        )


def _advise_on_anchor(run: Run, model: Any) -> None:
    """Tell that outputs are held near those of weights that were drawn at random."""
    if starting_model.knows_tasks(run, model):
        return
    what, remedy = "the model is trained from scratch", "leave the term out"
    if run.config.model.name is not None:
        what, remedy = "the head of this model is new", "terms.anchor.divergence=l2 holds the weights below it instead"
    for term in run.criterion.terms:
        if isinstance(term, Anchor) and term.reference == "start" and term.divergence != "l2":
            text = f"{what}, so that the output which divergence={term.divergence} stays near is a random one"
            warnings.warn(f"{term.name}: {text}: {remedy}", Advice, stacklevel=2)
