"""The command `seqreg new-task`: a task card for a file of one's own."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from seqreg.cli.options import Json, print_result
from seqreg.errors import BadInput, nearest
from seqreg.workbench.config import cards, overlay, schema
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.own_file import READ, TOKENS_PER_WORD, Names, OwnFile
from seqreg.workbench.text.atomic_files import writable, write_text
from seqreg.workbench.text.escape import plain

app = typer.Typer()
RECIPES = {
    "summaries": "summarize",
    "translations": "translate",
    "classes": "classify",
    "pairs": "pairs",
    "tags": "tag",
}
"""The recipe for every card of tasks/own."""
SHOWN = 3
"""Examples that are shown."""
WIDTH = 70
"""Characters of a text that is shown."""


def kind_of(file: OwnFile, given: Mapping[str, Names]) -> str:
    """Which of the cards of tasks/own fits: by the columns that were named, by usual names, then by what they hold."""

    def column(kind: str, part: str) -> Any:
        return given.get(part) or file.named(getattr(cards.load(f"own/{kind}")[0].columns, part))

    if "target" in given:
        return "summaries"
    if file.holds_lists(column("tags", "source")) and file.holds_lists(column("tags", "label")):
        return "tags"
    for kind in ("summaries", "translations"):
        if "label" not in given and column(kind, "target"):
            return kind
    prose = file.prose()
    found = [name for name in file.columns if file.may_be_label(name)]
    if column("classes", "label") or (len(found) == 1 and len(prose) == 1):
        pair = "source" not in given and column("pairs", "source") and column("pairs", "second")
        return "pairs" if "second" in given or pair else "classes"
    return "summaries"


@app.command("new-task")
def new_task(
    file: Annotated[Path, typer.Argument(help="JSONL, JSON, CSV, TSV, Parquet or CoNLL: training examples.")],
    output: Annotated[Optional[Path], typer.Option(help="The card; by default FILE's name with .yaml, here.")] = None,
    source: Annotated[Optional[str], typer.Option(help="The column that is read.")] = None,
    second: Annotated[Optional[str], typer.Option(help="The second text of a pair.")] = None,
    target: Annotated[Optional[str], typer.Option(help="The column that is to be generated.")] = None,
    references: Annotated[
        Optional[list[str]], typer.Option(help="A column with references: a list, or a text; may be repeated.")
    ] = None,
    label: Annotated[Optional[str], typer.Option(help="The column with the classes, or with a list of tags.")] = None,
    delimiter: Annotated[Optional[str], typer.Option(help=r"Between the cells of a CSV file; \t is a tab.")] = None,
    encoding: Annotated[Optional[str], typer.Option(help="Of a text file; found out by default.")] = None,
    as_json: Json = False,
) -> None:
    """Look at a file, show what it holds, and write a task card for it.

    The encoding, the delimiter and the columns are found out; what cannot be known is asked.

    seqreg new-task mails.csv
    """
    between = None if delimiter is None else schema.one_character(delimiter, "--delimiter")
    known = None if encoding is None else schema.known_encoding(encoding, "--encoding")
    path = _card_path(file, output)
    read = OwnFile.read(file, between, known)
    named = {"source": source, "second": second, "target": target, "references": references, "label": label}
    given = {key: value for key, value in named.items() if value}
    _check(read, given)
    kind = kind_of(read, given)
    values = read.card(cards.load(f"own/{kind}")[0].model_dump(exclude_defaults=True), given, _ask(read, as_json))
    card = cards.parse(values, str(path))
    words = [overlay.assigned(key, value) for key, value in (("task", path), ("data.path", file))]
    command = shlex.join(["seqreg", "train", RECIPES[kind], *words])
    write_text(path, _header(read, command) + overlay.dump(values))
    told = "\n".join([*_understood(read, card), f"{path} is written. Train with it:", command])
    print_result({"card": str(path), "command": command, **values}, told, as_json=as_json)


def _card_path(file: Path, output: Path | None) -> Path:
    path = output or Path(f"{file.stem}.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise BadInput(f"--output {path}: expected a name that ends in .yaml")
    if path.exists():
        raise BadInput(f"{path}: it is there already: choose another --output")
    writable(str(path), "--output ")
    if not path.parent.is_dir():
        raise BadInput(f"--output {path}: there is no folder {path.parent}: make it, or choose another")
    return path


def _check(file: OwnFile, given: Mapping[str, Names]) -> None:
    """Refuse columns that are not there, and what no task can have together."""
    for key, names in given.items():
        for name in [names] if isinstance(names, str) else names:
            if name not in file.columns:
                raise BadInput(f"--{key} {name}: {file.path} has no such column; {nearest(name, file.columns)}")
    if "label" in given and "target" in given:
        raise BadInput("--target and --label: a task generates a text or predicts a class: choose one")
    if "label" in given and "references" in given:
        first = given["references"][0]
        raise BadInput(f"--references {first}: only a text that is generated has references: give --target too")


def at_a_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask(file: OwnFile, as_json: bool) -> Any:
    """Ask the person at a terminal; without one, say which option answers."""

    def ask(part: str, question: str, columns: Sequence[str]) -> str:
        if not as_json and at_a_terminal():
            choices = f"{question} One of {', '.join(columns)}"
            while (answer := typer.prompt(plain(choices), err=True)) not in columns:
                pass
            return str(answer)
        option = "--target or --label" if part == "target" else f"--{part}"
        raise BadInput(f"{file.path}: {question} Give {option}, one of {', '.join(columns)}")

    return ask


def _header(file: OwnFile, command: str) -> str:
    seen = f"the first {READ:,} examples" if file.count == READ else f"{file.count:,} example{'s' * (file.count > 1)}"
    lines = [
        file.path.name, "", f"  {command}", "",
        f"Made by seqreg new-task from {seen}. Lengths are guesses, {TOKENS_PER_WORD:g} tokens",
        "per word, enough for 95% of the texts; `seqreg check` counts with a tokenizer. All keys: docs/recipes.md.",
    ]  # fmt: skip
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _understood(file: OwnFile, card: Card) -> list[str]:
    """How the file is written, what its columns are for, and the first examples."""
    form = file.form
    written = {"encoding": form.encoding, "delimiter": repr(form.delimiter) if form.delimiter else ""}
    shown = ", ".join(f"{key} {value}" for key, value in written.items() if value)
    shown += ", without a header" * bool(form.header)
    columns = {part: [names] if isinstance(names, str) else names for part, names in card.columns if names}
    lines = [f"{file.path}: a task of {card.kind.replace('_', ' ')}, {file.count:,} examples; {shown}"]
    lines += [f"  {part}: {', '.join(names)}" for part, names in columns.items()]
    used = {name for names in columns.values() for name in names}
    rest = [name for name in file.columns if name not in used]
    lines += [f"  not used: {', '.join(rest)}"] if rest else []
    for row in range(min(SHOWN, file.count)):
        lines.append(f"example {row + 1}")
        for part, names in columns.items():
            texts = (" ".join(str(file.columns[name][row]).split()) for name in names)
            lines += [
                f"  {part}: {text if len(text) <= WIDTH else text[: WIDTH - 3] + '...'}" for text in texts if text
            ]
    return [plain(line) for line in lines]
