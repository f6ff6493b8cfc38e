"""Settings from several YAML files on top of each other: the last one wins, and the origin of every value is known."""

from __future__ import annotations

import json
import unicodedata
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any

from seqreg.errors import Advice, BadInput
from seqreg.integrations.strict_yaml import dump, parse, read
from seqreg.workbench.config.other_names import current, current_settings

__all__ = ["Overlay", "assigned", "assigned_key", "dump", "parse", "read"]


def assigned(key: str, value: object) -> str:
    """`key=value` for a path or a name, whatever is in it: in quotes where YAML would read something else.

    >>> assigned("output", "runs/a"), assigned("output", "runs/a #2")
    ('output=runs/a', 'output="runs/a #2"')
    """
    text = str(value)
    try:
        same = parse(text, key) == text
    except BadInput:
        same = False
    return f"{key}={text if same else json.dumps(text, ensure_ascii=False)}"


def assigned_key(assignment: str) -> str:
    """The key of a `key=value`, as it is called now.

    >>> assigned_key("data.share=0.5")
    'data.train_fraction'
    """
    return current(assignment.partition("=")[0].strip())


def _renamed(values: Mapping[str, Any], origin: str, prefix: str) -> dict[str, Any]:
    """Settings below a prefix as they are called now. A retired name is answered, or refused beside its new one."""
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        now = {key.removeprefix(prefix): part for key, part in current_settings({f"{prefix}{name}": value}).items()}
        if name not in now:
            if both := [key for key in now if key in values]:
                raise BadInput(f"{origin}: {prefix}{name}: now {both[0]}, which is set too: leave one of them out")
            warnings.warn(f"{origin}: {prefix}{name}: now {' and '.join(now)}", Advice, stacklevel=4)
        renamed |= now
    return renamed


def _as_text(text: str, where: str) -> Any:
    """The value of a setting that is text: only quotation marks, null and numbers mean what they mean in YAML.

    >>> _as_text("summarize: ", "here"), _as_text("'a'", "here"), _as_text("null", "here"), _as_text("5", "here")
    ('summarize: ', 'a', None, 5)
    """
    control = any(unicodedata.category(letter) in ("Cc", "Cs") and letter not in "\t\n" for letter in text)
    if control or text.strip() in ("", "null", "~") or text.strip()[0] in "\"'":
        return parse(text, where)
    try:
        value = parse(text, where)
    except BadInput:
        return text
    return value if isinstance(value, (bool, int, float)) else text


class Overlay:
    """Nested settings, and the place in which each was set last."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def add(self, values: Mapping[str, Any], origin: str) -> None:
        """Put `values` on top. Mappings are merged, but a schedule of a weight or another update replaces the last."""
        self._merge(self.values, values, origin, "")

    def _merge(self, into: dict[str, Any], values: Mapping[str, Any], origin: str, prefix: str) -> None:
        for key, value in _renamed(values, origin, prefix).items():
            path = f"{prefix}{key}"
            if isinstance(value, Mapping) and ("schedule" not in value or path == "optimisation"):
                if path == "optimisation.update" and value and not value.keys() & (into.get(key) or {}).keys():
                    self.remove(path)
                if not isinstance(into.get(key), dict):
                    into[key], self.origins[path] = {}, origin
                self._merge(into[key], value, origin, f"{path}.")
            else:
                into[key] = dict(value) if isinstance(value, Mapping) else value
                self.origins[path] = origin

    def remove(self, key: str) -> None:
        """Take a dotted key out again, if it is there."""
        *outer, last = key.split(".")
        values: Any = self.values
        for part in outer:
            values = values.get(part) if isinstance(values, dict) else None
        if isinstance(values, dict):
            values.pop(last, None)
        self.origins = {path: origin for path, origin in self.origins.items() if not f"{path}.".startswith(f"{key}.")}

    def set(
        self, assignment: str, origin: str = "command line", *, under: Sequence[str] = (), texts: Container[str] = ()
    ) -> None:
        """Apply one `dotted.key=value`, below the keys `under`.

        The value is read as YAML, but as it stands if the key is one of `texts`.
        """
        key, equals, text = assignment.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise BadInput(f"{assignment!r}: expected key=value, such as optimisation.max_steps=100")
        where = f"{origin}: {key}"
        value: Any = _as_text(text, where) if current(key.strip()) in texts else parse(text, where)
        for part in reversed([*under, *parts]):
            value = {part: value}
        self.add(value, origin)

    def origin(self, key: str) -> str:
        """Where a dotted key, or the nearest mapping around it, was set."""
        outer = key
        while outer:
            if outer in self.origins:
                return self.origins[outer]
            outer = outer.rpartition(".")[0]
        inside = [origin for path, origin in self.origins.items() if path.startswith(f"{key}.")]
        return inside[-1] if inside else "defaults"
