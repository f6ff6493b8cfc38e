"""A model by its name alone, with adapters if asked for, and a batch for it: of a file, or of generated news."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import transformers
from transformers.models.auto import modeling_auto as auto_models

from seqreg.errors import BadInput
from seqreg.workbench.config import cards, schema
from seqreg.workbench.config.settings import Data, Lora, Model
from seqreg.workbench.data import adapters, loading, models, synthetic_news
from seqreg.workbench.data.completions import ChatEncoder, PromptEncoder, features
from seqreg.workbench.data.encoding import collator
from seqreg.workbench.data.examples import Example

ModelKind = Literal["seq2seq", "causal", "classifier"]
PROMPT = "{source}\nTL;DR: "
"""Of causal models, where the card of the task has none."""
SOURCE, TARGET = 128, 32
"""Tokens of a text; fewer where the model has no positions for them."""
_SPECIAL = 16
"""Positions that are left for special tokens, and for those of the prompt around a text."""
_AUTO = {
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "causal": transformers.AutoModelForCausalLM,
    "classifier": transformers.AutoModelForSequenceClassification,
}


def kind_of(config: Any) -> ModelKind:
    """What a model is for: by the class that it was saved with, else by its architecture."""
    saved, kind = str((config.architectures or [""])[0]), config.model_type
    if "SequenceClassification" in saved:
        return "classifier"
    if kind in auto_models.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return "seq2seq"
    return "causal" if models.is_decoder(kind) else "classifier"


def load(
    name: str, *, tokenizers: tuple[str | None, str | None] = (None, None), lora_dropout: float | None = None,
    trust: bool = False,
) -> tuple[Any, Any, ModelKind]:  # fmt: skip
    """The model, in float32, its tokenizer and what it is for.

    Args:
        name: on the hub, or a folder
        tokenizers: as `model.tokenizer` and `model.target_tokenizer` of a recipe
        lora_dropout: of LoRA adapters on all linear layers; None for no adapters
    """
    config = models.fetched(transformers.AutoConfig, name, "model", trust)
    keys = {"name": name, "tokenizer": tokenizers[0], "target_tokenizer": tokenizers[1]}
    chosen = schema.checked(Model, keys, lambda key: "command line")
    tokenizer, kind = models.tokenizer_of(chosen, trust=trust, option="--tokenizer NAME"), kind_of(config)
    model = models.loaded(_AUTO[kind], name, trust, config, new_head=kind == "classifier")
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        raise BadInput(f"--tokenizer: it has {len(tokenizer)} tokens, more than {name} embeds: choose another")
    if kind == "causal" and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if lora_dropout is not None:
        lora = Lora(lora_dropout=lora_dropout, target_modules="all-linear")
        model = adapters.with_adapters(model, lora, models.drawn_anew(model))
    return model, tokenizer, kind


def batch(
    model: Any, tokenizer: Any, kind: ModelKind, size: int, file: Path | None, task: str,
    delimiter: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The first examples of a file, by the card of a task, or generated news without one; classes are made up then."""
    examples = _news(size) if file is None else _first(file, task, kind, size, delimiter)
    prompt = (cards.load(task)[0].prompt or PROMPT) if kind == "causal" else None
    rows = [_row(example, place, model, tokenizer, kind, prompt) for place, example in enumerate(examples)]
    made = collator(tokenizer, "classification" if kind == "classifier" else "generation", prompt)(rows)
    return {key: value.to(model.device) for key, value in made.items()}


def _news(size: int) -> list[Example]:
    return [Example(story["document"], target=story["summary"]) for story in synthetic_news.stories(size)]


def _first(file: Path, task: str, kind: ModelKind, size: int, delimiter: str | None) -> Sequence[Example]:
    card, _ = cards.load(task)
    if (card.kind == "generation") != (kind != "classifier"):
        raise BadInput(f"--task {task}: {card.title} is a task of {card.kind}, and the model is for another: {kind}")
    return loading.read_file(card, file, Data(delimiter=delimiter))[:size]


def _row(
    example: Example, place: int, model: Any, tokenizer: Any, kind: ModelKind, prompt: str | None
) -> dict[str, Any]:
    positions = getattr(model.config, "max_position_embeddings", None) or SOURCE + TARGET + _SPECIAL
    target_limit = min(TARGET, positions // 4)
    source_limit = min(SOURCE, positions - target_limit - _SPECIAL)
    if example.chat:
        if kind != "causal":
            raise BadInput("--data: the examples are chats, which are for causal language models: give texts")
        chats = ChatEncoder(tokenizer, source_limit, target_limit)
        return features(chats.prompt(example.chat), chats.completion(example.chat, example.target or "")[0])
    if prompt is not None:
        encoder = PromptEncoder(tokenizer, prompt, source_limit, target_limit)
        return features(encoder.prompt(example.source), encoder.completion(example.target or "")[0])
    row = dict(tokenizer(example.source, example.second, truncation=True, max_length=source_limit))
    if kind == "seq2seq":
        target = tokenizer(text_target=example.target, truncation=True, max_length=target_limit)
        return {**row, "labels": target["input_ids"]}
    return {**row, "labels": place % model.config.num_labels if example.label is None else example.label}
