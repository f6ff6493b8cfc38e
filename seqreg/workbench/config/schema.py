"""The base of all settings: unknown keys and wrong types are refused, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seqreg.errors import BadInput, nearest
from seqreg.workbench.config.other_names import meant
from seqreg.workbench.text.readers import is_utf16

_TAG = re.compile(r"constrained-\w+|(list|dict|function-\w+)\[.*\]")
"""What pydantic puts into the place of a fault where a key may have several types: no key."""
LARGEST = 2**31 - 1
"""Of whole numbers: what every library below can take."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Few = Annotated[int, Field(ge=0, le=256)]
"""Processes and beams: what one machine can start or hold of something large."""
Length = Annotated[int, Field(ge=1, le=1_000_000)]
"""Tokens of a text, examples in a batch."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A group of settings. A "1" is not a 1, and what is not listed does not exist."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=True, frozen=True)
    known_elsewhere: ClassVar[bool] = False
    """Whether its keys have names in other libraries: see `other_names`."""

    def updated(self, **values: Any) -> Self:
        """A copy with other values; unlike pydantic's `model_copy`, a key that does not exist is an error."""
        unknown = values.keys() - type(self).model_fields.keys()
        if unknown:
            raise KeyError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=values)


S = TypeVar("S", bound=Section)


def checked(section: type[S], values: Any, origin: Callable[[str], str]) -> S:
    """A section from plain values, or one line about the first fault: where it was set, the key, the value, the fix.

    Args:
        origin: where a dotted key was set
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False)  # a misspelt key first: it may be why another is missing or wrong
        fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
        raise BadInput(_message(section, fault, origin)) from None


def _message(section: type[Section], fault: Any, origin: Callable[[str], str]) -> str:
    """One line about a fault that pydantic reports."""
    path = [str(part) for part in fault["loc"] if not _TAG.fullmatch(str(part))]
    value = fault["input"]
    key = ".".join(path)
    if fault["type"] == "extra_forbidden":
        other = meant(key) if section.known_elsewhere else None
        hint = f"did you mean {other!r}?" if other else nearest(path[-1], _keys(section, path[:-1]))
        return f"{origin(key)}: {key}={value!r}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"{origin(key)}: {key} is missing"
    message = fault["msg"].removeprefix("Value error, ")
    message = re.sub("[Ii]nput should be", "expected", message[0].lower() + message[1:]).replace(
        " after validation", ""
    )
    if isinstance(value, dict) and fault["type"] == "value_error":  # about several keys: values are in the message
        named = [_spelt_out(".".join([*path, name]), message) for name in value if name in message]
        where = " and ".join(dict.fromkeys(map(origin, named))) or origin(key)
        return f"{where}: {message}"
    return f"{origin(key)}: {key}={value!r}: {message}"


def _spelt_out(path: str, message: str) -> str:
    """A dotted key as far as a message spells it out: `model.settings.d_model` for `model.settings`."""
    match = re.search(rf"\b{re.escape(path)}(\.\w+)*", message)
    return match.group() if match else path


def _keys(section: type[Section] | None, path: list[str]) -> list[str]:
    """The keys of the section at a path."""
    for part in path:
        if section is not None and part in section.model_fields:
            section = _section_in(section.model_fields[part].annotation)
    return sorted(section.model_fields) if section is not None else []


def _section_in(annotation: Any) -> type[Section] | None:
    """The section inside an annotation such as `Hub | None` or `list[Replace]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def texts(section: type[Section], prefix: str = "") -> set[str]:
    """The dotted keys of all settings that are text."""
    keys: set[str] = set()
    for name, field in section.model_fields.items():
        if field.annotation in (str, str | None):
            keys.add(f"{prefix}{name}")
        elif (inner := _section_in(field.annotation)) is not None:
            keys |= texts(inner, f"{prefix}{name}.")
    return keys


def one_character(delimiter: str, option: str = "") -> str:
    r"""A delimiter of cells, with the two characters \t as the tab that they stand for; refuses one that cannot be.

    Args:
        option: of a command that it was given with; pydantic names settings itself
    """
    character = "\t" if delimiter == r"\t" else delimiter
    if len(character) != 1 or character in '\n\r"':
        raise BadInput(f"{option} {delimiter!r}: " * bool(option) + r"expected one character, such as ; or \t")
    return character


def known_encoding(encoding: str, option: str = "") -> str:
    """The encoding of a text file: UTF-16, or one in which lines and commas are where they are in ASCII."""
    try:
        known = is_utf16(encoding) or "\n,".encode(encoding) == b"\n,"
    except (LookupError, ValueError):  # also codecs that are none of text
        known = False
    if not known:
        raise BadInput(
            f"{option} {encoding!r}: "
            * bool(option)
            + "expected utf-8, latin-1, cp1252 or the like; a file in UTF-16 is "
            "told by its first bytes, and needs none"
        )
    return encoding
