"""Terms, tasks, recipes and runs, shown."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from seqreg.errors import BadInput, nearest
from seqreg.workbench.config import cards, lookup, overlay
from seqreg.workbench.scores.results import score_table, scores_of
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import print_json

out = Console(highlight=False, markup=False)


TITLES = {
    "recipes": "recipes: seqreg train NAME",
    "tasks": "tasks: seqreg train RECIPE task=NAME",
    "terms": "terms: seqreg train RECIPE --terms NAME",
}


def show_list(what: str | None, *, as_json: bool = False) -> None:
    """Print what there is, with a line about each."""
    makers = {"recipes": _recipes, "tasks": _tasks, "terms": _terms}
    found = {name: make() for name, make in makers.items() if what in (None, name)}
    if as_json:
        print_json(found)
        return
    for name, entries in found.items():
        table = Table(title=TITLES[name])
        for column in entries[0]:
            table.add_column(column, overflow="fold")
        for entry in entries:
            table.add_row(*(value if isinstance(value, str) else " ".join(value) for value in entry.values()))
        out.print(table)


Entry = dict[str, str | list[str]]
"""A line of a list, by column."""


def _recipes() -> list[Entry]:
    found: list[Entry] = []
    for name in lookup.names("recipes"):
        path = lookup.find("recipes", name)
        variants = list(overlay.read(path).get("variants", {}))
        found.append({"name": name, "what": lookup.header(path).splitlines()[0], "variants": variants})
    return found


def _tasks() -> list[Entry]:
    found: list[Entry] = []
    for name in lookup.names("tasks"):
        card, _ = cards.load(name)
        columns = [
            value if isinstance(value, str) else value[0] for value in card.columns.model_dump().values() if value
        ]
        found.append({"name": name, "what": card.title, "metric": list(card.metric), "columns": columns})
    return found


def _terms() -> list[Entry]:
    files = {name: lookup.find("recipes/terms", name) for name in lookup.names("recipes/terms")}
    return [{"name": name, "what": lookup.header(path).splitlines()[0]} for name, path in files.items()]


def show(names: Sequence[str], *, as_json: bool = False) -> None:
    """Print runs side by side, and everything else one after the other."""
    folders = [name for name in names if Path(name).is_dir()]
    others = {name: _files(name) for name in names if name not in folders}
    runs = _runs(folders)
    if as_json:
        print_json({"files": others, "runs": runs})
        return
    for files in others.values():
        for title, text in files.items():
            out.rule(title)
            coloured = out.is_terminal and title.endswith(".yaml")
            shown = Syntax(text, "yaml", background_color="default", word_wrap=True) if coloured else text
            out.print(shown, soft_wrap=True)
    if runs:
        _show_runs(runs)


def _files(name: str) -> dict[str, str]:
    """The texts of the files that a name stands for."""
    found: dict[str, str] = {}
    for kind in ("recipes", "tasks", "recipes/terms"):
        if name in lookup.names(kind):
            path = lookup.find(kind, name)
            found[str(path)] = path.read_text(encoding="utf-8")
    if name in lookup.names("recipes/terms") and name != "r4f":
        from seqreg.build import term_class

        found[f"seqreg/terms/{name}.py"] = inspect.getdoc(term_class(name)) or ""
    if not found:
        known = {*lookup.names("recipes"), *lookup.names("tasks"), *lookup.names("recipes/terms")}
        raise BadInput(f"{name!r} is no term, task, recipe or folder; {nearest(name, known)}")
    return found


def _runs(folders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The scores of runs by folder."""
    for name in folders:
        inside = sorted(path.parent.name for path in Path(name).glob("*/metrics.json"))
        if inside and not (Path(name) / "metrics.json").is_file():
            raise BadInput(f"{name}: holds runs, and is none: name one or several: {' '.join(inside)}")
    return {name: scores_of(Path(name)) for name in folders}


def _show_runs(runs: dict[str, dict[str, Any]]) -> None:
    short = {name: metrics.get("method", name) for name, metrics in runs.items()}
    unique = len(set(short.values())) == len(short)
    out.print(score_table({short[name] if unique else name: metrics for name, metrics in runs.items()}))
    first = Path(next(iter(runs)))
    out.print(f"Curves: tensorboard --logdir {plain(first.parent if len(runs) > 1 else first)}")
