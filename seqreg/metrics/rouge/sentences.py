"""From a text to its sentences, for rougeLsum.

"newline" is rouge-score's own rule, one sentence per line. "punkt" is nltk's trained splitter, where its data is
installed. "rules" is the splitter below, which needs no data.
"""

# ruff: noqa: RUF001 - quotation marks and dashes of all kinds

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Literal

from seqreg.errors import BadInput

Split = Literal["auto", "newline", "punkt", "rules"]
SPLITS = ("auto", "newline", "punkt", "rules")

# A name or a number follows these, never a new sentence.
_BEFORE_NAMES = frozenset(
    """mr mrs ms mx dr prof gen sen rep gov st mt ft lt col sgt cpl capt cmdr maj adm rev hon pres supt insp messrs
    mme mlle fr atty e.g i.e cf vs viz al approx fig figs eq eqs sec ch vol pp ed eds trans art""".split()
)
# A number follows these: "No. 5", "pp. 3".
_BEFORE_NUMBERS = frozenset("no nos nr p pp vol art sec ch fig eq".split())
# These end a sentence only where the next word is one that often begins sentences.
_EITHER = frozenset(
    """inc corp co ltd llc plc bros dept univ assn jr sr esq etc jan feb mar apr jun jul aug sep sept oct nov dec mon
    tue tues wed thu thur thurs fri sat ave blvd rd hwy est ariz calif colo conn fla ga ill kan ky la mass md mich minn
    miss mo mont neb nev okla ore pa tenn tex va vt wash wis wyo""".split()
)
_STARTERS = frozenset(
    """the a an this that these those he she it they we i you his her its their our my your in on at for from with by as
    if when while after before since although though but and so yet however meanwhile then there here what who why how
    where not no one some many most all both each another other according also is are was were do does did""".split()
)

_OPEN, _CLOSE = "\"'“‘«([{¿¡", "\"'”’»)]}"
_END = re.compile(
    r"(?<![.!?…])(?P<mark>[.!?…]+)"
    rf"(?P<close>[{re.escape(_CLOSE)}]*(?:\s'')?)(?P<space>\s+)(?P<open>[{re.escape(_OPEN)}`\-–—]*\s?)"
    r"(?=(?P<next>[\w.'’]*))"
    r"|(?P<wide>[。！？｡।॥۔؟]+[”’」』）】]*)\s*"
)
_DOTTED = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}\Z")  # U.S, p.m, Ph.D; not example.com
_BETWEEN_WORDS = re.compile(r"[\s\"“”‘«»()\[\]{}—–]")
_LONGEST = 40  # characters that are looked at before a mark: longer than any abbreviation


def by_newline(text: str) -> list[str]:
    return [line for line in text.split("\n") if line]


def by_rules(text: str) -> list[str]:
    """Sentences by punctuation, capitals and lists of abbreviations; a line break always ends one.

    >>> by_rules('Mr. J. R. Smith paid $3.5 million. "Why?" she asked. He left at 5 p.m. The U.S. Army stayed...')
    ['Mr. J. R. Smith paid $3.5 million.', '"Why?" she asked.', 'He left at 5 p.m.', 'The U.S. Army stayed...']
    """
    return [sentence for line in text.splitlines() for sentence in _of_line(line) if sentence]


def _of_line(line: str) -> list[str]:
    lower = not any(map(str.isupper, line))  # lower-cased text, where a capital cannot tell
    sentences, start = [], 0
    for match in _END.finditer(line):
        if match["wide"]:
            stop = begin = match.end()
        elif _ends(line[max(start, match.start() - _LONGEST) : match.start()], match, lower):
            stop, begin = match.start("space"), match.end("space")
        else:
            continue
        sentences.append(line[start:stop].strip())
        start = begin
    return [*sentences, line[start:].strip()]


def _ends(before: str, match: re.Match[str], lower: bool) -> bool:
    """Whether a mark followed by a space ends the sentence whose last characters are `before`."""
    mark, following = match["mark"], match["next"]
    if following[:1].islower() and not lower:
        return False
    if mark != ".":
        continues = not mark.strip(".…") or match["close"].strip(")]}")  # "well ... no", '"why?" he said'
        return not (lower and continues)
    word = _BETWEEN_WORDS.split(before)[-1]  # "" before a full stop that stands alone, in tokenised text
    if word == before.strip() and word.isdigit():
        return False  # the number of a list
    name = word.lower().lstrip("'’")
    if name in _BEFORE_NUMBERS and following[:1].isdigit():
        return False
    if name in _BEFORE_NAMES:
        return False
    short = name in _EITHER or bool(_DOTTED.match(name)) or (word == "I" and not lower)
    if short:
        return following.lower().rstrip(".") in _STARTERS
    return not (len(word) == 1 and word.isalpha())  # an initial


@lru_cache(maxsize=1)
def _punkt() -> Callable[[str], list[str]]:
    """nltk's English punkt from data that is already on this machine; LookupError where there is none."""
    from nltk.tokenize.punkt import PunktTokenizer

    tokenize: Callable[[str], list[str]] = PunktTokenizer("english").tokenize
    return tokenize


def has_punkt() -> bool:
    try:
        _punkt()
    except (LookupError, ImportError):
        return False
    return True


def by_punkt(text: str) -> list[str]:
    return list(_punkt()(text))


_SPLITTERS: dict[str, Callable[[str], list[str]]] = {"newline": by_newline, "punkt": by_punkt, "rules": by_rules}


def choose_split(split: Split, texts: Iterable[str]) -> tuple[str, Callable[[str], list[str]]]:
    """The name of the splitter that is really used, and the splitter."""
    name: str = split
    if split == "auto":
        several = any("\n" in text.strip() for text in texts)
        name = "newline" if several else "punkt" if has_punkt() else "rules"
    if name == "punkt" and not has_punkt():
        fix = "run `python -m nltk.downloader punkt_tab` and set NLTK_DATA, or take split='rules'"
        raise BadInput(f"split='punkt' needs nltk's punkt_tab data, which is not on this machine: {fix}")
    return name, _SPLITTERS[name]
