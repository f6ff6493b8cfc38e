"""Methods as the command line names them: recipes of terms, each with settings of its own, under a name."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from seqreg.errors import BadInput

BASELINE = "baseline"
_NAME = re.compile(r"\w[\w.+=-]{0,99}")
_NEXT_RECIPE = re.compile(r"\+(?=[A-Za-z_./~])")  # and not the + of 1e+3
_NEXT_SETTING = re.compile(r",(?=[\w.]+=)")  # and not a comma inside a value
_FOLDERS = ("evidence", "search")
_HOW = "expected [NAME=]RECIPE[:key=value,...], such as r3f, r3f:weight=1.0, strong=r3f:weight=1.0 or r3f+rdrop"


@dataclass(frozen=True)
class MethodPart:
    """One recipe of terms, by name or path, and settings of its own: `key=value`."""

    recipe: str
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.recipe + (":" + ",".join(self.settings) if self.settings else "")

    @property
    def label(self) -> str:
        """For tables and folders."""
        path = Path(self.recipe)
        stem = path.stem if path.suffix in (".yaml", ".yml") else path.name
        return "-".join([stem, *self.settings])


@dataclass(frozen=True)
class MethodSpec:
    """What is trained, and what it is called; the baseline has one part of its name and no terms."""

    name: str
    parts: tuple[MethodPart, ...]


def parse(text: str) -> MethodSpec:
    """A method from one word of the command line.

    >>> print(*parse("strong=r3f:weight=1.0,scale=0.1+rdrop").parts)
    r3f:weight=1.0,scale=0.1 rdrop
    >>> parse("r3f:weight=1e+3").name, parse("some/where/mine.yaml").name
    ('r3f-weight=1e+3', 'mine')
    """
    name, equals, rest = text.partition("=")
    if not equals or ":" in name or not _NAME.fullmatch(name):
        name, rest = "", text
    parts = []
    for part in _NEXT_RECIPE.split(rest):
        recipe, colon, given = part.partition(":")
        settings = _NEXT_SETTING.split(given) if given else []
        if not recipe or (colon and not settings) or not all("=" in setting for setting in settings):
            raise BadInput(f"--terms {text}: {_HOW}")
        parts.append(MethodPart("baseline" if recipe == "none" else recipe, tuple(settings)))
    name = name or "+".join(part.label for part in parts)
    if not _NAME.fullmatch(name) or name in _FOLDERS:
        raise BadInput(f"--terms {text}: {name!r} cannot name a folder: give the method a name, such as mine={rest}")
    if name == BASELINE and parts != [MethodPart(BASELINE)]:
        raise BadInput(f"--terms {text}: {BASELINE!r} is what has no terms: give the method another name: mine={rest}")
    return MethodSpec(name, tuple(parts))


def several(texts: Sequence[str]) -> dict[str, str]:
    """Methods by name, as they were given; two that would have one name are refused."""
    chosen: dict[str, str] = {}
    for text in texts:
        method = parse(text)
        if parse(chosen.setdefault(method.name, text)).parts != method.parts:
            raise BadInput(
                f"--terms {chosen[method.name]} and --terms {text}: both would be called {method.name!r}: "
                "give one another name, such as mine=r3f"
            )
    return chosen


def term_of(setting: str) -> str | None:
    """The term that a setting is about; None if it is about something else.

    >>> term_of("terms.r3f.weight=1"), term_of("seed=3")
    ('r3f', None)
    """
    first, _, rest = setting.partition("=")[0].strip().partition(".")
    return rest.partition(".")[0] if first == "terms" else None


def reaching(settings: Sequence[str], terms: Collection[str]) -> list[str]:
    """The settings that are meant for a method of these terms: all but those of terms that it does not have."""
    return [setting for setting in settings if term_of(setting) in (None, *terms)]


def check_reach(settings: Sequence[str], terms: Collection[str]) -> None:
    """Refuse settings of several methods that reach none of them, or that would make one of them another."""
    for setting in settings:
        name, value = term_of(setting), setting.partition("=")[2].strip()
        if name == "" or (name is not None and value in ("null", "~", "")):
            raise BadInput(f"{setting}: it would make methods what their names do not say: name other --terms instead")
        if name is not None and name not in terms:
            raise BadInput(f"{setting}: no method has the term {name!r}: add --terms {name}")
