"""From text to tokens, and from tokens to ids.

Two tokenizers. "rouge" is rouge-score's: lower case, runs of a-z and 0-9, all else separates. "unicode" is for every
script: NFKC and casefold, runs of letters, marks and digits; where a script has no spaces between words (Chinese,
Japanese, Thai and others) every character is a token.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import regex

from seqreg.metrics.rouge.ngrams import BREAK, Texts

Tokenizer = Literal["rouge", "unicode"]
Word = bytes | str

_KEPT = b"abcdefghijklmnopqrstuvwxyz0123456789"
_TABLE = bytes(code if code in _KEPT else 32 for code in range(256))
_BROKEN_TABLE = _TABLE[:10] + b"|" + _TABLE[11:]  # a line break becomes a word
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
_TOKEN = regex.compile(rf"(?V1)[[{_UNSPACED}]&&\p{{L}}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}]--[[{_UNSPACED}]&&\p{{L}}]]+")
_BROKEN_TOKEN = regex.compile(rf"\n|{_TOKEN.pattern}")
# A word without any of these ends is its own stem: each rule of nltk's stemmer changes an end that is one of them.
_ENDS = tuple(
    """s ed ing y e ll al er ic ant ent ion ou ism iti ful ator enci anci bli alli entli eli ousli fulli logi""".split()
)
_FOREIGN = regex.compile(r"(?V1)[[\p{L}\p{N}]--\p{ASCII}]")


def rouge_words(text: str, table: bytes = _TABLE) -> list[bytes]:
    """Words as rouge-score sees them, before stemming.

    >>> rouge_words("Don't stop: 3.5% of naïve users")
    [b'don', b't', b'stop', b'3', b'5', b'of', b'na', b've', b'users']
    """
    return text.lower().encode("ascii", "replace").translate(table).split()


def unicode_words(text: str, token: regex.Pattern[str] = _TOKEN) -> list[str]:
    """Words of any script.

    >>> unicode_words("Straße №5, 東京へ, हिन्दी")
    ['strasse', 'no5', '東', '京', 'へ', 'हिन्दी']
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return [str(word) for word in token.findall(folded)]


WORDS: dict[str, Callable[[str], list[bytes] | list[str]]] = {"rouge": rouge_words, "unicode": unicode_words}
TOKENIZERS = tuple(WORDS)


def loses_script(text: str) -> bool:
    """Whether rouge-score's tokenizer drops more letters and digits of a text than it keeps."""
    if text.isascii():
        return False
    return len(_FOREIGN.findall(text)) > sum(map(len, rouge_words(text)))


@lru_cache(maxsize=1)
def _porter() -> Callable[[str], str]:
    from nltk.stem.porter import PorterStemmer  # slow to import, so only where it is used

    stem: Callable[[str], str] = PorterStemmer().stem
    return stem


@lru_cache(maxsize=1 << 18)
def stem_of(word: str) -> str:
    """Porter's stem of words of more than three characters, as rouge-score stems; other scripts stay."""
    return _porter()(word) if len(word) > 3 and word.endswith(_ENDS) and word.isascii() else word


class Vocabulary(dict[Word, int]):
    """Gives every stem an id. A word is stemmed when it is first seen, then looked up.

    >>> vocabulary = Vocabulary("rouge", stem=True)
    >>> vocabulary.encode([["The cats saw", "the cat"], ["seen by cats"]]).tokens.tolist()
    [-1, 0, 1, 2, -1, 0, 1, -1, 3, 4, 1]
    """

    def __init__(self, tokenizer: Tokenizer, stem: bool) -> None:
        super().__init__({b"|": BREAK, "\n": BREAK})
        self.tokenizer, self.stem = tokenizer, stem
        self.stems: dict[str, int] = {}

    def __missing__(self, word: Word) -> int:
        text = word if isinstance(word, str) else word.decode("ascii")
        stem = stem_of(text) if self.stem else text
        token = self[word] = self.stems.setdefault(stem, len(self.stems))
        return token

    def encode(self, texts: Sequence[Sequence[str]]) -> Texts:
        """The ids of texts that are lists of sentences, a BREAK before each sentence."""
        lines = [sentence.replace("\n", " ") for text in texts for sentence in text]
        joined = " \n ".join(["", *lines])
        words: Sequence[Word]
        if self.tokenizer == "rouge":
            words = rouge_words(joined, _BROKEN_TABLE)
        else:
            words = unicode_words(joined, _BROKEN_TOKEN)
        tokens = np.fromiter(map(self.__getitem__, words), np.int64, len(words))
        breaks = np.append(np.flatnonzero(tokens == BREAK), len(tokens))
        starts = breaks[np.cumsum([0, *map(len, texts)])]
        return Texts.of(tokens, np.diff(starts))
