"""Tokenizers of single symbols, for sources and targets: from lists in a model's configuration, or of training text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from seqreg.errors import BadInput, nearest
from seqreg.workbench.config.settings import CHARACTERS, VOCABULARY, Model
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.tokenizers import SPECIAL, TwoTokenizers, symbol_tokenizer
from seqreg.workbench.text.terminal import say

_PLAIN = {SPECIAL[name]: number for number, name in enumerate(("pad_token", "bos_token", "eos_token", "unk_token"))}
"""Ids of special tokens where no model has them yet."""


def symbol_tokenizers(chosen: Model, settings: Any, examples: Sequence[Example]) -> TwoTokenizers:
    """The tokenizers of sources and targets.

    Args:
        chosen: whose `tokenizer` and `target_tokenizer` are "characters", or "vocabulary:KEY"
        settings: transformers' configuration of the model, which has the vocabularies; None for one from scratch
        examples: for training; symbols of their targets that a vocabulary lacks get ids that neither side uses
    """
    names = (chosen.tokenizer or CHARACTERS, chosen.target_tokenizer or chosen.tokenizer or CHARACTERS)
    if settings is None:
        texts = ([row.source for row in examples], [row.target or "" for row in examples])
        return TwoTokenizers(*(_of_characters(some) for some in texts))
    keys = ("model.tokenizer", "model.target_tokenizer")
    listed = [_listed(settings, chosen, key, name) for key, name in zip(keys, names, strict=True)]
    special = _special_ids(settings, listed, chosen)
    sides = [
        {
            symbol: number
            for number, symbol in enumerate(some)
            if number not in special.values() and some.count(symbol) == 1
        }
        for some in listed
    ]
    characters = [isinstance(some, str) for some in listed]
    first = max(*map(len, listed), special[SPECIAL["unk_token"]] + 1)
    _add_missing(sides[1], characters[1], settings, first, examples, names[1])
    return TwoTokenizers(
        *(symbol_tokenizer(side, special, characters=way) for side, way in zip(sides, characters, strict=True))
    )


def _of_characters(texts: Iterable[str]) -> Any:
    """A tokenizer of all characters of some texts."""
    found = sorted({character for text in texts for character in text})
    symbols = {symbol: number for number, symbol in enumerate(found, start=len(_PLAIN))}
    return symbol_tokenizer(symbols, _PLAIN, characters=True)


def _listed(settings: Any, chosen: Model, key: str, name: str) -> str | list[str]:
    """The vocabulary that a model's configuration has under a name: a text of characters, or a list of symbols."""
    wanted = name.removeprefix(VOCABULARY)
    listed = getattr(settings, wanted, None)
    is_list = isinstance(listed, list) and all(
        isinstance(symbol, str) and symbol.split() == [symbol] for symbol in listed
    )
    if not listed or not (isinstance(listed, str) or is_list):
        have = [other for other, value in vars(settings).items() if isinstance(value, (str, list)) and len(value) > 9]
        raise BadInput(
            f"{key}={name}: {chosen.name} has no text or list of symbols {wanted!r} in its config.json; "
            f"{nearest(wanted, have)}"
        )
    if len(listed) > settings.vocab_size:
        raise BadInput(f"{key}={name}: {len(listed)} symbols, and the model embeds {settings.vocab_size}")
    return list(listed) if is_list else str(listed)


def _special_ids(settings: Any, listed: Sequence[Sequence[str]], chosen: Model) -> dict[str, int]:
    """Ids of special tokens: the model's. That of unknown symbols, where it has none: the first place that both sides
    leave open by repeating a symbol, or the first id that neither uses.
    """
    special: dict[str, int] = {}
    for name in ("bos_token", "pad_token", "eos_token"):
        number = getattr(settings, f"{name}_id", None)
        if not isinstance(number, int):
            raise BadInput(f"{chosen.name}: no {name}_id in its config.json, which a tokenizer of symbols needs")
        special[SPECIAL[name]] = number
    shared = range(min(map(len, listed)))
    spare = [n for n in shared if n not in special.values() and all(some.count(some[n]) > 1 for some in listed)]
    unknown = getattr(settings, "unk_token_id", None)
    free = [*spare, *range(max(map(len, listed)), settings.vocab_size)]
    if not isinstance(unknown, int) and not free:
        raise BadInput(
            f"{chosen.name}: its vocabularies leave no id for symbols that are not in them: set unk_token_id"
        )
    special[SPECIAL["unk_token"]] = unknown if isinstance(unknown, int) else free[0]
    return special


def _add_missing(
    symbols: dict[str, int], characters: bool, settings: Any, first: int, examples: Sequence[Example], name: str
) -> None:
    """Give symbols of training targets that a vocabulary lacks the ids from `first`, and say so."""
    texts = (row.target or "" for row in examples)
    seen = {symbol for text in texts for symbol in (text if characters else text.split())}
    missing = sorted(seen - symbols.keys())
    free = range(first, settings.vocab_size)
    if len(missing) > len(free):
        raise BadInput(
            f"model.target_tokenizer={name}: {len(missing)} symbols of the training targets are not in it "
            f"({' '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}), and the model has {len(free)} ids that "
            "nothing uses: clean the targets, or choose another model"
        )
    if missing:
        say(
            f"{name}: {len(missing)} symbols of the training targets are not in it ({' '.join(missing)}): they get the "
            f"ids {free[0]} to {free[len(missing) - 1]}, which the model has not been trained on"
        )
    symbols.update(zip(missing, free, strict=False))
