"""YAML read strictly: plain values as in YAML 1.2, and one line about what is wrong with a file.

It is an integration, of PyYAML: the fairseq plug-in reads its settings with it, and the workbench its recipes.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from seqreg.errors import BadInput

LIMIT = 1_000_000
"""Bytes of a file that is certainly not a recipe."""
DEPTH = 20
"""Mappings and lists inside each other; a recipe has five."""
MOST = 50_000
"""Values of a file, which take seconds to read; a recipe has a hundred."""

_BROKEN = re.compile("[\0\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: 1e-5 is a number, `no` and 12:30 are text. No aliases, tags or duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML keeps them there
    depth = count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        tag, fault = getattr(event, "tag", None), ""
        self.count += 1
        if isinstance(event, yaml.AliasEvent):
            fault = "aliases are not allowed"
        elif tag is not None:
            fault = f"the tag {tag!r} is not allowed"
        elif self.depth == DEPTH:
            fault = f"more than {DEPTH} levels deep"
        elif self.count > MOST:
            fault = f"more than {MOST:,} values"
        if fault:
            raise ComposerError(None, None, fault, event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        if isinstance(text, str) and _BROKEN.search(text):
            raise ConstructorError(None, None, "a text has a NUL or half a character", node.start_mark)
        return text

    def construct_yaml_int(self, node: Any) -> Any:
        value = super().construct_yaml_int(node)
        if abs(value) >= 1 << 63:
            raise ConstructorError(None, None, "a whole number of more than 63 bits", node.start_mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            fault = "is not text" if not isinstance(key, str) else "is twice" if key in keys else ""
            if fault:
                raise ConstructorError(None, None, f"the key {key!r} {fault}", key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("null", r"(?:~|null|)", ["~", "n", ""]),
    ("bool", r"(?:true|false)", list("tf")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+0123456789.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


@functools.lru_cache(maxsize=128)
def _loaded(text: str) -> Any:
    return yaml.load(text, _Loader)


def parse(text: str, where: str) -> Any:
    """One YAML document; `where` names it in errors."""
    try:
        return copy.deepcopy(_loaded(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise BadInput(f"{where}{line}: {what}") from None
    except RecursionError:  # the scanner itself, in thousands of brackets
        raise BadInput(f"{where}: more than {DEPTH} levels deep") from None
    except ValueError as error:
        raise BadInput(f"{where}: {str(error).partition(':')[0]}") from None


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        if path.exists() and not path.is_file():
            raise BadInput(f"{path}: not a file")
        with path.open("rb") as file:
            content = file.read(LIMIT + 1)
        text = content.decode("utf-8-sig") if len(content) <= LIMIT else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from None
    if len(content) > LIMIT:
        raise BadInput(f"{path}: larger than {LIMIT} bytes: is it a recipe?")
    values = parse(text, str(path))
    if values is not None and not isinstance(values, dict):
        raise BadInput(f"{path}: expected a mapping of keys to values, not {type(values).__name__}")
    return values or {}


class _Dumper(yaml.SafeDumper):
    """Writes every text that a YAML reader could take for something else in quotes."""


_PLAIN = re.compile(r"^[A-Za-z_/][\w ./<>+-]*$")
_WORDS = {"yes", "no", "on", "off", "y", "n", "true", "false", "null", "none"}


def _text(dumper: yaml.SafeDumper, value: str) -> Any:
    quoted = not _PLAIN.match(value) or value.lower() in _WORDS or value != value.strip()
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if quoted else None)


_Dumper.add_representer(str, _text)


def dump(values: Any) -> str:
    """YAML that `parse` reads back as it was."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text
