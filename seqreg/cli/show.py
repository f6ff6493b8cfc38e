"""Commands that print: list, show, rouge, fairseq-dir."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer
from rich.syntax import Syntax
from rich.table import Table

from seqreg.cli.options import Json, out, print_result
from seqreg.errors import BadInput, nearest
from seqreg.workbench.config import cards, lookup, overlay
from seqreg.workbench.scores.results import (
    METRICS,
    difference_lines,
    made_with_of,
    other_scores_of,
    score_table,
    scores_of,
)
from seqreg.workbench.text import readers
from seqreg.workbench.text.atomic_files import regular
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import print_json

app = typer.Typer()
TITLES = {
    "recipes": "recipes: seqreg train NAME",
    "tasks": "tasks: seqreg train RECIPE task=NAME",
    "terms": "terms: seqreg train RECIPE --terms NAME",
}
Entry = dict[str, str | list[str]]
"""A line of a list, by column."""


@app.command("list")
def list_(
    what: Annotated[
        Optional[Literal["terms", "tasks", "recipes"]], typer.Argument(help="All of them by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List terms, tasks and recipes; `seqreg show NAME` prints details.

    seqreg list recipes
    """
    entries = {kind: _entries(kind) for kind in TITLES if what in (None, kind)}
    print_result(entries, *(_entry_table(kind, lines) for kind, lines in entries.items()), as_json=as_json)


def _entries(kind: str) -> list[Entry]:
    """Everything of a kind, with a line about each."""
    folder: Any = "recipes/terms" if kind == "terms" else kind
    return [_entry(kind, name, lookup.find(folder, name)) for name in lookup.names(folder)]


def _entry(kind: str, name: str, path: Path) -> Entry:
    if kind == "tasks":
        card, _ = cards.load(name)
        columns = [column if isinstance(column, str) else column[0] for _, column in card.columns if column]
        return {"name": name, "what": card.title, "metric": list(card.metric), "columns": columns}
    entry: Entry = {"name": name, "what": lookup.header(path).splitlines()[0]}
    return entry if kind == "terms" else {**entry, "variants": list(overlay.read(path).get("variants", {}))}


def _entry_table(kind: str, entries: list[Entry]) -> Table:
    table = Table(title=TITLES[kind])
    for column in entries[0]:
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(*(value if isinstance(value, str) else " ".join(value) for value in entry.values()))
    return table


@app.command()
def show(
    names: Annotated[list[str], typer.Argument(help="Terms, tasks, recipes, or output folders of finished runs.")],
    as_json: Json = False,
) -> None:
    """Show a term, a task or a recipe, or the scores of runs side by side.

    seqreg show r3f

    seqreg show runs/quickstart/baseline runs/quickstart/r3f
    """
    folders = [name for name in names if Path(name).is_dir()]
    files = {name: _files(name) for name in names if name not in folders}
    runs = {name: _scores(Path(name)) for name in folders}
    others = {name: other_scores_of(Path(name)) for name in folders}
    if as_json:
        print_json({"files": files, "runs": runs, "others": others})
        return
    for title, text in (item for texts in files.values() for item in texts.items()):
        out.rule(title)
        coloured = out.is_terminal and title.endswith(".yaml")
        shown = Syntax(text, "yaml", background_color="default", word_wrap=True) if coloured else text
        out.print(shown, soft_wrap=True)
    if runs:
        methods = [metrics.get("method", name) for name, metrics in runs.items()]
        titles = methods if len(set(methods)) == len(methods) else list(runs)
        columns = dict(zip(titles, runs.values(), strict=True))
        for title, name in zip(titles, folders, strict=True):
            columns |= {f"{title}, {other}": metrics for other, metrics in others[name].items()}
        out.print(score_table(columns))
        for title, metrics in columns.items():
            for line in difference_lines(made_with_of(metrics)):
                out.print(plain(f"{title}: {line}"), soft_wrap=True)
        folder = Path(folders[0]).parent if len(runs) > 1 else folders[0]
        out.print(f"Curves: tensorboard --logdir {plain(folder)}")


