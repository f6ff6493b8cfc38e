"""The YAML files of studies: which tasks are probed, and which runs follow each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, model_validator

from seqreg.errors import BadInput
from seqreg.workbench.config import cards, overlay
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.config.schema import Natural, Section, checked
from seqreg.workbench.config.settings import Data
from seqreg.workbench.data import loading
from seqreg.workbench.data.examples import Example

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
S = TypeVar("S", bound=Section)


class TaskEntry(Section):
    """A task in a file of tasks.

    Args:
        task: a card by name or path; `data` as in a recipe
        name: in tables; the card's by default
    """

    task: str
    name: str | None = None
    data: dict[str, Any] = {}


class ProbeFile(Section):
    """What `seqreg probe --tasks` reads."""

    tasks: list[TaskEntry] = Field(min_length=1, max_length=1000)


class ChainStep(Section):
    """One run of a chain, as given to `seqreg train`.

    Args:
        name: of its task in tables and folders; by default the variants, or the recipe
        settings: `key=value`, as on the command line
    """

    recipe: str
    name: str | None = None
    variants: list[str] = []
    settings: list[str] = []

    @property
    def title(self) -> str:
        return self.name or "-".join(self.variants) or Path(self.recipe).stem


class ChainPlan(Section):
    """What `seqreg chain` reads.

    Args:
        steps: runs, each from the encoder of the one before
        settings: `key=value` for all of them
        seeds: every method is trained with each
        output: the folder of the study; runs/chain-<name of the file> by default
    """

    steps: list[ChainStep] = Field(min_length=2, max_length=1000)
    settings: list[str] = []
    seeds: list[Natural] = Field(default=[1], min_length=1, max_length=1000)
    output: str | None = None

    @model_validator(mode="after")
    def _sets_seed_and_output(self) -> ChainPlan:
        """A chain chooses the seed and the output of every run: refuse others, which would be ignored."""
        for word in [*self.settings, *(word for step in self.steps for word in step.settings)]:
            if word.partition("=")[0].strip() in ("seed", "output"):
                raise ValueError(f"settings: {word}: a chain sets it itself: see seeds and output of the plan")
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> ChainPlan:
        titles = [step.title for step in self.steps]
        for title in titles:
            if not _NAME.fullmatch(title):
                raise ValueError(f"the step {title!r} needs another name: letters, digits, _ and -")
        if len(set(titles)) < len(titles):
            raise ValueError(f"steps are called {', '.join(titles)}: give each a name of its own (cycles: --cycles)")
        return self


def read(kind: type[S], path: Path) -> S:
    """A study's file, or one line about what is wrong with it."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    return checked(kind, overlay.read(path), lambda key: str(path))


@dataclass(frozen=True)
class ProbeTask:
    """A task that is probed: examples that a linear classifier is fitted to, and those that it is scored on.

    Args:
        run: how text is generated, for a task that a model is scored on and not probed
    """

    name: str
    card: Card
    data: Data
    train: Sequence[Example]
    test: Sequence[Example]
    split: str
    run: Run | None = None

    @classmethod
    def load(cls, name: str, card: Card, data: Data, most: int, run: Run | None = None) -> ProbeTask:
        """Load the examples of a task, at most so many of a split."""
        if card.kind != "classification" and (card.kind != "generation" or run is None):
            raise BadInput(f"{name}: a linear probe is a classifier, and {card.title} is {card.kind}")
        splits = loading.load(card, data.indexed)
        split = splits.evaluations(card)[0]
        train = loading.sample(splits.sets["train"], most)
        if run is None and len({example.label for example in train}) < 2:
            raise BadInput(f"{name}: all {len(train)} training examples have one label: nothing can be probed")
        return cls(name, card, data, train, loading.sample(splits.sets[split], most), split, run)


def read_tasks(path: Path, most: int) -> list[ProbeTask]:
    """The tasks of a file for `seqreg probe --tasks`, with their examples."""
    tasks = []
    for entry in read(ProbeFile, path).tasks:
        card, _ = cards.load(entry.task)
        values = {"max_source_length": card.lengths.source, "max_target_length": card.lengths.target, **entry.data}
        data = checked(Data, values, lambda key: f"{path}: data")
        tasks.append(ProbeTask.load(entry.name or Path(entry.task).stem, card, data, most))
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise BadInput(f"{path}: tasks are called {', '.join(names)}: give each a name of its own")
    return tasks
