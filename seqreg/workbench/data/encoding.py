"""Examples as token ids."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

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

    def by_length(self) -> list[int]:
        """The order in which the examples are evaluated."""
        return by_length(self.examples)

    def others(self, examples: Sequence[Example]) -> Encoded:
        """Other examples, encoded the same way."""
        return Encoded(examples, self.tokenizer, self.config, self.prompt)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        if self.prompt is not None:
            return self._completion(example)
        row = dict(encode(self.tokenizer, example, self.data.source_prefix, self.data.max_source_length))
        if example.target is not None:
            target = self.tokenizer(text_target=example.target, truncation=True, max_length=self.data.max_target_length)
            row["labels"] = target["input_ids"]
        elif example.label is not None:
            row["labels"] = example.label
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


def collator(tokenizer: Any, *, generates: bool, prompt: str | None) -> Any:
    """What makes a batch of encoded examples."""
    if prompt is not None:
        return CompletionCollator(tokenizer)
    return (DataCollatorForSeq2Seq if generates else DataCollatorWithPadding)(tokenizer)


def encode(tokenizer: Any, example: Example, prefix: str, max_length: int | None) -> Mapping[str, Any]:
    """The source side of an example; not truncated where `max_length` is None."""
    truncation = {"truncation": True, "max_length": max_length} if max_length else {}
    encoding: Mapping[str, Any] = tokenizer(prefix + example.source, example.second, **truncation)
    return encoding
