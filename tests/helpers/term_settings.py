"""Settings of any term, with those of its attack where they belong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from seqreg import Ascent, Term, build_term
from seqreg.build import term_class


def placed(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a term: what an `Ascent` has, and the term has not, is put under `attack`."""
    own = {field.name for field in fields(term_class(name))}
    inner = {field.name for field in fields(Ascent)} - own if "attack" in own else set()
    attack = {key: value for key, value in settings.items() if key in inner}
    rest = {key: value for key, value in settings.items() if key not in inner}
    return {**rest, "attack": attack} if attack else rest


def built(name: str, settings: Mapping[str, Any]) -> Term:
    return build_term(name, placed(name, settings))


def dropout_of(term: Any) -> str:
    """The dropout masks of the further passes of a term that has the setting."""
    return str(getattr(term, "attack", term).dropout)
