"""Examples as token ids."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import tokenizers
import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import DataCollatorForSeq2Seq, DataCollatorForTokenClassification, DataCollatorWithPadding

from seqreg.errors import BadInput
from seqreg.losses import IGNORE
from seqreg.workbench.config.cards import CardKind
from seqreg.workbench.config.settings import Config
from seqreg.workbench.data import arrow_cache, completions
from seqreg.workbench.data.arrow_cache import StoredTable, TableWriter, key_of
from seqreg.workbench.data.batches import best_fit_decreasing
from seqreg.workbench.data.completions import ChatEncoder, CompletionCollator, PromptEncoder, features
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.stored_examples import OnDisk
from seqreg.workbench.data.streaming import StreamedExamples
from seqreg.workbench.text.terminal import say, warn

INDEX = "example_index"
"""The column with the number of a training example, on its way to a message about it."""
_AT_ONCE = 1000
"""Examples that are tokenized at once."""
_PARALLEL = "TOKENIZERS_PARALLELISM"


class Encoded(Dataset[dict[str, Any]]):
    """Examples as token ids: encoded when they are read or, where the examples are on disk, once for all runs.

    Args:
        prompt: the template of a causal model; None for any other
        quiet: do not tell of a target that is cut
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Any,
        config: Config,
        prompt: str | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self.examples, self.tokenizer, self.config, self.data = examples, tokenizer, config, config.data
        self.prompt, self.quiet = prompt, quiet

    def by_length(self) -> list[int]:
        """The order in which the examples are evaluated."""
        return by_length(self.examples)

    def others(self, examples: Sequence[Example]) -> Encoded:
        """Other examples, encoded the same way."""
        return Encoded(examples, self.tokenizer, self.config, self.prompt)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.tokens is not None:
            row: dict[str, Any] = self.tokens.dataset[int(index)]
            return row
        columns, cut = self._columns([self.examples[index]])
        if cut and not self.quiet:
            _tell_of_cut(self.data.max_target_length)
        return {name: values[0] for name, values in columns.items()}

    @functools.cached_property
    def tokens(self) -> StoredTable | None:
        """All of it in an Arrow file of the cache, made if it is not there; None for examples in memory."""
        if not isinstance(self.examples, OnDisk) or self.examples.key is None:
            return None
        limits = [self.data.source_prefix, self.data.max_source_length, self.data.max_target_length, self.prompt]
        limits += ["chat_template"] * self.data.chat_template
        key = key_of(
            "tokens",
            self.examples.key,
            limits,
            [transformers.__version__, tokenizers.__version__, tokenizer_digest(self.tokenizer)],
            code=(sys.modules[__name__], completions),
        )
        table = arrow_cache.table(self.examples.folder, key, self._write)
        if table.facts["cut"] and not self.quiet:
            _tell_of_cut(self.data.max_target_length)
        return table

    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of the source and of the target of every example; 1 where the target is a label."""
        if self.tokens is None:
            rows = (self[index] for index in range(len(self)))
            return [
                (len(row["input_ids"]), len(row["labels"]) if isinstance(row["labels"], list) else 1) for row in rows
            ]
        table = self.tokens.dataset.data
        sizes = [
            pyarrow.compute.list_value_length(column).to_pylist()
            if pyarrow.types.is_list(column.type)
            else [1] * len(column)
            for column in (table.column("input_ids"), table.column("labels"))
        ]
        return list(zip(*sizes, strict=True))

    def _write(self, writer: TableWriter) -> dict[str, Any]:
        """Write the token ids of all examples; the tokenizer may use all cores."""
        say(f"tokenizing {len(self):,} examples; their token ids are kept for the next time", "dim")
        cut, examples = 0, iter(self.examples)
        with _parallel_tokenizers():
            while batch := list(itertools.islice(examples, _AT_ONCE)):
                columns, more = self._columns(batch)
                cut += more
                writer.write({name: _arrow(name, values) for name, values in columns.items()})
        return {"cut": cut}

    def _columns(self, examples: Sequence[Example]) -> tuple[dict[str, list[Any]], int]:
        """What a model takes, for several examples of one kind, and how many completions are cut."""
        if examples[0].tags is not None:
            rows = [self._tagged(example) for example in examples]
            return {name: [row[name] for row in rows] for name in rows[0]}, 0
        data, targets = self.data, [example.target for example in examples if example.target is not None]
        sources = [data.source_prefix + example.source for example in examples]
        chats = any(example.chat for example in examples)
        if self.prompt is not None and (chats or data.chat_template):
            answers, cuts = zip(*(self._answer(example) for example in examples), strict=True)
            return {name: [row[name] for row in answers] for name in answers[0]}, sum(cut > 0 for cut in cuts)
        if self.prompt is not None:
            return self._completions(sources, targets)
        if chats:
            raise BadInput("the examples are chats, which are for causal language models: choose another model or task")
        seconds = [example.second for example in examples if example.second is not None]
        limit = {"truncation": True, "max_length": data.max_source_length}
        with _without_offsets(self.tokenizer):
            columns = dict(self.tokenizer(sources, seconds or None, **limit))
            if targets:
                limit["max_length"] = data.max_target_length
                columns["labels"] = self.tokenizer(text_target=targets, **limit)["input_ids"]
        if not targets and examples[0].label is not None:
            columns["labels"] = [example.label for example in examples]
        return columns, 0

    def _tagged(self, example: Example) -> dict[str, Any]:
        """A text whose words have tags: the first token of a word has its tag, and no other token has a label."""
        row, places = encode_words(self.tokenizer, example, self.data.source_prefix, self.data.max_source_length)
        row["labels"] = [IGNORE] * len(row["input_ids"])
        for place, tag in zip(places, example.tags or (), strict=True):
            if place is not None:
                row["labels"][place] = tag
        return row

    def _answer(self, example: Example) -> tuple[dict[str, list[int]], int]:
        """A chat with its answer, if there is one, and how much of that is cut; a text as the message of a user."""
        data, template = self.data, self.prompt or ""
        if not example.chat and not data.chat_template:  # a text among chats
            targets = [] if example.target is None else [example.target]
            columns, cut = self._completions([data.source_prefix + example.source], targets)
            return {name: values[0] for name, values in columns.items()}, cut
        encoder = ChatEncoder(self.tokenizer, data.max_source_length, data.max_target_length)
        if example.chat and data.source_prefix:
            raise BadInput(f"data.source_prefix={data.source_prefix!r}: chats have none: leave it out")
        chat = example.chat or encoder.asked(template, data.source_prefix + example.source)
        if not example.chat:  # cut already, and longer with what the template puts around it
            encoder = replace(encoder, max_source_length=None)
        prompt = encoder.prompt(chat)
        if example.target is None:
            return {"input_ids": prompt, "attention_mask": [1] * len(prompt)}, 0
        completion, cut = encoder.completion(chat, example.target)
        return features(prompt, completion), cut

    def _completions(self, sources: Sequence[str], targets: Sequence[str]) -> tuple[dict[str, list[Any]], int]:
        """Prompts with their completions, if there are any, and how many of these are cut."""
        data = self.data
        encoder = PromptEncoder(self.tokenizer, self.prompt or "", data.max_source_length, data.max_target_length)
        prompts = encoder.prompts(sources)
        if not targets:
            return {"input_ids": prompts, "attention_mask": [[1] * len(prompt) for prompt in prompts]}, 0
        pairs = encoder.completions(targets)
        rows = [features(prompt, completion) for prompt, (completion, _) in zip(prompts, pairs, strict=True)]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return columns, sum(cut > 0 for _, cut in pairs)


def _arrow(name: str, values: Sequence[Any]) -> pyarrow.Array:
    """A column of token ids, labels, or the small numbers of a mask."""
    if not isinstance(values[0], list):
        return pyarrow.array(values)
    ends = [0, *itertools.accumulate(map(len, values))]
    number = np.int32 if name in ("input_ids", "labels") else np.int8
    numbers = np.fromiter(itertools.chain.from_iterable(values), number, ends[-1])  # faster than pyarrow.array
    return pyarrow.ListArray.from_arrays(ends, numbers)


@contextlib.contextmanager
def _without_offsets(tokenizer: Any) -> Iterator[None]:
    """Let a fast tokenizer give the same ids without the characters that tokens stand for, which takes less time."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    backend.encode_batch = backend.encode_batch_fast  # of this object, which transformers calls
    try:
        yield
    finally:
        vars(backend).pop("encode_batch", None)


