"""`seqreg probe`: representational collapse, by what a linear classifier can still read from a frozen encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from seqreg.errors import BadInput
from seqreg.metrics.classification import classification
from seqreg.metrics.logistic import fit_probe
from seqreg.studies.collapse import encoders, figures, study_files
from seqreg.studies.collapse.encoders import Encoder, Layer, Pooling
from seqreg.studies.collapse.study_files import ProbeTask
from seqreg.studies.common.findings import Finding, Table, command
from seqreg.studies.common.trained_model import TrainedModel, load_all
from seqreg.workbench.data.examples import Example
from seqreg.workbench.text.terminal import say

TEXTS = 128
"""That layers are compared on, the same number of every task."""
PRETRAINED = "pretrained"


@dataclass(frozen=True)
class Score:
    """A score in percent, with a bootstrap interval over examples."""

    score: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.score:.1f} [{self.low:.1f}, {self.high:.1f}]"


@dataclass(frozen=True)
class ProbeScore(Score):
    """The accuracy of a linear classifier; or the deciding score of a model that generates.

    Args:
        majority: accuracy of always choosing the most common class
        penalty: of the classifier, chosen by cross-validation
    """

    majority: float | None = None
    penalty: float | None = None

    @property
    def informative(self) -> bool:
        """Whether it is clearly better than the most common class."""
        return self.majority is None or self.low > self.majority


@dataclass(frozen=True)
class ProbedModel:
    """One encoder: its probes by task, and its layers from the first to the last."""

    probes: dict[str, ProbeScore]
    layers: list[Layer]

    @property
    def rank(self) -> float:
        """Effective rank of the last layer."""
        return self.layers[-1].rank


@dataclass
class Prober:
    """Probes models on tasks, and remembers the states of the pretrained ones that they are compared with."""

    tasks: Sequence[ProbeTask]
    pooling: Pooling = "mean"
    trust: bool = False
    pretrained: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def probe(self, name: str, pretrained: str | None, label: str) -> ProbedModel:
        """Probe one model; `pretrained` is the one that its layers are compared with."""
        encoder = Encoder.load(name, trust=self.trust)
        for task in self.tasks:
            encoder.check_length(task.name, task.data)
        probes = {task.name: self._score(encoder, task, label) for task in self.tasks}
        states = self._token_states(encoder)
        if name == pretrained:
            self.pretrained[name] = states
        elif pretrained is not None and pretrained not in self.pretrained:
            self.pretrained[pretrained] = self._token_states(Encoder.load(pretrained, trust=self.trust))
        return ProbedModel(probes, encoders.layers(states, self.pretrained[pretrained] if pretrained else None))

    def _score(self, encoder: Encoder, task: ProbeTask, label: str) -> ProbeScore:
        """Fit a linear classifier to a task's training examples and score it on the others; or score generated text."""
        if task.run is not None:
            scored = TrainedModel.on_task(encoder.name, task.run).score(task.test, task.split)
            name = task.run.card.score
            return ProbeScore(scored.metrics[name], *scored.intervals[name])

        def features(examples: Sequence[Example]) -> NDArray[np.float64]:
            return encoder.features(examples, task.data, self.pooling, f"{label}, {task.name}")

        known, truth = (np.array([int(example.label or 0) for example in split]) for split in (task.train, task.test))
        probe = fit_probe(features(task.train), known)
        scores, intervals = classification(["accuracy"], probe.predict(features(task.test)), truth)
        most_common = np.bincount(known, minlength=len(task.card.labels or ())).argmax()
        low, high = intervals["accuracy"]
        majority = float((truth == most_common).mean())
        return ProbeScore(100 * scores["accuracy"], 100 * low, 100 * high, 100 * majority, probe.penalty)

    def _token_states(self, encoder: Encoder) -> list[torch.Tensor]:
        texts = max(1, TEXTS // len(self.tasks))
        most = max(4, encoders.MOST_TOKENS // len(self.tasks))
        states = [encoder.token_states(task.test[:texts], task.data, most) for task in self.tasks]
        return [torch.cat(layer) for layer in zip(*states, strict=True)]


def study(
    folders: Sequence[Path], file: Path | None, output: Path, *, most: int = 5000, pooling: Pooling = "mean",
    pretrained: str | None = None, trust: bool = False, trust_changes: bool = False,
) -> Finding:  # fmt: skip
    """Probe the encoders of runs, and the pretrained models that they started from, on the tasks of a file."""
    runs = load_all(folders, trust=trust, trust_changes=trust_changes)
    first = next(iter(runs.values()))
    if file is not None:
        tasks = study_files.read_tasks(file, most)
    elif first.card.kind == "classification":
        tasks = [ProbeTask.load(first.card.title, first.card, first.run.config.data, most)]
    else:
        raise BadInput(f"{folders[0]}: its task is not a classification, which is what is probed: give --tasks FILE")
    prober = Prober(tasks, pooling, trust=trust)
    starts = {name: pretrained or encoders.pretrained_model(run.folder) for name, run in runs.items()}
    for name in (name for name, start in starts.items() if start is None):
        say(f"{runs[name].folder} started without a pretrained model: its layers are compared with none: --pretrained")
    probed: dict[str, ProbedModel] = {}
    for start in dict.fromkeys(start for start in starts.values() if start):
        label = PRETRAINED if len(set(starts.values())) == 1 else f"{PRETRAINED} {start}"
        say(f"probing {label}")
        probed[label] = prober.probe(start, start, label)
    for name, run in runs.items():
        say(f"probing {run.folder}")
        probed[name] = prober.probe(str(run.folder), starts[name], name)
    figures.probes(probed, tasks, output / "probe.svg", output / "probe.png")
    words = ["probe", *folders, *(["--tasks", file] if file else []), "--examples", most, "--pooling", pooling]
    sizes = {task.name: {"train": len(task.train), "test": len(task.test), "split": task.split} for task in tasks}
    return Finding(
        "probe", "What a linear classifier reads from frozen encoders",
        command(*words, *(["--pretrained", pretrained] if pretrained else [])), sentences(probed, tasks),
        [accuracy_table(probed, tasks), layer_table(probed)], ["probe.svg"],
        {"models": {name: asdict(one) for name, one in probed.items()}, "pooling": pooling, "tasks": sizes},
    ).write(output)  # fmt: skip


def accuracy_table(probed: Mapping[str, ProbedModel], tasks: Sequence[ProbeTask]) -> Table:
    """Accuracies in percent, with intervals, and the rate of the most common class beside them."""
    rows = []
    for task in tasks:
        scores = [model.probes[task.name] for model in probed.values()]
        majority = None if scores[0].majority is None else round(scores[0].majority, 1)
        rows.append([task.name, majority, *map(str, scores)])
    return Table("accuracy of linear probes in percent", ["task", "most common class", *probed], rows)


def layer_table(probed: Mapping[str, ProbedModel]) -> Table:
    """Effective rank and CKA of every layer."""
    columns = ["model", "layer", "effective rank", "CKA to the pretrained"]
    rows = [
        [name, number, round(layer.rank, 1), None if layer.cka is None else round(layer.cka, 3)]
        for name, model in probed.items()
        for number, layer in enumerate(model.layers, start=1)
    ]
    return Table("how rich the layers are, and how near to the pretrained ones", columns, rows)


def sentences(probed: Mapping[str, ProbedModel], tasks: Sequence[ProbeTask]) -> list[str]:
    """The results in words: of every model the mean over tasks, its rank, its nearness to the pretrained one."""
    lines = []
    for name, model in probed.items():
        mean, cka = float(np.mean([probe.score for probe in model.probes.values()])), model.layers[-1].cka
        near = "" if cka is None or name.startswith(PRETRAINED) else f" and a CKA of {cka:.3f} to the pretrained one"
        lines.append(
            f"{name}: linear probes on {len(tasks)} tasks are right in {mean:.1f}% on average; the last layer has an "
            f"effective rank of {model.rank:.1f}{near}."
        )
    useless = [task.name for task in tasks if not any(m.probes[task.name].informative for m in probed.values())]
    if useless:
        lines.append(f"On {', '.join(useless)} no model is clearly better than the most common class: it says little.")
    return lines
