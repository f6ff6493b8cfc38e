"""Examples as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from seqreg.workbench.config.settings import Config
from seqreg.workbench.data.examples import Example

INDEX = "example_index"
"""The column with the number of a training example, on its way to a message about it."""


class Encoded(Dataset[dict[str, Any]]):
    """Examples as token ids, encoded when they are read."""

    def __init__(self, examples: Sequence[Example], tokenizer: Any, config: Config) -> None:
        self.examples, self.tokenizer, self.data = examples, tokenizer, config.data

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        features = dict(encode(self.tokenizer, example, self.data.source_prefix, self.data.max_source_length))
        if example.target is not None:
            target = self.tokenizer(text_target=example.target, truncation=True, max_length=self.data.max_target_length)
            features["labels"] = target["input_ids"]
        elif example.label is not None:
            features["labels"] = example.label
        return features


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


def encode(tokenizer: Any, example: Example, prefix: str, max_length: int | None) -> Mapping[str, Any]:
    """The source side of an example; not truncated where `max_length` is None."""
    truncation = {"truncation": True, "max_length": max_length} if max_length else {}
    encoding: Mapping[str, Any] = tokenizer(prefix + example.source, example.second, **truncation)
    return encoding
