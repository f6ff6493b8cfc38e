"""The command `seqreg new-task`: a task card for a file of one's own."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from seqreg.cli.options import Json, print_result
from seqreg.errors import BadInput, nearest
from seqreg.metrics import tags
from seqreg.workbench.config import cards, overlay, schema
from seqreg.workbench.data import readers
from seqreg.workbench.data.examples import are_texts, json_list
from seqreg.workbench.text.atomic_files import writable, write_text
from seqreg.workbench.text.escape import plain

app = typer.Typer()
READ = 2000
"""Records that are looked at."""
_CLASSES = 50
"""Different values of a column up to which they may be labels."""
_TOKENS_PER_WORD = 1.5
"""A guess: no tokenizer has been chosen yet."""
_SOURCES = ("source", "text", "document", "article", "body", "dialogue", "sentence", "sentence1", "premise", "question")
_SECONDS = ("sentence2", "hypothesis", "question2")
_PAIRS = (("question1", "question2"), ("question", "sentence"), ("question", "context"))
"""Names of the two texts of a pair that mean another thing alone."""
_TARGETS = ("target", "summary", "highlights", "headline", "title", "subject", "tldr", "translation", "answer")
_LABELS = ("label", "labels", "gold_label", "class", "category", "sentiment", "score")
_REFERENCES = ("references",)
_WORDS = ("tokens", "words")
_TAGS = ("tags", "ner_tags", "labels", "pos_tags")
_RULE = "files of a folder are splits; a single file is split 80%, 10%, 10% by a fixed shuffle"
_NUMBER = re.compile(r"-?\d+(\.\d*)?")
UNLABELLED = "-"
"""What inference data has for a label that people did not agree on."""


@dataclass(frozen=True)
class ReadFile:
    """The first records of a file, by column."""

    path: Path
    columns: dict[str, list[Any]]

    @classmethod
    def read(cls, path: Path, delimiter: str | None, encoding: str) -> ReadFile:
        records = [record for _, record in itertools.islice(
            readers.read(path, delimiter=delimiter, encoding=encoding, options="--"), READ)]  # fmt: skip
        if not records:
            raise BadInput(f"{path}: 0 examples")
        names = dict.fromkeys(name for record in records for name in record)
        return cls(path, {name: [record.get(name) for record in records] for name in names})

    @property
    def count(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, option: str, given: str | None, usual: tuple[str, ...]) -> str | None:
        """A column that was named, or one that has a usual name; or the first of several with a number after it."""
        if given is not None and given not in self.columns:
            raise BadInput(f"--{option} {given}: {self.path} has no such column; {nearest(given, self.columns)}")
        spelt = {name.lower(): name for name in self.columns}
        numbered = [f"{name}{mark}1" for name in usual for mark in ("", "_", " ")]
        return given or next((spelt[name] for name in (*usual, *numbered) if name in spelt), None)

    def references(self, target: str, given: Sequence[str]) -> str | list[str] | None:
        """The columns with references: those that were named; one of a usual name; or the target with its likes.

        Likes of "summary" are "summary2" and "summary_2", beside it or "summary1".
        """
        if given:
            named = [str(self.column("references", name, ())) for name in given]
            if len(named) == 1 and not self.holds_references(named[0]):
                raise BadInput(
                    f"--references {named[0]}: {self.path} has texts there, not lists of them: give --references for "
                    f"every column of references, such as --references {target} --references {named[0]}"
                )
            return named[0] if len(named) == 1 else named
        usual = self.column("references", None, _REFERENCES)
        if usual is not None:
            return usual if self.holds_references(usual) else [target, usual]
        stem = target.rstrip("0123456789").rstrip("_ ")
        alike = [name for name in self.columns if re.fullmatch(rf"{re.escape(stem)}[_ ]?\d*", name)]
        return alike if len(alike) > 1 and all(self.texts(name) for name in alike) else None

    def only_prose(self, *others: str | None) -> str | None:
        """The one column beside some others whose texts have several words; None if there is not exactly one."""
        prose = [
            name for name in self.columns if name not in others and any(" " in t.strip() for t in self.texts(name))
        ]
        return prose[0] if len(prose) == 1 else None

    def texts(self, name: str) -> list[str]:
        """The texts of a column; a list of words is one."""
        values = (" ".join(map(str, value)) if isinstance(value, list) else value for value in self.columns[name])
        return [value for value in values if isinstance(value, str)]

    def holds_numbers(self, name: str) -> bool:
        """Whether a column has numbers with a fraction: of a regression, and not the numbers of classes."""
        values = [str(value) for value in self.columns[name] if value is not None]
        return all(map(_NUMBER.fullmatch, values)) and not all(value.isdigit() for value in values)

    def holds_lists(self, name: str | None) -> bool:
        return name is not None and any(isinstance(value, list) for value in self.columns[name])

    def holds_references(self, name: str) -> bool:
        """Whether a column has lists of texts, as JSON in a table, or nothing."""
        values = [value for value in self.columns[name] if value is not None and value != ""]
        return all(are_texts(json_list(value) if isinstance(value, str) else value) for value in values)

    def tokens(self, name: str) -> int:
        """About how many tokens 95% of the texts of a column have at most, as a multiple of 16."""
        sizes = sorted(len(text.split()) for text in self.texts(name)) or [1]
        most = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))] * _TOKENS_PER_WORD + 2
        return max(16, -(-int(most) // 16) * 16)

    def tags(self, name: str) -> list[str]:
        """All tags of a column of lists: O first, then by type; an entity that has a beginning may also continue."""
        values = {str(tag) for value in self.columns[name] if isinstance(value, list) for tag in value}
        if all(value.isdigit() for value in values):
            return [f"tag_{number}" for number in range(max(map(int, values), default=0) + 1)]
        if not tags.check_labels(sorted(values)):
            values |= {f"I-{tag[2:]}" for tag in values if tag.startswith("B-")}
        return sorted(values, key=lambda tag: (tag != tags.OUTSIDE, tag.partition("-")[2], tag))

    def labels(self, name: str) -> list[str]:
        """The classes of a column, in the order of their names; numbers become the names of classes."""
        values = sorted({str(value).strip() for value in self.columns[name] if value is not None} - {UNLABELLED})
        if not 2 <= len(values) <= _CLASSES:
            raise BadInput(
                f"{self.path}: the column {name!r} has {len(values)} different values in {len(self.columns[name])} "
                f"records: expected 2 to {_CLASSES} classes: name another with --label, or a text with --target"
            )
        numbers = all(value.isdigit() for value in values)
        if numbers and [int(value) for value in sorted(values, key=int)] != list(range(len(values))):
            raise BadInput(
                f"{self.path}: the column {name!r} has the classes {', '.join(values)}: expected 0, 1, 2 ..."
            )
        return [f"class_{number}" for number in range(len(values))] if numbers else values


def card_of(
    file: ReadFile, source: str | None = None, target: str | None = None, label: str | None = None,
    second: str | None = None, references: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """What is seen of a dataset, as the values of a card; whatever is named counts, the rest is guessed by name."""
    words, tagged = file.column("source", source, _WORDS), file.column("label", label, _TAGS)
    if target is None and second is None and file.holds_lists(words) and file.holds_lists(tagged):
        return _tag_card(file, str(words), str(tagged))
    if target is not None and label is not None:
        raise BadInput("--target and --label: a task generates a text or predicts a class: choose one")
    text = None if label is not None else file.column("target", target, _TARGETS)
    if references and text is None:
        raise BadInput(f"--references {references[0]}: only a text that is generated has references: give --target too")
    classes = None if text is not None else file.column("label", label, _LABELS)
    names: dict[str, Any] = {"target": text, "label": classes, "second": None}
    if text is None and classes is None:
        known = ", ".join(file.columns)
        raise BadInput(f"{file.path}: what is to be predicted? Give --target or --label, one of {known}")
    pair = next((both for both in _PAIRS if set(both) <= set(file.columns)), ()) if classes and not source else ()
    if text is not None:
        names["references"] = file.references(text, references)
    alike = [names["references"]] if isinstance(names.get("references"), str) else names.get("references") or []
    names["source"] = file.column("source", source or next(iter(pair), None), _SOURCES)
    names["source"] = names["source"] or file.only_prose(text, classes, *alike)
    names["second"] = file.column("second", second, pair[1:] or _SECONDS if classes is not None else ())
    if names["source"] is None or names["source"] in (text, classes):
        raise BadInput(f"{file.path}: which column is read? Give --source, one of {', '.join(file.columns)}")
    used = [name for name in (names["source"], names["second"], text) if name is not None]
    for name in used:
        if not file.texts(name):
            raise BadInput(f"{file.path}: the column {name!r} holds no text")
    columns = {key: names[key] for key in ("source", "second", "target", "references", "label") if names.get(key)}
    length = sum(file.tokens(name) for name in used if name != text)
    values: dict[str, Any] = {"title": file.path.stem, "kind": "generation" if text is not None else "classification"}
    values |= {"columns": columns, "lengths": {"source": length}}
    values["rule"] = _RULE
    if text is None and file.holds_numbers(str(classes)):
        return {**values, "kind": "regression", "metric": ["pearson", "spearman"]}
    if text is None:
        drop = {"drop": [UNLABELLED]} if UNLABELLED in file.columns[str(classes)] else {}
        return {**values, "labels": file.labels(str(classes)), **drop, "metric": ["accuracy"]}
    values["lengths"]["target"] = file.tokens(text)
    lines = any("\n" in part for part in file.texts(text))
    generation = {"num_beams": 4, "max_length": file.tokens(text)}
    return {**values, "metric": ["rouge"], "sentences": "newline" if lines else "auto", "generation": generation}


def _tag_card(file: ReadFile, words: str, tagged: str) -> dict[str, Any]:
    """A card for words with tags."""
    labels = file.tags(tagged)
    metric = "token_accuracy" if tags.check_labels(labels) else "entity_f1"
    return {
        "title": file.path.stem, "kind": "token_classification", "columns": {"source": words, "label": tagged},
        "lengths": {"source": file.tokens(words)}, "rule": _RULE, "labels": labels, "metric": [metric],
    }  # fmt: skip


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
    encoding: Annotated[str, typer.Option(help="Of a text file.")] = readers.UTF8,
    as_json: Json = False,
) -> None:
    """Look at the columns and lengths of a file, and write a task card for it.

    seqreg new-task mails.csv

    seqreg train gigaword task=mails.yaml data.path=mails.csv
    """
    between = None if delimiter is None else schema.one_character(delimiter, "--delimiter")
    schema.known_encoding(encoding, "--encoding")
    path = output or Path(f"{file.stem}.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise BadInput(f"--output {path}: expected a name that ends in .yaml")
    if path.exists():
        raise BadInput(f"{path}: it is there already: choose another --output")
    writable(str(path), "--output ")
    if not path.parent.is_dir():
        raise BadInput(f"--output {path}: there is no folder {path.parent}: make it, or choose another")
    read = ReadFile.read(file, between, encoding)
    values = card_of(read, source, target, label, second, references or ())
    form = {} if between is None else {"delimiter": between}
    form |= {} if encoding == readers.UTF8 else {"encoding": encoding}
    values |= {"files": form} if form else {}
    cards.parse(values, str(path))
    recipe = {"generation": "gigaword", "token_classification": "ner"}.get(values["kind"], "glue")
    given = (shlex.quote(overlay.assigned(key, value)) for key, value in (("task", path), ("data.path", file)))
    command = " ".join(["seqreg train", recipe, *given])
    seen = f"the first {READ:,} examples" if read.count == READ else f"{read.count:,} example{'s' * (read.count > 1)}"
    header = [
        f"# {file.name}", "#", f"#   {command}", "#",
        f"# Made by seqreg new-task from {seen}. Lengths are guesses, {_TOKENS_PER_WORD:g} tokens",
        "# per word, enough for 95% of the texts; `seqreg check` counts with a tokenizer. All keys: docs/recipes.md.",
    ]  # fmt: skip
    write_text(path, "\n".join(header) + "\n" + overlay.dump(values))
    used = {name for names in values["columns"].values() for name in ([names] if isinstance(names, str) else names)}
    lines = [
        f"{part}: {names if isinstance(names, str) else ', '.join(names)}" for part, names in values["columns"].items()
    ]
    lines += [f"not used: {', '.join(rest)}"] if (rest := [name for name in read.columns if name not in used]) else []
    told = "\n".join(
        [
            f"{path} is written, a task of {values['kind'].replace('_', ' ')}:",
            *(f"  {plain(line)}" for line in lines),
            command,
        ]
    )
    print_result({"card": str(path), "command": command, **values}, told, as_json=as_json)
