"""The model of a finished run, with its task: what every study examines."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seqreg.errors import BadInput, nearest
from seqreg.forward import Perturbation
from seqreg.integrations.embedding_hook import EmbeddingTap
from seqreg.integrations.hf import context
from seqreg.integrations.hf import model as hf
from seqreg.losses import IGNORE
from seqreg.metrics import texts as text_metrics
from seqreg.workbench.config import run_config
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import completions, loading, models
from seqreg.workbench.data.encoding import Encoded, collator
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.data.word_limits import word_limits
from seqreg.workbench.run.record import RunRecord
from seqreg.workbench.run.train import LoadedRun, make_trainer, trained
from seqreg.workbench.scores.evaluate import Scored, decode, evaluate

Batch = dict[str, Any]
Delta = Tensor | Callable[[Tensor], Tensor]
"""What is added to the embeddings of the source; a function is given what it is added to."""

NO_NOISE = "a causal model embeds its source and its own text alike: --noise characters, words, order or source"
CHUNK = 256
"""Tokens whose logits are computed together: with 50,000 classes, a hundred megabytes in float64."""


@dataclass(frozen=True)
class Predictions:
    """Some predictions of a batch: logits [n, V], computed on use; labels [n]; indices of examples [n]."""

    compute: Callable[[], Tensor]
    labels: NDArray[np.int64]
    examples: NDArray[np.int64]

    def logits(self) -> NDArray[Any]:
        logits: NDArray[Any] = self.compute().float().cpu().numpy()
        return logits


@dataclass(frozen=True)
class TrainedModel:
    """A trained model in evaluation mode, and its task; data and weights are loaded when they are first used.

    Args:
        folder: of the run, or of any model that is scored on the task of `run`
        run: settings, with the trained model in place of the one that the run started from
        method: what it was trained with
    """

    folder: Path
    run: Run
    method: str = ""

    @classmethod
    def load(
        cls, folder: Path, overrides: Sequence[str] = (), *, trust: bool = False, trust_changes: bool = False
    ) -> TrainedModel:
        """The model of a folder whose run has finished."""
        run = trained(folder, tuple(overrides), trust=trust, trust_changes=trust_changes)
        record = RunRecord.read(folder)
        if record is not None and not record.finished:
            raise BadInput(f"{folder}: its run has not finished: run the same seqreg train again")
        method = run_config.load(folder, overrides, build_terms=False).config.method  # `trained` has no terms
        return cls(folder, run, method)

    @classmethod
    def on_task(cls, name: str, run: Run) -> TrainedModel:
        """The model `name` on the task of a run, with the run's generation settings."""
        return cls(Path(name), replace(run, config=run.config.for_evaluation(name)))

    @cached_property
    def splits(self) -> Splits:
        return loading.load(self.card, self.run.config.data, needs_train=False)

    @cached_property
    def tokenizer(self) -> Any:
        return models.load_tokenizer(self.run.config, trust=self.run.trust)

    @cached_property
    def model(self) -> Any:
        config, trust = self.run.config, self.run.trust
        model = models.load_model(config, self.card, self.tokenizer, trust=trust, trained=True).eval()
        if config.generation.do_sample:
            torch.manual_seed(config.seed)
        return model.to("cuda" if torch.cuda.is_available() else "cpu")

    def unload(self) -> None:
        """Free the weights; the next use loads them again."""
        self.__dict__.pop("model", None)

    @property
    def card(self) -> Card:
        return self.run.card

    @property
    def generates(self) -> bool:
        return self.card.kind == "generation"

    def split(self, name: str | None = None) -> str:
        """The name of a split; by default the one that the task is scored on."""
        if name is None:
            return self.splits.evaluations(self.card)[0]
        if name not in self.splits.sets:
            raise BadInput(f"--split {name}: {self.folder} has no such split; {nearest(name, self.splits.sets)}")
        return name

    @property
    def causal(self) -> bool:
        """Whether it generates, and has a decoder alone."""
        return self.generates and completions.is_causal(self.model)

    def encoded(self, examples: Sequence[Example]) -> Encoded:
        """Examples as token ids, after the prompt of a causal model."""
        return Encoded(examples, self.tokenizer, self.run.config, completions.prompt_of(self.run, self.model))

    @property
    def collate(self) -> Any:
        """What makes a batch of them."""
        prompt = completions.prompt_of(self.run, self.model)
        return collator(self.tokenizer, self.card.kind, prompt)

    def count_batches(self, examples: Sequence[Example]) -> int:
        return -(-len(examples) // self.run.config.evaluation.per_device_eval_batch_size)

    def batches(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Indices of examples of like length and their tensors, with labels; the same whatever the tokenizer."""
        encoded, collate = self.encoded(examples), self.collate
        order = sorted(range(len(encoded)), key=lambda index: -len(examples[index].source))
        size = self.run.config.evaluation.per_device_eval_batch_size
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            yield chosen, dict(collate([encoded[index] for index in chosen]).to(self.model.device))

    def predictions(self, batch: Batch, delta: Delta | None = None) -> list[Predictions]:
        """The predictions of a batch: a class per example, or every token after those of the reference before it.

        What is held of a token is its state before the head, not its logits. Where a model has no plain head, its
        forward pass is repeated when they are used.
        """
        ctx = context(self.model, batch)
        shift = None if delta is None else Perturbation({ctx.sites("input")[0]: delta})
        view, mask = ctx.forward(shift, dropout="off", grad=False), ctx.mask
        labels, examples = ctx.labels[mask].cpu().numpy(), mask.nonzero()[:, 0].cpu().numpy()
        projection = view.deferred
        if ctx.kind != "tokens":
            logits = view.logits[mask]
            return [Predictions(lambda: logits, labels, examples)]
        if projection is None:
            return [Predictions(lambda: ctx.forward(shift, dropout="off", grad=False).logits[mask], labels, examples)]
        states = torch.split(projection.states[mask], CHUNK)
        ends = np.cumsum([len(chunk) for chunk in states])[:-1]
        heads = [replace(projection, states=chunk, requires_grad=False) for chunk in states]
        chunks = zip(heads, np.split(labels, ends), np.split(examples, ends), strict=True)
        return [Predictions(head.logits, *indices) for head, *indices in chunks]

    @torch.no_grad()
    def generate(self, batch: Batch, delta: Delta | None = None) -> Tensor:
        """Generated ids, by the generation settings of the run; of a causal model without the prompt."""
        limits = word_limits(self.run.config.generation, self.model, self.tokenizer)
        if self.causal:
            if delta is not None:
                raise BadInput(f"{self.folder}: {NO_NOISE}")
            return completions.complete(self.model, batch, **limits)
        source = {key: value for key, value in batch.items() if key != "labels"}
        tap: Any = contextlib.nullcontext()
        if delta is not None:
            tap = EmbeddingTap(next(iter(hf.stacks(self.model).values())), delta)
        with tap:
            ids: Tensor = self.model.generate(**source, **limits)
        return ids

    def texts(self, ids: Tensor) -> list[str]:
        return decode(ids.cpu().numpy(), self.tokenizer, self.card)

    @property
    def end(self) -> int:
        """The id of the token that ends a sequence."""
        if self.causal:
            return int(self.tokenizer.eos_token_id)
        return int(hf.special(self.model, "eos_token_id") or 0)

    def with_generated(self, batch: Batch, ids: Tensor) -> Batch:
        """The batch with generated ids as its labels: up to and with the first end."""
        if self.causal:
            return dict(completions.completed(batch, ids, self.model, self.tokenizer))
        return {**batch, "labels": self._as_labels(ids)}

    def _as_labels(self, ids: Tensor) -> Tensor:
        labels = ids[:, 1:].clone()
        ends = (labels == self.end).long()
        return labels.masked_fill(ends.cumsum(1) > ends, IGNORE)

    def likeness(self, texts: Sequence[str], references: Sequence[Sequence[str]]) -> NDArray[Any]:
        """How like its references every text is, from 0 to 1, by `LIKENESS` of the card's first metric."""
        return text_metrics.likeness(self.card.metric[0], texts, references, self.card.sentences, self.card.words)

    def score(self, examples: Sequence[Example], split: str) -> Scored:
        """Scores and intervals, as `seqreg evaluate` computes them."""
        parts = LoadedRun(self.run, Splits({split: examples}), self.tokenizer, self.model)
        with tempfile.TemporaryDirectory() as scratch:
            return evaluate(make_trainer(parts, Path(scratch)), self.run, self.tokenizer, examples, split)


def load_all(
    folders: Sequence[Path], overrides: Sequence[str] = (), *, trust: bool = False, trust_changes: bool = False
) -> dict[str, TrainedModel]:
    """The models of several runs by short name: their methods, with seeds where needed, or their folders."""
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise BadInput(f"{', '.join(map(str, folders))}: the same run twice")
    loaded = [TrainedModel.load(folder, overrides, trust=trust, trust_changes=trust_changes) for folder in folders]
    methods = [model.method for model in loaded]
    seeds = [f"{model.method}, seed {model.run.config.seed}" for model in loaded]
    paths = [folder.resolve() for folder in folders]
    last = [path.name for path in paths]
    for names in (methods, seeds, last, [f"{path.parent.name}/{path.name}" for path in paths], list(map(str, folders))):
        if len(set(names)) == len(folders):
            break
    return dict(zip(names, loaded, strict=True))
