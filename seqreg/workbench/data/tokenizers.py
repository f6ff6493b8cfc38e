"""Tokenizers that are made here: trained on the text of a task, of single symbols, and one for either side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}

TARGET = "target_tokenizer"
"""The folder of the tokenizer of targets, inside that of a model that has two."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer in the manner of BART and RoBERTa."""
    tokenizer = Tokenizer(BPE(unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos, eos = ((SPECIAL[name], tokenizer.token_to_id(SPECIAL[name])) for name in ("bos_token", "eos_token"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[bos, eos]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="<s>",
        sep_token="</s>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **SPECIAL,
    )


def symbol_tokenizer(symbols: Mapping[str, int], special: Mapping[str, int], *, characters: bool) -> Any:
    """A tokenizer of single symbols: `<s>`, one token per symbol, `</s>`.

    Args:
        symbols: their ids
        special: ids of `<s>`, `<pad>`, `</s>` and `<unk>`
        characters: a symbol is a character of the text; otherwise symbols are apart by whitespace
    """
    vocabulary = {**symbols, **special}
    size, taken = max(vocabulary.values()) + 1, set(vocabulary.values())
    vocabulary |= {f"<unused{number}>": number for number in range(size) if number not in taken}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    if characters:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [(SPECIAL[name], special[SPECIAL[name]]) for name in ("bos_token", "eos_token")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **{name: token for name, token in SPECIAL.items() if token in special},
    )


class TwoTokenizers:
    """A tokenizer for sources and another for targets, used as transformers uses one.

    `tokenizer(text)` and whatever is not said here is the source's, `tokenizer(text_target=...)`, `decode` and
    `batch_decode` the target's. Both have the same special tokens.
    """

    def __init__(self, source: Any, target: Any) -> None:
        self.source, self.target = source, target

    def __call__(self, *texts: Any, text_target: Any = None, **options: Any) -> Any:
        return self.source(*texts, **options) if text_target is None else self.target(text_target, **options)

    def __len__(self) -> int:
        return max(len(self.source), len(self.target))

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "target"):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.source, name)

    def decode(self, *ids: Any, **options: Any) -> Any:
        return self.target.decode(*ids, **options)

    def batch_decode(self, *ids: Any, **options: Any) -> Any:
        return self.target.batch_decode(*ids, **options)

    def save_pretrained(self, folder: Any, **options: Any) -> Sequence[str]:
        """Write both: that of targets to a folder inside, where a model of this folder finds it again."""
        self.target.save_pretrained(str(Path(folder) / TARGET), **options)
        saved: Sequence[str] = self.source.save_pretrained(folder, **options)
        return saved
