"""Causal language models: prompts or chats and completions as ids, batches of both, and what a model completes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding

from seqreg.errors import BadInput
from seqreg.integrations.hf.model import task_of, unwrap
from seqreg.losses import IGNORE
from seqreg.workbench.config.cards import SOURCE
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data.examples import ASSISTANT

Batch = Mapping[str, Any]
USER = "user"
"""The role of who asks a chat model."""


def is_causal(model: Any) -> bool:
    """Whether a model, adapters or not, has a decoder alone."""
    return task_of(unwrap(model)) == "causal"


def prompt_of(run: Run, model: Any) -> str | None:
    """The prompt of a causal model: that of the recipe, or of the card; None for any other model."""
    if not is_causal(model):
        data, name = run.config.data, type(unwrap(model)).__name__
        if data.prompt is not None:
            raise BadInput(f"data.prompt is for causal language models, and this is a {name}: see data.source_prefix")
        for key in ("chat_template", "padding_free", "packing"):
            if getattr(data, key):
                raise BadInput(f"data.{key} is for causal language models, and this is a {name}: leave it out")
        return None
    template = run.config.data.prompt or run.card.prompt
    if template is None:
        raise BadInput(
            f"{type(unwrap(model)).__name__} is a causal language model, and neither the recipe nor {run.card.title} "
            'has a prompt: set data.prompt, such as "{source}\\nTL;DR: "'
        )
    if run.card.columns.second is not None:
        raise BadInput(f"{run.card.title} has two texts, and a prompt has one: train an encoder-decoder on it")
    return template


@dataclass(frozen=True)
class PromptEncoder:
    """From an example to the ids of `prompt completion eos`; labels are those of the completion and its end alone.

    What the tokenizer puts before a text, such as a bos token, stays; what it puts after it does not. Spaces at the end
    of the template are the beginning of the completion: tokens of words begin with them.

    Args:
        template: has "{source}" in it, where the text comes in
        max_source_length: tokens of the source; those after it are left out, and the rest of the template stays
        max_target_length: tokens of the completion with its eos; a longer one is cut, and has no eos
    """

    tokenizer: Any
    template: str
    max_source_length: int | None
    max_target_length: int

    def prompt(self, source: str) -> list[int]:
        """The ids before the completion; at least one."""
        return self.prompts([source])[0]

    def prompts(self, sources: Sequence[str]) -> list[list[int]]:
        """The same for several sources."""
        before, _, after = self.template.rstrip(" ").partition(SOURCE)
        encoding = self.tokenizer([f"{before}{source}{after}" for source in sources], return_offsets_mapping=True)
        rows = zip(sources, encoding["input_ids"], encoding["offset_mapping"], strict=True)
        first = len(before)
        return [self._cut(zip(ids, places, strict=True), first, first + len(source)) for source, ids, places in rows]

    def _cut(self, row: Iterable[tuple[int, tuple[int, int]]], first: int, last: int) -> list[int]:
        """The ids of a prompt without those at its end, and after `max_source_length` of its source.

        Args:
            row: ids, and the characters of each
            first, last: the characters of the source
        """
        tokens = list(row)
        while tokens and tokens[-1][1][0] == tokens[-1][1][1] and tokens[-1][0] in self.tokenizer.all_special_ids:
            tokens.pop()
        inside = [place for place, (_, (a, b)) in enumerate(tokens) if first <= a < b <= last]
        cut = set() if self.max_source_length is None else set(inside[self.max_source_length :])
        ids = [token for place, (token, _) in enumerate(tokens) if place not in cut]
        start = self.tokenizer.bos_token_id
        return ids or [self.tokenizer.eos_token_id if start is None else start]

    def completion(self, target: str) -> tuple[list[int], int]:
        """The ids of a completion, and how many of it were cut."""
        return self.completions([target])[0]

    def completions(self, targets: Sequence[str]) -> list[tuple[list[int], int]]:
        """The same for several targets."""
        gap, most = self.template[len(self.template.rstrip(" ")) :], self.max_target_length
        encoding = self.tokenizer([gap + target for target in targets], add_special_tokens=False)
        rows = ([*ids, self.tokenizer.eos_token_id] for ids in encoding["input_ids"])
        return [(ids[:most], max(0, len(ids) - most)) for ids in rows]

    @property
    def overhead(self) -> int:
        """Tokens of a prompt beside those of its source: about, and rather more."""
        return len(self.prompt("a")) + 2


Chat = Sequence[tuple[str, str]]
"""Role and content of every message."""


@dataclass(frozen=True)
class ChatEncoder:
    """From a chat and an answer to the ids of `prompt completion`, as the chat template of the tokenizer writes both.

    The completion is what the template writes of the answer up to its end, without white space after it; where no
    special token ends it, an eos token does.

    Args:
        max_source_length: tokens of the prompt; those before the last ones are left out
        max_target_length: tokens of the completion with its end; a longer one is cut, and has none
    """

    tokenizer: Any
    max_source_length: int | None
    max_target_length: int

    def prompt(self, chat: Chat) -> list[int]:
        """The ids before the completion."""
        ids = self._ids(self._text(chat, add_generation_prompt=True))
        return ids if self.max_source_length is None else ids[-self.max_source_length :]

    def completion(self, chat: Chat, target: str) -> tuple[list[int], int]:
        """The ids of a completion, and how many of it were cut."""
        before, both = self._text(chat, add_generation_prompt=True), self._text([*chat, (ASSISTANT, target)])
        if not both.startswith(before):
            raise BadInput("the chat template of the tokenizer asks for an answer in another way than it writes one")
        ids = self._ids(both[len(before) :].rstrip())
        if not ids or ids[-1] not in self.tokenizer.all_special_ids:
            ids.append(self.tokenizer.eos_token_id)
        return ids[: self.max_target_length], max(0, len(ids) - self.max_target_length)

    def asked(self, template: str, source: str) -> Chat:
        """A text of at most `max_source_length` tokens in its prompt, as the message of a user."""
        if self.max_source_length is not None:
            places = self.tokenizer(source, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            source = source[: places[self.max_source_length - 1][1]] if len(places) > self.max_source_length else source
        return [(USER, template.replace(SOURCE, source).strip())]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, chat: Chat, **options: Any) -> str:
        if self.tokenizer.chat_template is None:
            raise BadInput("the tokenizer has no chat template, which chats need: choose the model's instruct version")
        messages = [{"role": role, "content": content} for role, content in chat]
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except TemplateError as error:  # such as one that has no place for a system message
            raise BadInput(f"the chat template of the tokenizer refuses a chat: {error}") from None


def features(prompt: Sequence[int], completion: Sequence[int]) -> dict[str, list[int]]:
    """One row of a batch, with labels on the completion alone."""
    ids = [*prompt, *completion]
    labels = [*(IGNORE for _ in prompt), *completion]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


class PaddingFreeCollator:
    """All rows in one, whose positions begin at 0 in each: attention does not reach from one to another."""

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> BatchEncoding:
        joined: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for row in rows:
            joined["input_ids"] += row["input_ids"]
            joined["labels"] += [IGNORE, *row["labels"][1:]]  # which the row before does not predict
            joined["position_ids"] += range(len(row["input_ids"]))
        return BatchEncoding({key: torch.tensor([ids]) for key, ids in joined.items()})


class CompletionCollator:
    """Rows padded on the right, where padding changes no position of a token; labels are masked there, not by id."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> BatchEncoding:
        fill = {"input_ids": self.tokenizer.pad_token_id, "attention_mask": 0, "labels": IGNORE}
        return BatchEncoding({
            key: pad_sequence([torch.tensor(row[key]) for row in rows], batch_first=True, padding_value=fill[key])
            for key in rows[0]
        })  # fmt: skip


def prompts(batch: Batch) -> list[Tensor]:
    """The ids of every row before its completion."""
    real, labels = batch["attention_mask"].bool(), batch.get("labels")
    if labels is not None:
        real = real & (labels.ne(IGNORE).cumsum(-1) == 0)
    return [ids[row] for ids, row in zip(batch["input_ids"], real, strict=True)]


@torch.no_grad()
def complete(model: Any, batch: Batch, **options: Any) -> Tensor:
    """Generated ids after the prompts of a batch, which are padded on the left; by the model's generation settings."""
    pad = model.generation_config.pad_token_id
    given = pad_sequence(rows := prompts(batch), batch_first=True, padding_value=pad, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    ids: Tensor = model.generate(input_ids=given, attention_mask=mask, **options)
    return ids[:, given.shape[1] :]


def completed(batch: Batch, ids: Tensor, model: Any, tokenizer: Any) -> BatchEncoding:
    """The batch with generated ids, up to the first that ends a text, in place of the completions of the data."""
    rows, ends = [], model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    for prompt, generated in zip(prompts(batch), ids.tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(generated) if token in ends), len(generated))
        rows.append(features(prompt.tolist(), generated[:end]))
    return CompletionCollator(tokenizer)(rows).to(ids.device)
