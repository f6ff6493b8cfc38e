"""Where recipes and task cards are: beside the package in a checkout, inside it once installed."""

from __future__ import annotations

import itertools
import os
import re
import warnings
from importlib import resources
from pathlib import Path
from typing import Literal

from seqreg.errors import Advice, BadInput, nearest
from seqreg.workbench.config.other_names import RETIRED_TASKS
from seqreg.workbench.text.atomic_files import inside

Kind = Literal["recipes", "tasks", "recipes/terms", "recipes/sizes"]
_TITLES = {"recipes": "recipe", "tasks": "task", "recipes/terms": "term recipe", "recipes/sizes": "size"}
_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*")


def folder(kind: Kind) -> Path:
    """The folder of one kind of YAML file."""
    package = Path(str(resources.files("seqreg")))
    for root in (package, package.parent):
        if (root / kind).is_dir():
            return root / kind
    raise BadInput(f"{package / kind} is missing: install seqreg again")


def names(kind: Kind) -> list[str]:
    """The names of all files of a kind, without endings."""
    root = folder(kind)
    paths = root.rglob("*.yaml") if kind == "tasks" else root.glob("*.yaml")
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in paths)


def find(kind: Kind, name: str) -> Path:
    """The file of a name, or of the path of a YAML file of your own."""
    if not isinstance(name, str) or not name:
        raise BadInput(f"{kind}: {name!r}: expected a name, such as {names(kind)[0]!r}")
    if name.endswith((".yaml", ".yml")):
        if not os.path.isfile(name):
            raise BadInput(f"{name}: no such file; or name one of {', '.join(names(kind))}")
        return Path(name)
    if kind == "tasks" and name in RETIRED_TASKS:
        warnings.warn(f"the task {name}: now {RETIRED_TASKS[name]}", Advice, stacklevel=2)
        name = RETIRED_TASKS[name]
    if not _NAME.fullmatch(name) or name not in names(kind):
        raise BadInput(f"unknown {_TITLES[kind]} {name!r}; {nearest(name, names(kind))} (or the path of a .yaml file)")
    path = inside(folder(kind), f"{name}.yaml")
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def header(path: Path) -> str:
    """The comment that a file opens with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return "\n".join(line[1:].removeprefix(" ") for line in lines)