def _files(name: str) -> dict[str, str]:
    """The texts of the files that a name stands for."""
    texts: dict[str, str] = {}
    kinds: tuple[Any, ...] = ("recipes", "tasks", "recipes/terms")
    for kind in kinds:
        if name in lookup.names(kind):
            path = lookup.find(kind, name)
            texts[str(path)] = path.read_text(encoding="utf-8")
    if name in lookup.names("recipes/terms"):
        from seqreg.build import term_class, term_names

        if name in term_names():  # and not a recipe of several things, such as r4f and asft
            texts[f"seqreg/terms/{name}.py"] = inspect.getdoc(term_class(name)) or ""
    if not texts:
        known = {known for kind in kinds for known in lookup.names(kind)}
        raise BadInput(f"{name!r} is no term, task, recipe or folder; {nearest(name, known)}")
    return texts


def _scores(folder: Path) -> dict[str, Any]:
    """The scores of a run."""
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if inside and not (folder / METRICS).is_file():
        raise BadInput(f"{folder}: holds runs, and is none: name one or several: {' '.join(inside)}")
    return scores_of(folder)


@app.command()
def rouge(
    predictions: Annotated[Path, typer.Argument(help="Text, one prediction per line.")],
    references: Annotated[Path, typer.Argument(help="Text, one reference per line.")],
    stem: Annotated[bool, typer.Option(help="Use Porter's stemmer.")] = True,
    split: Annotated[
        Literal["auto", "newline", "punkt", "rules"], typer.Option(help="How ROUGE-Lsum finds sentences.")
    ] = "auto",
    tokenizer: Annotated[
        Literal["rouge", "unicode"], typer.Option(help="`unicode` for text that is not in Latin letters.")
    ] = "rouge",
    as_json: Json = False,
) -> None:
    """Score two files with ROUGE-1, 2, L and Lsum: rouge-score's numbers, with intervals.

    One text per line; `<n>` stands for a line break inside a text. Files that end in .jsonl have the key
    `prediction` or `reference`.

        seqreg rouge runs/gigaword-tiny/r3f/generated_predictions.txt references.txt
    """
    texts, truth = _texts(predictions, "prediction"), _texts(references, "reference")
    if len(texts) != len(truth):
        raise BadInput(f"{predictions} has {len(texts)} texts, {references} has {len(truth)}: expected as many")
    if not texts:
        raise BadInput(f"{predictions}: 0 texts")
    from seqreg.metrics.rouge.score import rouge

    report = rouge(texts, truth, stem=stem, split=split, tokenizer=tokenizer)
    scores = {"means": report.means, "intervals": report.intervals, "counts": report.counts}
    print_result({**scores, "signature": report.signature}, str(report), as_json=as_json)


def _texts(path: Path, key: str) -> list[str]:
    """The texts of a file: its lines, or the key of every JSON object."""
    if path.suffix == ".jsonl":
        objects = list(readers.read(path))
        for where, record in objects:
            if not isinstance(record.get(key), str):
                raise BadInput(f"{where}: no text under the key {key!r}")
        return [record[key] for _, record in objects]
    try:
        lines = [line for _, line in readers.lines(regular(path))]
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    return [line.removesuffix("\n").removesuffix("\r").replace("<n>", "\n") for line in lines]


@app.command("fairseq-dir")
def fairseq_dir(as_json: Json = False) -> None:
    """Print the folder of the fairseq plug-in, for fairseq's --user-dir.

    fairseq-train DATA --user-dir $(seqreg fairseq-dir) --criterion seqreg --seqreg-terms terms.yaml ...
    """
    folder = Path(__file__).parents[1] / "integrations" / "fairseq_plugin"
    print_result({"folder": str(folder)}, str(folder), as_json=as_json)
