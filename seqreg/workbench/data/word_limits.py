"""Lengths of generated texts in words: what is between spaces."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from seqreg.workbench.config.cards import Generation

_ASCII = [*range(9, 14), *range(28, 33)]
_SPACES = frozenset([*map(chr, _ASCII), *(chr(256 + byte) for byte in _ASCII), "\u00a0", "▁"])
"""Whitespace in the spelling of tokens: as it is, of byte-level BPE, and of SentencePiece."""


class WordLimits(LogitsProcessor):
    """No end before `min_words` words, and none begun after `max_words`; for one call of `generate`.

    What was there when it was called first, a prompt or the token that a decoder starts with, is not counted. A word
    that has begun continues, so none is cut in two; a limit that leaves nothing to generate gives way to the end.

    Args:
        ends: ids of the tokens that end a text
    """

    def __init__(self, tokenizer: Any, min_words: int, max_words: int | None, ends: list[int]) -> None:
        self.tokenizer, self.min_words, self.max_words, self.ends = tokenizer, min_words, max_words, ends
        self.start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.start = input_ids.shape[1] if self.start is None else self.start
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :], skip_special_tokens=True)
        counts = torch.tensor([len(text.split()) for text in texts], device=scores.device)
        ends = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
        ends[self.ends] = True
        limited = scores.masked_fill((counts < self.min_words)[:, None] & ends, -torch.inf)
        if self.max_words is not None:
            begins = _begins_word(self.tokenizer, scores.shape[1]).to(scores.device)
            full = (counts >= self.max_words)[:, None]
            limited = limited.masked_fill(full & begins & ~ends, -torch.inf)
            limited = torch.where(full & ends & torch.isinf(limited).all(-1, keepdim=True), 0.0, limited)
        return torch.where(torch.isinf(limited).all(-1, keepdim=True), scores, limited)


@functools.lru_cache(maxsize=4)
def _begins_word(tokenizer: Any, size: int) -> Tensor:
    """Which tokens may begin another word: those with whitespace in them, [size]."""
    tokens = getattr(tokenizer, "target", tokenizer).convert_ids_to_tokens(range(min(size, len(tokenizer))))
    begins = torch.zeros(size, dtype=torch.bool)
    begins[: len(tokens)] = torch.tensor([not _SPACES.isdisjoint(token or "") for token in tokens])
    return begins


def word_limits(settings: Generation, model: Any, tokenizer: Any) -> dict[str, Any]:
    """What `generate` is given for `min_words` and `max_words`; nothing without them. For one call alone."""
    if not settings.min_words and settings.max_words is None:
        return {}
    ends = model.generation_config.eos_token_id
    known = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    limits = WordLimits(
        tokenizer, settings.min_words, settings.max_words, sorted({end for end in known if end is not None})
    )
    return {"logits_processor": LogitsProcessorList([limits])}
