"""The model that a run started from: recognised by its weights, rebuilt, and how far a trained one is from it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import TrainerCallback

from seqreg.engines.shards import full
from seqreg.errors import BadInput
from seqreg.spectral_norm import fold
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import adapters, loading, models
from seqreg.workbench.data.examples import Example
from seqreg.workbench.run.rng import preserve_rng_state
from seqreg.workbench.scores import drift
from seqreg.workbench.scores.results import drift_numbers
from seqreg.workbench.text.progress import Bar
from seqreg.workbench.text.terminal import warn


def digest(model: nn.Module) -> str:
    """SHA-256 of the names, shapes and values of all parameters, without those of adapters."""
    sha = hashlib.sha256()
    for name, parameter in sorted(adapters.plain_parameters(model).items()):
        values = full(parameter.detach()).cpu().contiguous().flatten()
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


class DriftMonitor(TrainerCallback):
    """Callback: the drift of a trainer's model from the starting one, while it trains and when it has ended.

    Args:
        start: gives the starting model, or refuses to; it is kept once it was given
        examples: the validation set, if there is one
    """

    def __init__(self, trainer: Any, tokenizer: Any, examples: Sequence[Example] | None, start: Callable[[], Any]):
        self.trainer, self.config, self.tokenizer = trainer, trainer.options.config, tokenizer
        self.examples = loading.sample(examples, self.config.evaluation.drift_examples) if examples else []
        self.start, self.left_out = functools.cache(start), ""
        self.states: dict[str, Tensor] = {}
        """Mean encoder states by model, [examples, D] each."""

    @property
    def measures(self) -> bool:
        """Whether this process has to take part: the first one, and all where each holds a shard."""
        return bool(self.trainer.is_world_process_zero() or self.trainer.sharded)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steps = self.config.logging.drift_steps
        if steps and state.global_step % steps == 0 and self.measures and not self.left_out:
            numbers = drift_numbers({"drift": self.section()})
            self.trainer._diagnostics |= {f"drift/{key}": value for key, value in numbers.items()}

    def section(self) -> dict[str, Any]:
        """The section `drift` of metrics.json: numbers, or why they are left out; empty where they are not wanted."""
        if not self.config.evaluation.drift_examples or not self.examples:
            return {}
        begin, trained = time.perf_counter(), self.trainer.model
        try:
            model = self.start().to(trained.device)
        except BadInput as error:
            self.left_out = str(error)
            warn(f"drift from the starting model is not measured: {error}")
            return {"left_out": self.left_out}
        new = models.drawn_anew(model)
        with self._batches(trained.device, "drift") as batches:
            numbers = drift.measure(trained, model, batches, examples=len(self.examples), new=new)
        return {**numbers, "seconds": time.perf_counter() - begin}

    def keep_states(self) -> None:
        """Compute the mean encoder states of the examples for TensorBoard, where that is wanted and possible."""
        if not self.config.logging.projector or not self.examples or self.left_out:
            return
        for name, model in (("start", self.start()), ("trained", self.trainer.model)):
            with self._batches(self.trainer.model.device, f"states, {name}") as batches:
                self.states[name] = drift.mean_states(model, batches)

    @contextlib.contextmanager
    def _batches(self, device: Any, title: str) -> Iterator[Iterator[dict[str, Any]]]:
        """The batches of the examples, with a bar on how many are done."""
        bars, size = self.trainer.options.bars, self.config.evaluation.per_device_eval_batch_size
        encoded, starts = self.trainer.eval_dataset.others(self.examples), range(0, len(self.examples), size)
        bars.progress.start()
        bar = Bar(bars.progress, title, len(starts), "batch")

        def batches() -> Iterator[dict[str, Any]]:
            for first in starts:
                rows = [encoded[index] for index in range(first, min(first + size, len(encoded)))]
                yield dict(self.trainer.data_collator(rows).to(device))
                bar.at(bar.done + 1)

        try:
            yield batches()
        finally:
            bar.end()
            if bars.training is None:
                bars.progress.stop()
            else:  # whose rate is that of its steps
                bars.training.start += time.monotonic() - bar.start
