"""Examples as token ids."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import DataCollatorForSeq2Seq, DataCollatorForTokenClassification, DataCollatorWithPadding

from seqreg.losses import IGNORE
from seqreg.workbench.config.cards import CardKind
from seqreg.workbench.config.settings import Config
from seqreg.workbench.data.completions import CompletionCollator, PromptEncoder, features
from seqreg.workbench.data.examples import Example
from seqreg.workbench.text.terminal import warn

INDEX = "example_index"
"""The column with the number of a training example, on its way to a message about it."""


class Encoded(Dataset[dict[str, Any]]):
    """Examples as token ids, encoded when they are read.

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

    def others(self, examples: Sequence[Example]) -> Encoded:
        """Other examples, encoded the same way."""
        return Encoded(examples, self.tokenizer, self.config, self.prompt)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        if self.prompt is not None:
            return self._completion(example)
        if example.tags is not None:
            return self._tagged(example)
        row = dict(encode(self.tokenizer, example, self.data.source_prefix, self.data.max_source_length))
        if example.target is not None:
            target = self.tokenizer(text_target=example.target, truncation=True, max_length=self.data.max_target_length)
            row["labels"] = target["input_ids"]
        elif example.label is not None:
            row["labels"] = example.label
        return row

    def _tagged(self, example: Example) -> dict[str, Any]:
        """A text whose words have tags: the first token of a word has its tag, and no other token has a label."""
        row, places = encode_words(self.tokenizer, example, self.data.source_prefix, self.data.max_source_length)
        row["labels"] = [IGNORE] * len(row["input_ids"])
        for place, tag in zip(places, example.tags or (), strict=True):
            if place is not None:
                row["labels"][place] = tag
        return row

    def _completion(self, example: Example) -> dict[str, Any]:
        """A prompt with its completion, if there is one."""
        data = self.data
        encoder = PromptEncoder(self.tokenizer, self.prompt or "", data.max_source_length, data.max_target_length)
        prompt = encoder.prompt(data.source_prefix + example.source)
        if example.target is None:
            return {"input_ids": prompt, "attention_mask": [1] * len(prompt)}
        completion, cut = encoder.completion(example.target)
        if cut and not self.quiet:
            _tell_of_cut(data.max_target_length)
        return features(prompt, completion)


class Numbered(Dataset[dict[str, Any]]):
    """The examples of another dataset, each with its number."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.dataset[index], INDEX: index}


class Collator:
    """A collator that keeps the numbers of the examples."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        indices = [example[INDEX] for example in features if INDEX in example]
        batch = self.collate([{key: value for key, value in each.items() if key != INDEX} for each in features])
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
