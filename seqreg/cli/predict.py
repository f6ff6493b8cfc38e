"""Predictions of a trained model for texts that come one after the other."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.progress import Progress

from seqreg.errors import BadInput
from seqreg.studies.common.trained_model import TrainedModel
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import loading
from seqreg.workbench.data.examples import Example, example
from seqreg.workbench.run.train import trained
from seqreg.workbench.scores.evaluate import class_prediction, tag_texts
from seqreg.workbench.text import readers
from seqreg.workbench.text.atomic_files import check_file, to_json, writable, written_aside
from seqreg.workbench.text.escape import one_line, plain
from seqreg.workbench.text.progress import Bar, columns
from seqreg.workbench.text.terminal import console, warn

WINDOW = 16
"""Batches that are read ahead, so that texts of like length share a batch."""


def predict(
    folder: Path, source: str, target: str, overrides: tuple[str, ...] = (), *, trust: bool = False,
    trust_changes: bool = False, as_json: bool = False,
) -> int:  # fmt: skip
    """Read `source`, write `target` ("-" for the standard streams), and return how many were predicted.

    Text has one example per line (the two texts of a pair apart by a tab), with <n> for line breaks inside. JSONL, CSV,
    TSV and Parquet have the card's columns, and become JSONL: every record with its "prediction".
    """
    if target == "-" and sys.__stdout__ is None:
        raise BadInput("-: the standard output is closed: give --output FILE")
    if source == "-" and sys.stdin is None:
        raise BadInput("-: the standard input is closed: give a file")
    model = TrainedModel(folder, trained(folder, overrides, trust=trust, trust_changes=trust_changes))
    if source != "-":
        check_file(source)
    if target != "-":
        writable(target, "--output ")
    if target != "-" and os.path.exists(target) and os.path.exists(source) and os.path.samefile(source, target):
        raise BadInput(f"{target}: the input would be overwritten: choose another output")
    structured = Path(source).suffix in readers.ENDINGS
    read = _records if structured else _lines
    size = None if source == "-" else sum(1 for _ in read(source, model.run))  # and all of it is right
    _ = model.model  # what is wrong with it is told before anything is written
    written = empty = 0
    with contextlib.nullcontext(_standard(sys.stdout)) if target == "-" else _opened(Path(target)) as out:
        with Progress(*columns(), console=console, disable=not console.is_terminal, transient=True) as progress:
            bar = Bar(progress, "predicting", size, "example")
            for record, prediction in _predictions(model, read(source, model.run)):
                _write(out, record, prediction, structured or as_json or target.endswith(".jsonl"))
                written += 1
                empty += prediction["prediction"] == ""
                bar.at(written)
    if empty:
        warn(f"seqreg: warning: {empty} of {written} predictions are empty")
    return written


@contextlib.contextmanager
def _opened(target: Path) -> Iterator[TextIO]:
    """A file, which is there when all of it is written; a pipe or a device has every line as it comes."""
    is_file = target.is_file() or not target.exists()
    with written_aside(target) if is_file else contextlib.nullcontext(target) as path:
        with path.open("w", encoding="utf-8") as out:
            yield out


def _standard(stream: TextIO) -> TextIO:
    """A standard stream, which has UTF-8 whatever the locale says."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8")
    return stream


def _records(source: str, run: Run) -> Iterator[tuple[dict[str, Any], Example]]:
    card = run.card
    for where, record in loading.records(card, Path(source), run.config.data):
        parsed = example(card, record, where, labelled=False)
        if parsed is not None:
            yield record, parsed


def _lines(source: str, run: Run) -> Iterator[tuple[dict[str, Any], Example]]:
    card = run.card
    for number, line in _stdin() if source == "-" else readers.lines(Path(source)):
        if source == "-" and line.lstrip().startswith('{"'):
            raise BadInput(f"-:{number}: this is JSONL, and the standard input is read as text: give a file")
        if "\0" in line:
            raise BadInput(f"{source}:{number}: a NUL character at position {line.index(chr(0)) + 1}: is it text?")
        first, tab, second = line.rstrip("\r\n").replace("<n>", "\n").partition("\t")
        if card.columns.second is not None and not tab:
            raise BadInput(f"{source}:{number}: expected two texts apart by a tab")
        if card.columns.second is None:
            first, second = first + tab + second, ""
        if card.kind == "token_classification":
            first = " ".join(first.split())
        yield {"source": first}, Example(first, second if card.columns.second is not None else None)


def _stdin() -> Iterator[tuple[int, str]]:
    stream = _standard(sys.stdin)
    try:
        for number, line in enumerate(iter(lambda: stream.readline(readers.LINE + 1), ""), start=1):
            if len(line) > readers.LINE:
                raise BadInput(f"-:{number}: a line of more than {readers.LINE:,} characters: is it text?")
            yield number, line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeDecodeError as error:
        raise BadInput(f"-: not UTF-8 ({error.reason})") from None


def _write(out: TextIO, record: dict[str, Any], prediction: dict[str, Any], as_json: bool) -> None:
    if as_json:
        line = to_json({**record, **prediction}, ensure_ascii=False, default=str)
    else:
        line = one_line(str(prediction["prediction"]))
    out.write((plain(line) if out.isatty() else line) + "\n")
    out.flush()


def _predictions(
    model: TrainedModel, read: Iterator[tuple[dict[str, Any], Example]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Records with predictions, in their order; batches are made of texts of like length within a window."""
    size = model.run.config.evaluation.per_device_eval_batch_size
    while window := list(itertools.islice(read, size * WINDOW)):
        rows = model.encoded([Example(given.source, given.second, chat=given.chat) for _, given in window])
        encoded = [rows[index] for index in range(len(rows))]
        order = sorted(range(len(window)), key=lambda index: -len(encoded[index]["input_ids"]))
        predictions: dict[int, dict[str, Any]] = {}
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            batch = model.collate([encoded[index] for index in chosen]).to(model.model.device)
            examples = [window[index][1] for index in chosen]
            predictions.update(zip(chosen, _batch(model, batch, examples), strict=True))
        for index, (record, _) in enumerate(window):
            yield record, predictions[index]


@torch.no_grad()
def _batch(model: TrainedModel, batch: Any, examples: Sequence[Example]) -> list[dict[str, Any]]:
    if model.generates:
        return [{"prediction": text} for text in model.texts(model.generate(batch))]
    outputs = model.model(**batch).logits.float().cpu().numpy()
    if model.card.kind == "token_classification":
        return [{"prediction": text} for text in tag_texts(outputs, examples, model.run, model.tokenizer)]
    return [{k: v for k, v in class_prediction(0, output, model.card).items() if k != "index"} for output in outputs]
