"""Data that cannot be right: files, rows, columns, labels; and what is scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from seqreg.errors import BadInput
from seqreg.metrics.rouge import sentences
from seqreg.metrics.rouge.score import rouge
from seqreg.workbench.config import cards
from seqreg.workbench.config.settings import Data
from seqreg.workbench.data import loading
from seqreg.workbench.data.examples import Example
from seqreg.workbench.scores import evaluate
from seqreg.workbench.text import readers
from tests.bad_input.table import refused, row, run, tiny, warned
from tests.helpers import sample_files

PAIRS, _ = cards.load("text_pairs")
RTE, _ = cards.load("glue/rte")
GOOD = [{"source": f"text {n} is here", "target": f"title {n}"} for n in range(30)]


def write(path: Path, found: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in found))
    return path


def faulty(tmp: Path, message: str, *bad: Any, name: str = "x.jsonl") -> None:
    """A file whose third line is bad is refused by the command, with its place."""
    path = write(tmp / name, [*GOOD[:2], *bad])
    refused(tmp, message, "train", "gigaword", "task=text_pairs", "model.name=x", f"data.path={path}", "output=run")


def notes(tmp: Path, card: cards.Card, **files: Sequence[Any]) -> loading.Splits:
    for name, found in files.items():
        write(tmp / "folder" / f"{name}.jsonl", found)
    return loading.load(card, Data(path=str(tmp / "folder")))


@row(3, "an empty target", "S", "skipped", "more than data.max_empty_fraction of the examples is an error")
def _(tmp: Path) -> None:
    splits = notes(tmp, PAIRS, train=[*GOOD, {"source": "x", "target": " "}], validation=GOOD[:1])
    assert len(splits.sets["train"]) == 30
    assert "train.jsonl: 1 examples left out: an empty text" in splits.notes
    path = write(tmp / "x.jsonl", [*GOOD[:3], {"source": "x", "target": ""}])
    message = r"x.jsonl: 1 of 4 examples have an empty text, more than data.max_empty_fraction=0.1"
    refused(tmp, message, "train", "gigaword", "task=text_pairs", "model.name=x", f"data.path={path}")


@row(4, "an empty source", "S", "skipped")
def _(tmp: Path) -> None:
    splits = notes(tmp, PAIRS, train=[*GOOD, {"source": "\n", "target": "t"}], validation=GOOD[:1])
    assert (len(splits.sets["train"]), splits.notes[0]) == (30, "train.jsonl: 1 examples left out: an empty text")
    said = run(tmp, *tiny(tmp))
    assert said.code == 0, said
    write(tmp / "empty.jsonl", [{"document": "", "summary": "t"}, {"document": "a b", "summary": "t"}])
    assert run(tmp, "predict", "run", "empty.jsonl", "-o", "out.jsonl").code == 0
    assert len((tmp / "out.jsonl").read_text().splitlines()) == 2


@row(29, "labels that the classes do not have", "E", "refused")
def _(tmp: Path) -> None:
    card = cards.Card.model_validate(RTE.model_dump())
    found = [*sample_files.rows(card, 3), {"sentence1": "a", "sentence2": "b", "label": 2}]
    write(tmp / "data" / "train.jsonl", found)
    message = r"train.jsonl:4: the column 'label' is 2: expected 0 to 1, or one of entailment"
    refused(tmp, message, *tiny(tmp, recipe="glue", variant="rte"))


@row(39, "a column that a row lacks", "E", "refused")
def _(tmp: Path) -> None:
    faulty(tmp, r"x.jsonl:3: no column 'target' or .*; it has 'source'", {"source": "a"})


@row(40, "a null", "E", "refused")
def _(tmp: Path) -> None:
    faulty(tmp, r"x.jsonl:3: the column 'source' is empty \(null\)", {"source": None, "target": "a"})


@row(41, "bytes that are not UTF-8", "E", "refused")
def _(tmp: Path) -> None:
    faulty(tmp, r"x.jsonl:3: not UTF-8 \(byte 13 of the line\)", b'{"source": "\xff"}\n')


@row(42, "a torn line, NUL, half a character, a key twice", "E", "refused")
def _(tmp: Path) -> None:
    faulty(tmp, r"x.jsonl:3: not a JSON object: .* \(character \d+ of the line\)", b'{"source": "a", "tar')
    faulty(tmp, r"x.jsonl:3: not a JSON object: Invalid control character", b'{"source": "a\0", "target": "b"}\n')
    faulty(tmp, r"x.jsonl:3: the column 'source' has a NUL character at position 2", {"source": "a\0", "target": "b"})
    faulty(tmp, r"x.jsonl:3: the column 'target' has half a character", b'{"source": "a", "target": "\\ud800"}\n')
    faulty(tmp, r"x.jsonl:3: .*a key is there twice", b'{"source": "a", "source": "b", "target": "c"}\n')
    faulty(tmp, r"x.jsonl:3: not a JSON object: nested too deeply", b"[" * 100_000 + b"\n")
    for name, text, message in (
        ("x.csv", 'source,target\na,b\n"a,b\n', r"x.csv:3: not CSV: unexpected end of data"),
        ("x.csv", "source,target\na,b,c\n", r"x.csv:2: 3 cells, but the first line names 2 columns"),
        ("x.csv", "source,source\na,b\n", r"x.csv:1: two columns are called 'source'"),
        ("x.tsv", "source\ttarget\na\0\tb\n", r"x.tsv:2: .*NUL"),
        ("x.json", '[{"source": "a"},\n {]', r"x.json:2: not JSON: .* \(character \d+ of the line\)"),
        ("x.parquet", "PAR1 but not really", r"x.parquet: not Parquet"),
    ):
        (tmp / name).write_text(text)
        refused(tmp, message, "train", "gigaword", "task=text_pairs", "model.name=x", f"data.path={name}")


@row(43, "an empty file", "E", "refused")
def _(tmp: Path) -> None:
    for name in ("x.jsonl", "x.json", "x.csv", "x.tsv"):
        (tmp / name).write_text("")
        refused(tmp, f"{name}: 0 examples", "train", "gigaword", "task=text_pairs", "model.name=x", f"data.path={name}")


@row(44, "a byte-order mark, DOS lines, blank lines, a JSON array", "H", "handled")
def _(tmp: Path) -> None:
    lines = [json.dumps(one) for one in GOOD]
    (tmp / "x.jsonl").write_text("\ufeff" + "\r\n\r\n".join(lines))
    (tmp / "x.json").write_text(json.dumps(GOOD))
    (tmp / "x.csv").write_text("\ufeffsource,target\r\n" + "".join(f"{o['source']},{o['target']}\r\n" for o in GOOD))
    for name in ("x.jsonl", "x.json", "x.csv"):
        assert [found for _, found in readers.read(tmp / name)] == GOOD


@row(45, 'labels "1" and 1, or 1 and 1.5', "E", "refused")
def _(tmp: Path) -> None:
    pair = {"sentence1": "a", "sentence2": "b"}
    for first, second, message in (
        (1, "1", r"train.jsonl:2: the column 'label' is '1', and of the other kind .*train.jsonl:1"),
        ("0", 1, r"train.jsonl:2: the column 'label' is 1, and of the other kind"),
        (1, 1.5, r"train.jsonl:2: the column 'label' is 1.5: expected 0 to 1"),
    ):
        write(tmp / "data" / "train.jsonl", [{**pair, "label": first}, {**pair, "label": second}])
        refused(tmp, message, *tiny(tmp, recipe="glue", variant="rte"))
    stsb, _ = cards.load("glue/stsb")
    for label in (float("nan"), True, "x", [1]):
        write(tmp / "y.jsonl", [{**pair, "label": label}])
        with pytest.raises(BadInput, match=r"y.jsonl:1: the column 'label' is .*: expected a number"):
            loading.read_file(stsb, tmp / "y.jsonl")


@row(46, "ids twice, examples twice, examples in two sets", "W", "warned")
def _(tmp: Path) -> None:
    named = [{**one, "id": n % 28} for n, one in enumerate(GOOD)]
    splits = notes(tmp, PAIRS, train=[*named, named[0]], validation=GOOD[:2])
    assert {
        "train.jsonl: 3 examples have the id of another",
        "1 of 31 train examples repeat another",
        "2 of 2 validation examples are in the training set too",
    } <= set(splits.notes)


@row(47, "one example; fewer examples than a batch", "H", "handled", "a last batch that is not full is never dropped")
def _(tmp: Path) -> None:
    words = tiny(
        tmp,
        "optimisation.per_device_train_batch_size=64",
        "optimisation.max_steps=null",
        "optimisation.num_train_epochs=1",
    )
    card, _ = cards.load("gigaword")
    write(tmp / "data" / "train.jsonl", sample_files.rows(card, 1))
    assert run(tmp, *words).code == 0
    assert json.loads((tmp / "run" / "metrics.json").read_text())["train"]["steps"] == 1
    (tmp / "data" / "validation.jsonl").unlink()
    refused(tmp, "one training example, and no file validation", *words, f"output={tmp / 'other'}")


@row(48, "one class only", "W", "warned")
def _(tmp: Path) -> None:
    pair = {"sentence1": "a", "sentence2": "b", "label": 0}
    splits = notes(tmp, RTE, train=[pair, {**pair, "label": 1}], validation=[pair, pair])
    assert any(one.startswith("all 2 test examples have the label 'entailment'") for one in splits.notes)


@row(49, "empty predictions and references", "H", "handled", "counted; a warning if all predictions are empty")
def _(tmp: Path) -> None:
    examples = [Example("a b", None, "a b"), Example("a b", None, ""), Example("a", None, "a")]
    found = evaluate.score_texts(["a b", "a", ""], examples, PAIRS, resamples=10)
    assert (found.metrics["rouge1"], found.metrics["empty"]) == (pytest.approx(100 / 3), 1)
    with mock.patch.object(evaluate, "warn") as warn:
        evaluate.warn_of_collapse(found, "test")
        assert not warn.called
        evaluate.warn_of_collapse(evaluate.score_texts(["", "", ""], examples, PAIRS, resamples=10), "test")
    assert "all 3 predictions are empty" in warn.call_args.args[0]


@row(50, "ROUGE of text that is not in Latin letters", "W", "warned", "words: unicode in a card counts it")
def _(tmp: Path) -> None:
    text = "кошка ждёт снег"
    with warned("1 of 1 examples are mostly in a script .* take tokenizer='unicode'"):
        assert rouge([text], [text]).means["rouge1"] == 0
    card = PAIRS.model_copy(update={"words": "unicode"})
    assert evaluate.score_texts([text], [Example("x", None, text)], card, resamples=10).metrics["rouge1"] == 100


@row(51, "rougeLsum of text without line breaks", "H", "handled", "sentences are found, and the signature says how")
def _(tmp: Path) -> None:
    one, other = "The cat sat. The dog ran.", "The dog ran. The cat sat."
    report = rouge([one], [other], split="rules")
    assert report.means["rougeLsum"] == 1 > report.means["rougeL"]
    assert "split=rules" in report.signature


@row(52, "nltk's punkt is not installed", "H", "handled", "our own rules need no data")
def _(tmp: Path) -> None:
    with mock.patch.object(sentences, "has_punkt", return_value=False):
        report = rouge(["The cat sat. The dog ran."], ["The dog ran. The cat sat."], split="auto")
        assert (report.means["rougeLsum"], "split=rules" in report.signature) == (1, True)
        with pytest.raises(BadInput, match="punkt_tab data, which is not on this machine"):
            rouge(["A b."], ["A b."], split="punkt")
