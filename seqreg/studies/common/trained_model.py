"""A trained run as something to be examined: its model, its examples, and what it says about them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

from seqreg.errors import BadInput, nearest
from seqreg.forward import Perturbation
from seqreg.integrations.embedding_hook import EmbeddingTap
from seqreg.integrations.hf import context
from seqreg.integrations.hf import model as hf
from seqreg.losses import IGNORE
from seqreg.metrics.rouge.score import rouge
from seqreg.workbench.config import run_config
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import loading, models
from seqreg.workbench.data.encoding import Encoded
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.run.run_directory import RunRecord
from seqreg.workbench.run.train import trained
from seqreg.workbench.scores.evaluate import decode

Batch = dict[str, Any]
Delta = Tensor | Callable[[Tensor], Tensor]
"""What is added to the embeddings of the source; a function is given what it is added to."""

ROWS = 256
"""Tokens whose logits are looked at together: with 50,000 classes, a hundred megabytes in float64."""


@dataclass(frozen=True)
class Piece:
    """Some predictions of a batch: logits [n, V] that are made when asked for, labels [n], rows of the batch [n]."""

    make: Callable[[], Tensor]
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]

    def logits(self) -> NDArray[Any]:
        found: NDArray[Any] = self.make().float().cpu().numpy()
        return found


@dataclass(frozen=True)
class Material:
    """A finished run without its model: the splits of its task, and `method`, what it was trained with."""

    folder: Path
    method: str
    run: Run
    splits: Splits

    @property
    def card(self) -> Card:
        return self.run.card

    @property
    def generates(self) -> bool:
        return self.card.kind == "generation"

    def split(self, name: str | None = None) -> str:
        """The name of the split to examine: the one that the task is judged by, or the one asked for."""
        if name is None:
            return self.splits.evaluations(self.card)[0]
        if name not in self.splits.sets:
            raise BadInput(f"--split {name}: {self.folder} has no such split; {nearest(name, self.splits.sets)}")
        return name

    def open(self, *, trust: bool = False) -> Subject:
        """With its model."""
        tokenizer = models.load_tokenizer(self.run.config, (), trust=trust)
        model = models.load_model(self.run.config, self.card, tokenizer, trust=trust, trained=True).eval()
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        return Subject(self.folder, self.method, self.run, self.splits, tokenizer, model)


@dataclass(frozen=True)
class Subject(Material):
    """A trained model, in evaluation mode, with the splits of its task."""

    tokenizer: Any
    model: Any

    def batches(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Rows of like length and their tensors, with labels; the same rows whatever the tokenizer."""
        rows = Encoded(examples, self.tokenizer, self.run.config)
        collate = (DataCollatorForSeq2Seq if self.generates else DataCollatorWithPadding)(self.tokenizer)
        order = sorted(range(len(rows)), key=lambda index: -len(examples[index].source))
        size = self.run.config.evaluation.per_device_eval_batch_size
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            yield chosen, dict(collate([rows[index] for index in chosen]).to(self.model.device))

    def pieces(self, batch: Batch, delta: Delta | None = None) -> list[Piece]:
        """The predictions of a batch: a class of every row, or every token after those of the reference before it.

        What is kept of a token is its state before the head, not its logits. Where a model has no plain head, its
        pass is made again when they are asked for.
        """
        ctx = context(self.model, batch)
        shift = None if delta is None else Perturbation({ctx.sites("input")[0]: delta})
        view, mask = ctx.forward(shift, dropout="off", grad=False), ctx.mask
        labels, rows = ctx.labels[mask].cpu().numpy(), mask.nonzero()[:, 0].cpu().numpy()
        projection = view.deferred
        if ctx.kind != "tokens":
            logits = view.logits[mask]
            return [Piece(lambda: logits, labels, rows)]
        if projection is None:
            return [Piece(lambda: ctx.forward(shift, dropout="off", grad=False).logits[mask], labels, rows)]
        states = torch.split(projection.states[mask], ROWS)
        ends = np.cumsum([len(part) for part in states])[:-1]
        parts = [replace(projection, states=part, requires_grad=False) for part in states]
        split = zip(parts, np.split(labels, ends), np.split(rows, ends), strict=True)
        return [Piece(part.logits, own, where) for part, own, where in split]

    @torch.no_grad()
    def generate(self, batch: Batch, delta: Delta | None = None) -> Tensor:
        """Generated ids, by the generation settings of the run."""
        source = {key: value for key, value in batch.items() if key != "labels"}
        stack = next(iter(hf.stacks(self.model).values()))
        with contextlib.nullcontext() if delta is None else EmbeddingTap(stack, delta):
            found: Tensor = self.model.generate(**source)
        return found

    def texts(self, ids: Tensor) -> list[str]:
        return decode(ids.cpu().numpy(), self.tokenizer, self.card)

    @property
    def end(self) -> int:
        """The id of the token that ends a sequence."""
        return int(hf.special(self.model, "eos_token_id") or 0)

    def as_labels(self, ids: Tensor) -> Tensor:
        """Generated ids as labels: without the start, up to and with the first end."""
        labels = ids[:, 1:].clone()
        ends = (labels == self.end).long()
        return labels.masked_fill(ends.cumsum(1) > ends, IGNORE)


def load(folder: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Subject:
    """The trained model of a folder and the splits of its task."""
    return prepare(folder, overrides, trust=trust).open(trust=trust)


def prepare(folder: Path, overrides: Sequence[str] = (), *, trust: bool = False) -> Material:
    """All of it but the model."""
    run = trained(folder, tuple(overrides), trust=trust)
    record = RunRecord.read(folder)
    if not (folder / "config.json").is_file() or (record is not None and not record.finished):
        raise BadInput(f"{folder}: there is no trained model in it: has its training ended?")
    method = run_config.load(folder, overrides, build_terms=False).config.method  # of which `trained` leaves nothing
    return Material(folder, method, run, loading.load(run.card, run.config.data, needs_train=False))


def rouge_l(texts: Sequence[str], references: Sequence[str], card: Card) -> NDArray[Any]:
    """ROUGE-L of every text, from 0 to 1, as the card wants it."""
    options: dict[str, Any] = {"split": card.sentences, "tokenizer": card.words, "resamples": 1}
    return rouge(texts, references, kinds=["rougeL"], **options).scores["rougeL"][:, 2]
