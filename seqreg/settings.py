"""Settings as frozen dataclasses: checked when they are made, and merged where one holds another."""

from __future__ import annotations

import sys
import types
import typing
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from seqreg.errors import BadInput, check_keys, nearest, yaml_hint


class _Checked(ABCMeta):
    """Construction of settings: expands `preset`, merges settings that are held, and answers misspelt ones."""

    def __call__(cls, *values: Any, **given: Any) -> Any:
        kind = typing.cast("type[Settings]", cls)
        if values:
            example = f"{'weight' if hasattr(kind, 'weight') else fields(kind)[0].name}={values[0]!r}"
            raise BadInput(f"{cls.__name__} takes its settings by name, such as {cls.__name__}({example})")
        preset = given.get("preset")
        if preset is not None and (not isinstance(preset, str) or preset not in kind.presets):
            hint = nearest(str(preset), kind.presets) if kind.presets else "it has none"
            raise BadInput(f"{cls.__name__}: unknown preset {preset!r}; {hint}", key="preset", value=preset)
        of_preset = {} if preset is None else kind.presets[preset]
        _check_places(kind, given)
        settings = {**of_preset, **given}
        owner = given.get("name") or cls.__name__.lower()
        for f in fields(kind):
            if isinstance(f.default, Settings):
                settings[f.name] = _merged(
                    f"{owner}: {f.name}", f.default, of_preset.get(f.name, {}), given.get(f.name, {})
                )
            elif f.default is MISSING and f.default_factory is MISSING and f.name not in settings:
                raise BadInput(f"{cls.__name__}: the setting {f.name!r} is missing", key=f.name)
        made = super().__call__(**settings)
        object.__setattr__(made, "_given", given)
        return made


@dataclass(frozen=True, kw_only=True)
class Settings(metaclass=_Checked):
    """Base of terms and of what they hold: frozen dataclasses whose fields are their settings everywhere."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of defaults."""
    _given: ClassVar[Mapping[str, Any]] = {}
    _place: ClassVar[str] = ""

    def __post_init__(self) -> None:
        try:
            hints = typing.get_type_hints(type(self))
        except NameError:  # an annotation that exists for type checkers only says nothing here
            return
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "weight" and not _fits(value, hints[f.name]):
                self.refuse(f.name, _expected(value, hints[f.name]))

    def settings(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        return _differing(self, {f.name: f.default for f in fields(self)})

    def refuse(self, setting: str, fix: str) -> typing.NoReturn:
        """Raise for a bad setting: one line that names it, its value and the fix."""
        value = getattr(self, setting)
        place = self._place or f"{getattr(self, 'name', type(self).__name__.lower())}: "
        raise BadInput(f"{place}{setting}={value!r}: {fix}", key=setting, value=value, fix=fix)

    def _changed(self, **changes: Any) -> Self:
        """A copy with other values of some settings, in the same place."""
        other = replace(self, **changes)
        object.__setattr__(other, "_place", self._place)
        return other


def held(settings: Settings) -> list[Settings]:
    """The settings that are held in others."""
    return [value for f in fields(settings) if isinstance(value := getattr(settings, f.name), Settings)]


def _check_places(kind: type[Settings], given: Mapping[str, Any]) -> None:
    """Refuse an unknown setting; one that belongs to held settings is answered with its place."""
    known = [f.name for f in fields(kind)]
    for f in fields(kind):
        inner = [one.name for one in fields(f.default)] if isinstance(f.default, Settings) else []
        for key, value in given.items():
            if key in inner and key not in known:
                fix = f"the setting is in {f.name}: write {f.name}.{key}={value}, in YAML {f.name}: {{{key}: {value}}}"
                raise BadInput(f"{kind.__name__}: {key}={value!r}: {fix}", key=key, value=value, fix=fix)
    check_keys(kind.__name__, given, known)


def _merged(place: str, default: Settings, *layers: object) -> Settings:
    """Held settings: the default of their owner, changed by what a preset and a user have given."""
    owner, _, name = place.partition(": ")
    values = {f.name: getattr(default, f.name) for f in fields(default)}
    for layer in layers:
        if not isinstance(layer, (type(default), Mapping)):
            example = f"{{{fields(default)[0].name}: {getattr(default, fields(default)[0].name)}}}"
            fix = f"expected a mapping of settings, such as {example}"
            raise BadInput(f"{owner}: {name}={layer!r}: {fix}", key=name, value=layer, fix=fix)
        changes = layer._given if isinstance(layer, Settings) else layer
        for key in changes:
            if key not in values:
                raise BadInput(f"{place}: unknown setting {key!r}; {nearest(str(key), values)}", key=f"{name}.{key}")
        values |= changes
    try:
        made = type(default)(**values)
    except BadInput as error:
        line = f"{place}.{error.key}={error.value!r}: {error.fix}"
        raise BadInput(line, key=f"{name}.{error.key}", value=error.value, fix=error.fix) from None
    object.__setattr__(made, "_place", f"{place}.")
    return made


def _differing(settings: Settings, defaults: Mapping[str, Any]) -> dict[str, Any]:
    differing: dict[str, Any] = {}
    for f in fields(settings):
        value, default = getattr(settings, f.name), defaults[f.name]
        if value == default or (f.name, value) == ("name", type(settings).__name__.lower()):
            continue
        inner = isinstance(value, Settings) and isinstance(default, Settings)
        differing[f.name] = _differing(value, vars(default)) if inner else value
    return differing


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) and hint is not Any else True


def _expected(value: object, hint: Any) -> str:
    if get_origin(hint) is Literal:
        return nearest(str(value), [str(option) for option in get_args(hint)])
    names = {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}
    hinted = yaml_hint(value) if hint is float and isinstance(value, str) else ""
    return f"expected {names.get(hint, hint)}{hinted}"