@contextlib.contextmanager
def _parallel_tokenizers() -> Iterator[None]:
    """Let fast tokenizers use all cores for a batch; scripts forbid it, for the sake of processes that are forked."""
    before = os.environ.get(_PARALLEL)
    os.environ[_PARALLEL] = "true"
    try:
        yield
    finally:
        os.environ[_PARALLEL] = before or "false"


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of all that a tokenizer saves, but for what its last call has set."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            content: Any = path.read_bytes()
            if path.name == "tokenizer.json":
                settings = {**json.loads(content), "truncation": None, "padding": None}
                content = json.dumps(settings, sort_keys=True).encode()
            digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def by_length(examples: Sequence[Example]) -> list[int]:
    """Numbers of examples, those with the longest sources first: batches in this order have little padding."""
    lengths = [len(example.source) + len(example.second or "") for example in examples]
    return sorted(range(len(examples)), key=lambda index: -lengths[index])


class Numbered(Dataset[dict[str, Any]]):
    """The examples of another dataset, each with its number."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index], INDEX: index}


class Packed(Numbered):
    """Bins of examples, each of as many as fit into `max_length` tokens; the same ones in every epoch."""

    def __init__(self, dataset: Encoded, max_length: int) -> None:
        super().__init__(dataset)
        lengths = [tokens for tokens, _ in dataset.lengths()]
        for index, length in enumerate(lengths):
            if length > max_length:
                raise BadInput(
                    f"data.max_length={max_length}: training example {index} has {length} tokens with its prompt: "
                    "raise it, or lower data.max_source_length or data.max_target_length"
                )
        self.bins = best_fit_decreasing(lengths, max_length)

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Any:
        return [super(Packed, self).__getitem__(example) for example in self.bins[index]]


class EncodedStream(IterableDataset[dict[str, Any]]):
    """The examples of a stream without an end, each with its number.

    Args:
        encoder: how they are encoded
    """

    def __init__(self, examples: StreamedExamples, encoder: Encoded) -> None:
        self.examples, self.encoder = examples, encoder

    def __iter__(self) -> Iterator[dict[str, Any]]:
        config = self.encoder.config
        for number, example in self.examples.shuffled(config.seed, config.data.buffer_size):
            yield {**self.encoder.others([example])[0], INDEX: number}


class Collator:
    """A collator that keeps the numbers of the examples, which may come in bins.

    Args:
        training: that of training examples, which have numbers, where it is another
    """

    def __init__(self, collate: Any, training: Any = None) -> None:
        self.collate, self.training = collate, training or collate

    def __call__(self, features: Sequence[Any]) -> Any:
        examples = [example for each in features for example in (each if isinstance(each, list) else [each])]
        indices = [example[INDEX] for example in examples if INDEX in example]
        collate = self.training if indices else self.collate
        batch = collate([{key: value for key, value in each.items() if key != INDEX} for each in examples])
        if indices:
            batch[INDEX] = torch.tensor(indices)
        return batch


@functools.cache  # once in a process
def _tell_of_cut(limit: int) -> None:
    warn(
        f"seqreg: warning: a target has more than data.max_target_length={limit} tokens with its end, and is cut: "
        "neither the rest nor the end is learnt or counted in losses; seqreg check tells how many are"
    )


def collator(tokenizer: Any, kind: CardKind, prompt: str | None) -> Any:
    """What makes a batch of encoded examples of a task of some kind."""
    if prompt is not None:
        return CompletionCollator(tokenizer)
    if kind == "token_classification":
        return _TagCollator(tokenizer)
    return (DataCollatorForSeq2Seq if kind == "generation" else DataCollatorWithPadding)(tokenizer)


class _TagCollator:
    """Batches of tokens with tags; without labels where there are none, which transformers' own would not pad."""

    def __init__(self, tokenizer: Any) -> None:
        self.labelled, self.plain = DataCollatorForTokenClassification(tokenizer), DataCollatorWithPadding(tokenizer)

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        return (self.labelled if "labels" in features[0] else self.plain)(features)


