"""Score a model on a task that it was not trained on."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import models
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.run import train as trainings
from seqreg.workbench.run.run_directory import RunRecord
from seqreg.workbench.run.train import LoadedRun, make_trainer
from seqreg.workbench.scores.evaluate import Scored, evaluate


def score(name: str, run: Run, examples: Sequence[Example], split: str, *, trust: bool = False) -> Scored:
    """The scores of the model `name` on examples of the task of `run`, by its generation settings."""
    other = dataclasses.replace(run, config=run.config.for_evaluation(name), trust=trust)
    tokenizer = models.load_tokenizer(other.config, (), trust=trust)
    model = models.load_model(other.config, other.card, tokenizer, trust=trust, trained=True)
    shop = LoadedRun(other, Splits({split: examples}), tokenizer, model)
    with tempfile.TemporaryDirectory() as scratch:
        return evaluate(make_trainer(shop, Path(scratch)), other, tokenizer, examples, split)


def ended(folder: Path) -> None:
    """Refuse a run whose training has not ended."""
    record = RunRecord.read(folder)
    if record is None or not record.finished:
        raise BadInput(f"{folder}: its training has not ended: run the same seqreg train again")


def train(run: Run) -> dict[str, Any]:
    """Train a run of a study, or go on with it; the options of `seqreg train` are not offered, for there are none."""
    try:
        return trainings.train(run)
    except BadInput as error:
        if len(error.lines) == 1:
            raise
        *lines, _ = error.lines
        raise BadInput(*lines, "remove that folder and those of the steps after it, or begin elsewhere") from None
