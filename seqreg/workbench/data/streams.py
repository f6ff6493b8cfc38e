"""Texts without labels and old examples as training sees them, with targets that the starting model writes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import torch
from rich.progress import Progress
from torch.utils.data import Dataset

from seqreg.errors import BadInput
from seqreg.integrations.hf import streams
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import arrow_cache
from seqreg.workbench.data.arrow_cache import TableWriter
from seqreg.workbench.data.encoding import Encoded, by_length, tokenizer_digest
from seqreg.workbench.data.loading import REPLAY, UNLABELLED
from seqreg.workbench.text.progress import Bar, columns
from seqreg.workbench.text.terminal import console


class WithTargets(Dataset[dict[str, Any]]):
    """Encoded sources with targets of token ids.

    Args:
        targets: of every example; None for the start token of a decoder alone
    """

    def __init__(self, sources: Encoded, targets: Sequence[Sequence[int]] | None, start: int | None = None) -> None:
        self.sources, self.targets, self.start = sources, targets, start

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {key: value for key, value in self.sources[index].items() if key != "labels"}
        if self.targets is None:
            return {**row, "decoder_input_ids": [self.start]}
        return {**row, "labels": list(self.targets[index])}


def datasets_of(
    run: Run, model: Any, tokenizer: Any, sets: Mapping[str, Encoded], collate: Any, digest: str
) -> dict[str, Any]:
    """The options of a trainer for texts without labels and old examples, as far as the run has them.

    Args:
        model: the starting model, which writes targets where the run asks for them
        sets: encoded examples by split
        collate: makes a batch
        digest: of the weights of the starting model
    """
    data, options = run.config.data, dict[str, Any]()
    decoder = run.card.kind == "generation" and model.config.is_encoder_decoder
    writer = _TargetWriter(run, model, tokenizer, collate, digest)
    if UNLABELLED in sets and any(term.on != "labelled" for term in run.criterion.terms):
        texts: Any = sets[UNLABELLED]
        if decoder and data.unlabelled_targets == "start":
            texts = WithTargets(texts, writer.write(texts, "data.unlabelled"))
        elif decoder and data.unlabelled_targets == "none":
            texts = WithTargets(texts, None, model.config.decoder_start_token_id)
        options |= {"unlabelled_dataset": texts, "unlabelled_ratio": data.unlabelled_ratio}
    if REPLAY in sets and data.replay is not None:
        old: Any = sets[REPLAY]
        if data.replay.targets == "start":
            if not decoder:
                raise BadInput("data.replay.targets=start: this model has no decoder that writes targets: use labels")
            old = WithTargets(old, writer.write(old, "data.replay"))
        options |= {"replay_dataset": old, "replay_share": data.replay.share}
    return options


class _TargetWriter:
    """Lets the starting model write its output for texts, once: outputs are kept in the cache of the run's data."""

    def __init__(self, run: Run, model: Any, tokenizer: Any, collate: Any, digest: str) -> None:
        self.run, self.model, self.tokenizer, self.collate, self.digest = run, model, tokenizer, collate, digest

    def write(self, texts: Encoded, setting: str) -> list[list[int]]:
        data = self.run.config.data
        limits = [data.source_prefix, data.max_source_length, data.max_target_length]
        sources = [[example.source, example.second] for example in texts.examples]
        made_by = [self.digest, tokenizer_digest(self.tokenizer)]
        key = arrow_cache.key_of("written targets", sources, limits, made_by, code=(sys.modules[__name__],))

        def make(table: TableWriter) -> dict[str, Any]:
            table.write({"targets": pyarrow.array(self._targets(texts, setting), pyarrow.list_(pyarrow.int32()))})
            return {}

        stored = arrow_cache.table(Path(arrow_cache.folder_of(data)), key, make)
        return [list(row) for row in stored.dataset["targets"]]

    def _targets(self, texts: Encoded, setting: str) -> list[list[int]]:
        order = by_length(texts.examples)
        size = self.run.config.evaluation.per_device_eval_batch_size
        device = next(self.model.parameters()).device
        rows: list[list[int]] = [[] for _ in order]
        with Progress(*columns(), console=console, disable=not console.is_terminal, transient=True) as progress:
            bar = Bar(progress, f"the starting model writes targets for {setting}", len(order), "text")
            for first in range(0, len(order), size):
                places = order[first : first + size]
                batch = self.collate([self._source(texts[place]) for place in places])
                inputs = {key: value.to(device) for key, value in batch.items() if isinstance(value, torch.Tensor)}
                # and the token that the decoder starts from
                limit: dict[str, Any] = {"max_length": self.run.config.data.max_target_length + 1}
                for place, row in zip(places, streams.written_targets(self.model, [inputs], **limit), strict=True):
                    rows[place] = row
                bar.at(first + len(places))
        return rows

    @staticmethod
    def _source(row: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if key in ("input_ids", "attention_mask", "token_type_ids")}