def encode(tokenizer: Any, example: Example, prefix: str, max_length: int | None) -> Mapping[str, Any]:
    """The source side of an example; not truncated where `max_length` is None."""
    truncation = {"truncation": True, "max_length": max_length} if max_length else {}
    encoding: Mapping[str, Any] = tokenizer(prefix + example.source, example.second, **truncation)
    return encoding


def encode_words(
    tokenizer: Any, example: Example, prefix: str, max_length: int | None
) -> tuple[dict[str, Any], list[int | None]]:
    """A text, and the place of the first token of every word: None for a word that is cut off, or has no token.

    Words are found by the characters that tokens stand for, so that a text has the tokens that it has anywhere else.
    """
    truncation = {"truncation": True, "max_length": max_length} if max_length else {}
    row = dict(tokenizer(prefix + example.source, return_offsets_mapping=True, **truncation))
    text, words = prefix + example.source, example.words
    word_at = [-1] * len(prefix)
    for number, word in enumerate(words):
        word_at += [number] * len(word) + [-1]  # and the space after it
    places: list[int | None] = [None] * len(words)
    for place, (first, last) in enumerate(row.pop("offset_mapping")):
        start = next((at for at in range(first, last) if not text[at].isspace()), last)
        number = word_at[start] if start < last else -1  # special tokens stand for nothing
        if number >= 0 and places[number] is None:
            places[number] = place
    return row, places
