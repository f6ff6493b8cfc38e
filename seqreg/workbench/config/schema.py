"""What all settings have in common: unknown keys and wrong types are refused, in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from seqreg.errors import BadInput, nearest
from seqreg.workbench.config.other_names import meant

LARGEST = 2**31 - 1
"""Of whole numbers: what every library below can take."""
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Few = Annotated[int, Field(ge=0, le=256)]
"""Processes and beams: what one machine can start or hold of something large."""
Length = Annotated[int, Field(ge=1, le=1_000_000)]
"""Tokens of a text, rows of a batch."""
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
    """A section from plain values, or one line about the first fault: where it was set, the key, the value, the fix."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False)  # a misspelt key first: it may be why another is missing or wrong
        fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
        loc = [str(part) for part in fault["loc"]]
        key = ".".join(loc)
        where = origin(key)
        if fault["type"] == "extra_forbidden":
            other = meant(key) if section.known_elsewhere else None
            hint = f"did you mean {other!r}?" if other else nearest(loc[-1], _fields(section, loc[:-1]))
            raise BadInput(f"{where}: {key}={fault['input']!r}: unknown key; {hint}") from None
        if fault["type"] == "missing":
            raise BadInput(f"{where}: {key} is missing") from None
        message = fault["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:].replace("Input should be", "expected")
        message = message.replace("input should be", "expected").replace(" after validation", "")
        given = fault["input"]
        if isinstance(given, dict) and fault["type"] == "value_error":  # about several keys: values are in the message
            paths = [_written(".".join([*loc, name]), message) for name in given if name in message]
            where = " and ".join(dict.fromkeys(origin(path) for path in paths)) or where
            raise BadInput(f"{where}: {message}") from None
        raise BadInput(f"{where}: {key}={given!r}: {message}") from None


def _written(path: str, message: str) -> str:
    """A dotted key as far as a message spells it out: `model.settings.d_model` for `model.settings`."""
    found = re.search(rf"\b{re.escape(path)}(\.\w+)*", message)
    return found.group() if found else path


def _fields(section: Any, path: list[str]) -> list[str]:
    """The keys of the section at a path."""
    for part in path:
        field = section.model_fields.get(part) if _is_section(section) else None
        if field is not None:
            section = _inner(field.annotation)
        elif section is None:
            break
    return sorted(section.model_fields) if _is_section(section) else []


def texts(section: type[Section], prefix: str = "") -> set[str]:
    """The dotted keys of all settings that are text."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        inner = field.annotation
        if _is_section(inner):
            found |= texts(inner, f"{prefix}{name}.")  # type: ignore[arg-type]
        elif inner is str or inner == (str | None):
            found.add(f"{prefix}{name}")
    return found


def _inner(annotation: Any) -> Any:
    """The section inside an annotation such as `Hub | None` or `list[Replace]`."""
    if _is_section(annotation):
        return annotation
    if get_origin(annotation) is None:
        return None
    return next((found for part in get_args(annotation) if (found := _inner(part)) is not None), None)


def _is_section(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Section)
