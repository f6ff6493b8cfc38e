"""Task cards made from a file: what a card leaves open is found in the records."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput, nearest
from seqreg.metrics import tags
from seqreg.workbench.text import readers
from seqreg.workbench.text.sniff import FileForm, sniff

READ = 50_000
"""Records that are looked at."""
CLASSES = 50
"""Different values of a column up to which they may be labels."""
TOKENS_PER_WORD = 1.5
"""A guess: no tokenizer has been chosen yet."""
UNLABELLED = "-"
"""What inference data has for a label that people did not agree on."""
_NUMBER = re.compile(r"-?\d+(\.\d*)?")
Names = str | list[str]
Ask = Callable[[str, str, Sequence[str]], str]
"""Called with the part of a card that nobody can know, a question and the columns to choose from."""


@dataclass(frozen=True)
class OwnFile:
    """The first records of a file, by column."""

    path: Path
    form: FileForm
    columns: dict[str, list[Any]]

    @classmethod
    def read(
        cls, path: Path, delimiter: str | None = None, encoding: str | None = None, options: str = "--"
    ) -> OwnFile:
        """Read a file in the form that it has; `options` is how a user gives delimiter and encoding."""
        form = sniff(path, delimiter, encoding)
        every = readers.read(
            path,
            delimiter=form.delimiter,
            encoding=form.encoding,
            header=form.header,
            known=form.header,
            options=options,
        )
        records = [record for _, record in itertools.islice(every, READ)]
        if not records:
            raise BadInput(f"{path}: 0 examples")
        if path.suffix == ".csv" and len(records[0]) == 1:
            only = next(iter(records[0]))
            raise BadInput(f"{path}: one column, {only!r}: is there another delimiter? Give {options}delimiter")
        names = dict.fromkeys(name for record in records for name in record)
        return cls(path, form, {name: [record.get(name) for record in records] for name in names})

    @property
    def count(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def named(self, usual: Names | None) -> str | None:
        """The first column that has a usual name, or such a name with a 1 after it; capitals do not matter."""
        spelt = {name.lower(): name for name in self.columns}
        usual = [usual] if isinstance(usual, str) else usual or []
        numbered = [f"{name}{mark}1" for name in usual for mark in ("", "_", " ")]
        return next((spelt[name.lower()] for name in (*usual, *numbered) if name.lower() in spelt), None)

    def texts(self, name: str) -> list[str]:
        """The texts of a column; a list of words is one."""
        values = (" ".join(map(str, value)) if isinstance(value, list) else value for value in self.columns[name])
        return [value for value in values if isinstance(value, str)]

    def alike(self, name: str) -> list[str]:
        """Columns of texts with the name of a column but for a number at its end: summary, summary2, summary_2."""
        stem = name.rstrip("0123456789").rstrip("_ ")
        return [other for other in self.columns if re.fullmatch(rf"{re.escape(stem)}[_ ]?\d*", other, re.I) and
                self.texts(other)]  # fmt: skip

    def prose(self, *used: Names | None) -> list[str]:
        """Columns whose texts have several words, the longest texts first; of numbered columns only the first."""
        words = {name: [len(text.split()) for text in self.texts(name)] for name in self.columns if name not in used}
        mean = {name: sum(sizes) / len(sizes) for name, sizes in words.items() if sizes and max(sizes) > 1}
        found = sorted((name for name in mean if not self.may_be_label(name)), key=lambda name: -mean[name])
        return [name for name in found if name == next(iter(self.alike(name)), name)]

    def may_be_label(self, name: str) -> bool:
        """Whether a column has few different values, each of them several times."""
        values = {str(value) for value in self.columns[name] if value not in (None, "")}
        return 2 <= len(values) <= min(CLASSES, self.count // 4)

    def holds_lists(self, name: str | None) -> bool:
        return name is not None and any(isinstance(value, list) for value in self.columns[name])

    def holds_numbers(self, name: str) -> bool:
        """Whether a column has numbers with a fraction: of a regression, and not the numbers of classes."""
        values = [str(value) for value in self.columns[name] if value is not None]
        return all(map(_NUMBER.fullmatch, values)) and not all(value.isdigit() for value in values)

    def holds_references(self, name: str) -> bool:
        """Whether a column has lists of texts, as JSON in a table, or nothing."""
        values = [value for value in self.columns[name] if value not in (None, "")]
        lists = (readers.json_list(value) if isinstance(value, str) else value for value in values)
        return all(map(readers.are_texts, lists))

    def tokens(self, name: str) -> int:
        """About how many tokens 95% of the texts of a column have at most, as a multiple of 16."""
        sizes = sorted(len(text.split()) for text in self.texts(name)) or [1]
        most = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))] * TOKENS_PER_WORD + 2
        return max(16, -(-int(most) // 16) * 16)

    def tags(self, name: str) -> list[str]:
        """All tags of a column of lists: O first, then by type; an entity that has a beginning may also continue."""
        lists = (value.split() if isinstance(value, str) else value or () for value in self.columns[name])
        values = {str(tag) for value in lists for tag in value}
        if all(value.isdigit() for value in values):
            return [f"tag_{number}" for number in range(max(map(int, values), default=0) + 1)]
        if not tags.check_labels(sorted(values)):
            values |= {f"I-{tag[2:]}" for tag in values if tag.startswith("B-")}
        return sorted(values, key=lambda tag: (tag != tags.OUTSIDE, tag.partition("-")[2], tag))

    def labels(self, name: str) -> list[str]:
        """The classes of a column, in the order of their names; numbers become the names of classes."""
        values = sorted({str(value).strip() for value in self.columns[name] if value is not None} - {UNLABELLED})
        if not 2 <= len(values) <= CLASSES:
            raise BadInput(
                f"{self.path}: the column {name!r} has {len(values)} different values in {len(self.columns[name])} "
                f"records: expected 2 to {CLASSES} classes: name another column"
            )
        numbers = all(value.isdigit() for value in values)
        if numbers and [int(value) for value in sorted(values, key=int)] != list(range(len(values))):
            raise BadInput(
                f"{self.path}: the column {name!r} has the classes {', '.join(values)}: expected 0, 1, 2 ..."
            )
        return [f"class_{number}" for number in range(len(values))] if numbers else values

    def card(self, template: Mapping[str, Any], given: Mapping[str, Names], ask: Ask) -> dict[str, Any]:
        """The values of a card: those of a template, with what it leaves open.

        Args:
            template: values of a card with `from_file`; its columns are the usual names
            given: columns that a person has named, by what they hold
        """
        for names in given.values():
            for name in [names] if isinstance(names, str) else names:
                if name not in self.columns:
                    raise BadInput(f"{self.path}: there is no column {name!r}; {nearest(name, self.columns)}")
        values = {key: value for key, value in template.items() if key != "from_file"}
        columns = self._columns(template, given, ask)
        values |= {"title": self.path.stem, "columns": columns}
        values |= {"files": self.form.values} if self.form.values else {}
        texts = [str(columns[key]) for key in ("source", "second") if key in columns]
        values["lengths"] = {"source": min(sum(map(self.tokens, texts)), template["lengths"]["source"])}
        return {**values, **getattr(self, f"_{template['kind']}")(values, columns)}

    def _columns(self, template: Mapping[str, Any], given: Mapping[str, Names], ask: Ask) -> dict[str, Any]:
        """Which column holds what: as given, by a usual name, or as the only one that can be it."""
        usual, kind = template["columns"], template["kind"]
        answer = "target" if kind == "generation" else "label"
        chosen = {key: given.get(key) or self.named(names) for key, names in usual.items() if key != "references"}
        if chosen[answer] is None:
            left = [name for name in self.columns if name not in chosen.values()]
            if kind == "generation":
                found = self.prose(*chosen.values())[chosen["source"] is None :]  # the longest texts are the sources
                found = [name for name in found if len(self.alike(name)) > 1] or found  # with several references
            else:
                fits = self.holds_lists if kind == "token_classification" else self.may_be_label
                found = [name for name in left if fits(name)]
            chosen[answer] = found[0] if len(found) == 1 else ask(answer, "what is to be predicted?", left)
        references = None
        if kind == "generation":
            references = self._references(str(chosen["target"]), given.get("references"), usual)
        read = [key for key in ("source", "second") if key in usual and chosen[key] in (None, chosen[answer])]
        taken = [name for key, name in chosen.items() if key not in read]
        taken += [references] if isinstance(references, str) else references or []
        left = [name for name in self.columns if name not in taken]
        found = left if len(left) == len(read) else sorted(self.prose(*taken), key=left.index)
        for place, key in enumerate(read):
            rest = [name for name in left if name not in chosen.values()]
            chosen[key] = found[place] if len(found) == len(read) else ask(key, "which column is read?", rest)
        columns = {key: chosen[key] for key in ("source", "second", "target") if chosen.get(key)}
        for name in columns.values():
            if not self.texts(str(name)):
                raise BadInput(f"{self.path}: the column {name!r} holds no text")
        columns |= {"references": references} if references else {}
        return columns if kind == "generation" else {**columns, "label": chosen["label"]}

    def _references(self, target: str, given: Names | None, usual: Mapping[str, Names]) -> Names | None:
        """The columns with references: those given; one with a usual name; or the target with those called like it."""
        several = [given] if isinstance(given, str) else given or []
        if len(several) == 1 and not self.holds_references(several[0]):
            raise BadInput(
                f"--references {several[0]}: {self.path} has texts there, not lists of them: give --references for "
                f"every column of references, such as --references {target} --references {several[0]}"
            )
        if several:
            return several[0] if len(several) == 1 else several
        found = self.named(usual.get("references"))
        if found is not None:
            return found if self.holds_references(found) else [target, found]
        alike = self.alike(target)
        return alike if len(alike) > 1 else None

    def _generation(self, values: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
        length = self.tokens(columns["target"])
        lines = any("\n" in part.strip() for part in self.texts(columns["target"]))
        return {
            "lengths": {**values["lengths"], "target": length}, "sentences": "newline" if lines else "auto",
            "generation": {**values.get("generation", {}), "max_length": length},
        }  # fmt: skip

    def _classification(self, values: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
        if self.holds_numbers(columns["label"]):
            return {"kind": "regression", "metric": ["pearson", "spearman"]}
        dropped = {"drop": [UNLABELLED]} if UNLABELLED in self.columns[columns["label"]] else {}
        return {"labels": self.labels(columns["label"]), **dropped}

    def _token_classification(self, values: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
        labels = self.tags(columns["label"])
        return {"labels": labels, "metric": ["token_accuracy" if tags.check_labels(labels) else "entity_f1"]}


def training_file(path: Path) -> Path:
    """The file of a folder that is trained on."""
    if not path.is_dir():
        return path
    found = [path / f"train{ending}" for ending in readers.ENDINGS if (path / f"train{ending}").is_file()]
    if not found:
        raise BadInput(f"data.path={path}: expected a file train{'|'.join(readers.ENDINGS)} in it")
    return found[0]
