"""Representational collapse: what a linear classifier can still read from a frozen encoder, and how rich it is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqreg.errors import BadInput
from seqreg.metrics.classification import classification
from seqreg.metrics.logistic import fit_probe
from seqreg.studies.collapse import figures as collapse_figures
from seqreg.studies.common import encoders, study_files
from seqreg.studies.common.encoders import Encoder, Layer, Pooling
from seqreg.studies.common.findings import Finding, Table
from seqreg.studies.common.scoring import ended, score
from seqreg.studies.common.study_files import Task
from seqreg.workbench.config import run_config
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.text.terminal import say

TEXTS = 128
"""That layers are compared on, the same number of every task."""
PRETRAINED = "pretrained"


@dataclass(frozen=True)
class Probing:
    """How well one task is done, in percent, with a bootstrap interval over examples.

    Args:
        score: accuracy of a linear classifier; ROUGE-L of a model that generates
        majority: accuracy of always saying the most common class
    """

    score: float
    low: float
    high: float
    majority: float | None = None
    penalty: float | None = None


@dataclass(frozen=True)
class Probed:
    """One encoder: its probes by task, and its layers from the first to the last."""

    probes: dict[str, Probing]
    layers: list[Layer]

    @property
    def rank(self) -> float:
        """Effective rank of the last layer."""
        return self.layers[-1].rank


@dataclass
class Lens:
    """The tasks that encoders are looked at with, and what the pretrained ones looked like."""

    tasks: Sequence[Task]
    pooling: Pooling = "mean"
    trust: bool = False
    references: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def look(self, name: str, pretrained: str | None, label: str, tokenizer: str | None = None) -> Probed:
        """Probe one model; `pretrained` is the one that its layers are compared with."""
        encoder = encoders.load(name, tokenizer=tokenizer, trust=self.trust)
        for task in self.tasks:
            encoders.check_room(encoder, task.name, task.data)
        probes = {task.name: self.probe(encoder, task, label) for task in self.tasks}
        own = self._token_states(encoder)
        if name == pretrained:
            self.references[name] = own
        elif pretrained is not None and pretrained not in self.references:
            self.references[pretrained] = self._token_states(encoders.load(pretrained, trust=self.trust))
        return Probed(probes, encoders.geometry(own, self.references[pretrained] if pretrained else None))

    def probe(self, encoder: Encoder, task: Task, label: str = "") -> Probing:
        """Fit a linear classifier to a task's training rows, and judge it by the others."""

        if task.run is not None:
            return generated(encoder.name, task, self.trust)

        def of(part: Any) -> Any:
            title = f"{label}, {task.name}"
            return encoders.features(encoder, part, task.data, self.pooling, title=title)

        classes = len(task.card.labels or ())
        known, truth = (np.array([int(one.label or 0) for one in part]) for part in (task.train, task.test))
        probe = fit_probe(of(task.train), known)
        scores, intervals = classification(["accuracy"], probe.predict(of(task.test)), truth)
        common = np.bincount(known, minlength=classes).argmax()
        (low, high), right = intervals["accuracy"], scores["accuracy"]
        share = float((truth == common).mean())
        return Probing(100 * right, 100 * low, 100 * high, 100 * share, probe.penalty)

    def _token_states(self, encoder: Encoder) -> list[torch.Tensor]:
        share = max(1, TEXTS // len(self.tasks))
        most = max(4, encoders.MOST_TOKENS // len(self.tasks))
        parts = [encoders.token_states(encoder, task.test[:share], task.data, most) for task in self.tasks]
        return [torch.cat(layer) for layer in zip(*parts, strict=True)]


def generated(name: str, task: Task, trust: bool) -> Probing:
    """ROUGE-L of a model on a task, without further training."""
    assert task.run is not None
    scored = score(name, task.run, task.test, task.split, trust=trust)
    low, high = scored.intervals["rougeL"]
    return Probing(scored.metrics["rougeL"], low, high)


def trained(folder: Path, trust: bool = False) -> Run:
    """The run of a folder whose training has ended."""
    run = run_config.load(folder, trust=trust, build_terms=False)
    ended(folder)
    return run


def labels(runs: Mapping[Path, Run]) -> dict[Path, str]:
    """A short name for every run: its method, with the seed where that is needed, or its folder."""
    for name in (
        {path: run.config.method for path, run in runs.items()},
        {path: f"{run.config.method}, seed {run.config.seed}" for path, run in runs.items()},
    ):
        if len(set(name.values())) == len(name):
            return name
    return {path: str(path) for path in runs}


def study(
    folders: Sequence[Path], file: Path | None, output: Path, *, command: str, rows: int = 5000,
    pooling: Pooling = "mean", pretrained: str | None = None, trust: bool = False,
) -> Finding:  # fmt: skip
    """Probe the encoders of runs, and the pretrained models that they began with, on the tasks of a file."""
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise BadInput(f"{', '.join(map(str, folders))}: the same run twice")
    runs = {folder: trained(folder, trust) for folder in folders}
    names = labels(runs)
    first = next(iter(runs.values()))
    if file is None and first.card.kind != "classification":
        raise BadInput(f"{folders[0]}: its task is not a classification, which is what is probed: give --tasks FILE")
    own = first.card.title
    tasks = study_files.tasks(file, rows) if file else [Task.of(own, first.card, first.config.data, rows)]
    lens = Lens(tasks, pooling, trust=trust)
    began = {folder: pretrained or encoders.origin(folder) for folder in runs}
    found: dict[str, Probed] = {}
    for folder in (folder for folder, base in began.items() if base is None):
        say(f"{folder} began without a pretrained model, so its layers are compared with none: see --pretrained")
    for base in dict.fromkeys(name for name in began.values() if name):
        label = PRETRAINED if len(set(began.values())) == 1 else f"{PRETRAINED} {base}"
        say(f"probing {label}")
        found[label] = lens.look(base, base, label)
    for folder in runs:
        say(f"probing {folder}")
        found[names[folder]] = lens.look(str(folder), began[folder], names[folder])
    collapse_figures.probes(found, tasks, output / "probe.svg", output / "probe.png")
    finding = Finding(
        "probe", "What a linear classifier reads from frozen encoders", command, sentences(found, tasks),
        [accuracy_table(found, tasks), layer_table(found)], ["probe.svg"],
        {"models": {name: asdict(one) for name, one in found.items()}, "pooling": pooling,
         "tasks": {one.name: {"train": len(one.train), "test": len(one.test), "split": one.split} for one in tasks}},
    )  # fmt: skip
    finding.write(output)
    return finding


def accuracy_table(found: Mapping[str, Probed], tasks: Sequence[Task]) -> Table:
    """Accuracies in percent, with intervals, and the rate of the most common class beside them."""
    rows = [
        [task.name, _rounded(next(iter(found.values())).probes[task.name].majority)]
        + [shown(one.probes[task.name]) for one in found.values()]
        for task in tasks
    ]
    return Table("accuracy of linear probes in percent", ["task", "most common class", *found], rows)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def shown(one: Probing) -> str:
    return f"{one.score:.1f} [{one.low:.1f}, {one.high:.1f}]"


def layer_table(found: Mapping[str, Probed]) -> Table:
    """Effective rank and CKA of every layer."""
    columns = ["model", "layer", "effective rank", "CKA to the pretrained"]
    rows = [
        [name, number, round(layer.rank, 1), None if layer.cka is None else round(layer.cka, 3)]
        for name, one in found.items()
        for number, layer in enumerate(one.layers, start=1)
    ]
    return Table("how rich the layers are, and how near to the pretrained ones", columns, rows)


def sentences(found: Mapping[str, Probed], tasks: Sequence[Task]) -> list[str]:
    """The results in words: of every model the mean over tasks, its rank, its nearness to the pretrained one."""
    lines = []
    for name, one in found.items():
        mean = float(np.mean([probe.score for probe in one.probes.values()]))
        line = (
            f"{name}: linear probes on {len(tasks)} tasks are right in {mean:.1f}% on average; the last layer has an "
        )
        line += f"effective rank of {one.rank:.1f}"
        cka = one.layers[-1].cka
        lines.append(line + ("." if cka is None or name.startswith(PRETRAINED) else
                             f" and a CKA of {cka:.3f} to the pretrained one."))  # fmt: skip
    near = [task.name for task in tasks if all(_no_better(one.probes[task.name]) for one in found.values())]
    if near:
        lines.append(f"On {', '.join(near)} no model is clearly better than the most common class: it says little.")
    return lines


def _no_better(one: Probing) -> bool:
    return one.majority is not None and one.low <= one.majority
