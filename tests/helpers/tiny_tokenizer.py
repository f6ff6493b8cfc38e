"""A tokenizer of a few words with a chat template, and texts in them."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
import transformers

WORDS = "a the cat dog bird sat ran sang on under over mat tree hill and then it was not".split()
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} </s> "
    "{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def tokenizer(words: Sequence[str] = WORDS) -> transformers.PreTrainedTokenizerFast:
    """Ids as those of the tiny models: <s> 0, <pad> 1, </s> 2."""
    known = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", "user", "assistant", ":", *words])
    vocabulary = {word: i for i, word in enumerate(known)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        chat_template=TEMPLATE,
    )  # fmt: skip


def texts(number: int = 8) -> list[str]:
    """Of unequal length."""
    return [" ".join(WORDS[(3 * row + column) % len(WORDS)] for column in range(4 + row % 4)) for row in range(number)]
