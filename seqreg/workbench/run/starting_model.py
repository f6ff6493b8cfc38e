"""The model that a run started from: recognised by its weights, rebuilt, and how far a trained one is from it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from seqreg.errors import BadInput
from seqreg.spectral_norm import fold
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.config.settings import Config
from seqreg.workbench.data import loading, models
from seqreg.workbench.data.encoding import Encoded
from seqreg.workbench.data.examples import Example
from seqreg.workbench.run.rng import preserve_rng_state
from seqreg.workbench.scores import drift
from seqreg.workbench.text.progress import Bar, Bars
from seqreg.workbench.text.terminal import warn

LEFT_OUT = "left_out"
"""The key of the reason why there is no drift."""


def digest(model: nn.Module) -> str:
    """SHA-256 of the names, shapes and values of all parameters."""
    sha = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = parameter.detach().cpu().contiguous().flatten()
        sha.update(f"{name} {list(parameter.shape)} {parameter.dtype}\n".encode())
        sha.update(values.view(torch.uint8).numpy().data)
    return sha.hexdigest()


def rebuild(run: Run, tokenizer: Any, recorded: str) -> Any:
    """The model that a run started from, with a normalised head (R4F) folded; refuses any other.

    Loaded by `model.name`, or drawn again from `seed` where the model, or its head, is not pretrained.

    Args:
        run: as it was started, not as it is evaluated
        recorded: the digest in run.json
    """
    config = run.config
    if not recorded:
        raise BadInput(
            "run.json does not say which weights the run started from: an earlier version of seqreg began it"
        )
    with preserve_rng_state():
        transformers.set_seed(config.seed)
        model = models.load_model(config, run.card, tokenizer, trust=run.trust)
    if digest(model) != recorded:
        where = f"model.name={config.model.name}" if config.model.name else f"{config.model.architecture} from scratch"
        raise BadInput(f"{where}: these are not the weights that the run started from")
    return fold(model)


def knows_tasks(run: Run, model: Any) -> bool:
    """Whether a model can be scored before training: it is pretrained, and its head is not new."""
    return run.config.model.name is not None and not models.drawn_anew(model)


def measured(
    trained: Any, start: Callable[[], Any], config: Config, tokenizer: Any, examples: Sequence[Example] | None,
    collate: Any, bars: Bars,
) -> dict[str, Any]:  # fmt: skip
    """The section `drift` of metrics.json: its numbers, or why they are left out; nothing where they are not wanted.

    Args:
        start: gives the starting model, or refuses to
        examples: the validation set, if there is one
        collate: makes a batch of encoded examples
    """
    most, size = config.evaluation.drift_examples, config.evaluation.per_device_eval_batch_size
    if not most or not examples:
        return {}
    begin, chosen = time.perf_counter(), loading.sample(examples, most)
    try:
        model = start().to(trained.device)
    except BadInput as error:
        warn(f"drift from the starting model is not measured: {error}")
        return {LEFT_OUT: str(error)}
    encoded = Encoded(chosen, tokenizer, config)
    bars.progress.start()
    bar = Bar(bars.progress, "drift", -(-len(chosen) // size), "batch")

    def batches() -> Iterator[dict[str, Any]]:
        for number, first in enumerate(range(0, len(chosen), size)):
            indices = range(first, min(first + size, len(chosen)))
            yield dict(collate([encoded[index] for index in indices]).to(trained.device))
            bar.at(number + 1)

    try:
        numbers = drift.measure(trained, model, batches(), examples=len(chosen), new=models.drawn_anew(model))
    finally:
        bar.end()
        bars.progress.stop()
    return {**numbers, "seconds": time.perf_counter() - begin}
