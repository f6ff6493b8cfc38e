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
from seqreg.workbench import cards, catalogue, layers
from seqreg.workbench.tables import score_table, scores_of
from seqreg.workbench.untrusted import plain

out = Console(highlight=False, markup=False)


def show_list(what: str | None) -> None:
    """Print what there is, with a line about each."""
    tables = {"recipes": _recipes, "tasks": _tasks, "terms": _terms}
    for name, make in tables.items():
        if what in (None, name):
            out.print(make())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _recipes() -> Table:
    table = _table("recipes: seqreg train NAME", "name", "what", "variants")
    for name in catalogue.names("recipes"):
        path = catalogue.find("recipes", name)
        variants = layers.read(path).get("variants", {})
        table.add_row(name, catalogue.header(path).splitlines()[0], " ".join(variants))
    return table


def _tasks() -> Table:
    table = _table("tasks: seqreg train RECIPE task=NAME", "name", "what", "metric", "columns")
    for name in catalogue.names("tasks"):
        card, _ = cards.load(name)
        columns = [
            value if isinstance(value, str) else value[0] for value in card.columns.model_dump().values() if value
        ]
        table.add_row(name, card.title, " ".join(card.metric), " ".join(columns))
    return table


def _terms() -> Table:
    table = _table("terms: seqreg train RECIPE --terms NAME", "name", "what")
    for name in catalogue.names("recipes/terms"):
        table.add_row(name, catalogue.header(catalogue.find("recipes/terms", name)).splitlines()[0])
    return table


def show(names: Sequence[str]) -> None:
    """Print runs side by side, and everything else one after the other."""
    folders = [name for name in names if Path(name).is_dir()]
    for name in names:
        if name not in folders:
            _show_one(name)
    if folders:
        _show_runs(folders)


def _show_one(name: str) -> None:
    found: list[tuple[str, Any]] = []
    for kind in ("recipes", "tasks", "recipes/terms"):
        if name in catalogue.names(kind):
            path = catalogue.find(kind, name)
            found.append(
                (
                    str(path),
                    Syntax(path.read_text(encoding="utf-8"), "yaml", background_color="default", word_wrap=True),
                )
            )
    if name in catalogue.names("recipes/terms") and name != "r4f":
        from seqreg.build import term_class

        found.append((f"seqreg/terms/{name}.py", inspect.getdoc(term_class(name)) or ""))
    if not found:
        known = {*catalogue.names("recipes"), *catalogue.names("tasks"), *catalogue.names("recipes/terms")}
        raise BadInput(f"{name!r} is no term, task, recipe or folder; {nearest(name, known)}")
    for title, text in found:
        out.rule(title)
        out.print(text if isinstance(text, str) or out.is_terminal else text.code, soft_wrap=True)


def _show_runs(folders: Sequence[str]) -> None:
    for name in folders:
        inside = sorted(path.parent.name for path in Path(name).glob("*/metrics.json"))
        if inside and not (Path(name) / "metrics.json").is_file():
            raise BadInput(f"{name}: holds runs, and is none: name one or several: {' '.join(inside)}")
    runs = {name: scores_of(Path(name)) for name in folders}
    short = {name: metrics.get("method", name) for name, metrics in runs.items()}
    unique = len(set(short.values())) == len(short)
    out.print(score_table({short[name] if unique else name: metrics for name, metrics in runs.items()}))
    above = Path(folders[0]).parent if len(folders) > 1 else Path(folders[0])
    out.print(f"Curves: tensorboard --logdir {plain(above)}")
