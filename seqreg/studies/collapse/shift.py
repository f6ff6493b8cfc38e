"""Domain shift: a model that was trained on one task, on another, as it is and after a little training there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput
from seqreg.studies.collapse import figures as collapse_figures
from seqreg.studies.collapse.chain import one_process
from seqreg.studies.collapse.probe import labels, trained
from seqreg.studies.common.findings import Finding, Table
from seqreg.studies.common.scoring import score, train
from seqreg.workbench.config import cards, methods, run_config
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.overlay import assigned
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import loading
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.scores.results import scores_of
from seqreg.workbench.text.terminal import say

OF_THE_SOURCE = (
    "task", "output", "generation", "data.path", "data.limit", "data.train_fraction", "data.max_source_length",
    "data.max_target_length",
    "model",
)  # fmt: skip
"""Settings of a run that belong to its data and not to its method."""


@dataclass(frozen=True)
class Score:
    """A model on a split: percent, and an interval over examples."""

    score: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.score:.1f} [{self.low:.1f}, {self.high:.1f}]"


@dataclass(frozen=True)
class Move:
    """A trained run, and what it becomes on the target: by the share of the target's training rows."""

    folder: Path
    source: Run
    further: dict[float, Run]


@dataclass(frozen=True)
class Shift:
    """A study, resolved and checked before anything is trained."""

    moves: dict[str, Move]
    card: Card
    target: str
    metric: str


def onto(folder: Path, task: str, share: float, settings: Sequence[str], trust: bool = False) -> Run:
    """The run of a folder on another task: its model, its method and its training; the other card's data.

    Texts are cut at the shorter of the two cards' lengths. It is written to the run's folder, below shift/.
    """
    source, (card, _) = run_config.load(folder, build_terms=False).config, cards.load(task)
    head, data = source.model, source.data
    own = [
        assigned("task", task), assigned("model.name", folder),
        f"model.head={head.head}", f"model.head_layers={head.head_layers}",
        f"data.max_source_length={min(data.max_source_length, card.lengths.source)}",
        f"data.max_target_length={min(data.max_target_length, card.lengths.target)}",
        assigned("output", folder / "shift" / Path(task).stem / f"share-{share:g}"),
    ]  # fmt: skip
    own += [f"data.train_fraction={share}"] if share else []
    return run_config.load(folder, [*own, *methods.reaching(settings, source.terms)], forget=OF_THE_SOURCE, trust=trust)


def _same(folder: Path, source: Card, target: Card) -> None:
    if source.kind != target.kind:
        raise BadInput(f"{folder}: was trained for {source.kind}, and {target.title} is {target.kind}")
    if source.labels != target.labels:
        own, other = (", ".join(card.labels or ()) for card in (source, target))
        raise BadInput(f"{folder}: its classes are {own}; those of {target.title} are {other}: expected the same")


def lay(folders: Sequence[Path], task: str, shares: Sequence[float], settings: Sequence[str], trust: bool) -> Shift:
    """Resolve all trainings, and compare what the runs were trained for with the target."""
    one_process()
    for share in shares:
        if not 0 <= share <= 1:
            raise BadInput(f"--share {share:g}: expected a share of the target's training rows, from 0 to 1")
    for word in settings:
        if word.partition("=")[0] in ("output", "task", "data.train_fraction"):
            raise BadInput(f"{word}: not here: the folders, --to and --share say so")
    card, _ = cards.load(task)
    runs = {folder: trained(folder, trust) for folder in dict.fromkeys(folders)}
    for folder, run in runs.items():
        _same(folder, run.card, card)
    names = labels(runs)
    wanted = sorted(dict.fromkeys(shares))
    moves = {
        names[folder]: Move(folder, run, {share: onto(folder, task, share, settings, trust) for share in wanted})
        for folder, run in runs.items()
    }
    methods.check_reach(
        settings, {term for move in moves.values() for run in move.further.values() for term in run.config.terms}
    )
    if any(run.config.evaluation.resamples == 0 for move in moves.values() for run in move.further.values()):
        raise BadInput("evaluation.resamples=0: a shift is shown with intervals: add evaluation.resamples=1000")
    metric = "rougeL" if card.kind == "generation" else card.metric[0]
    some = next(iter(moves.values())).further[wanted[0]]
    loading.load(card, some.config.data, needs_train=any(wanted))
    return Shift(moves, card, Path(task).stem, metric)


def _numbers(found: Mapping[str, Any], metric: str) -> Score:
    low, high = found["intervals"][metric]
    return Score(found[metric], low, high)


def _own(move: Move, metric: str) -> Score | None:
    """The score on the task that the run was trained for; None where it is judged by another metric."""
    scores = scores_of(move.folder)["scores"]
    main = next((name for name in ("test", "validation") if name in scores), next(iter(scores)))
    return _numbers(scores[main], metric) if metric in scores[main].get("intervals", {}) else None


def _moved(run: Run, share: float, folder: Path, metric: str, trust: bool) -> Score:
    splits = loading.load(run.card, run.config.data, needs_train=bool(share))
    main = splits.evaluations(run.card)[0]
    if share:
        return _numbers(train(run)["scores"][main], metric)
    scored = score(str(folder), run, splits.sets[main], main, trust=trust)
    return _numbers({**scored.metrics, "intervals": scored.intervals}, metric)


def study(shift: Shift, output: Path, *, command: str, trust: bool = False) -> Finding:
    """Score every run on the target, train what is not trained yet, and write down what was found."""
    found: dict[str, dict[float, Score]] = {}
    own: dict[str, Score | None] = {}
    with Signals():
        for name, move in shift.moves.items():
            own[name], found[name] = _own(move, shift.metric), {}
            for share, run in move.further.items():
                say(f"{name}: {share:.0%} of the training rows of {shift.target}")
                found[name][share] = _moved(run, share, move.folder, shift.metric, trust)
    collapse_figures.shift(found, shift.target, shift.metric, output / "shift.svg", output / "shift.png")
    finding = Finding(
        "shift", f"From another domain to {shift.card.title}", command, sentences(shift, found),
        [table(shift, found, own)], ["shift.svg"],
        {"target": shift.target, "metric": shift.metric, "models": {
            name: {"folder": str(move.folder), "source": vars(own[name]) if own[name] else None,
                   "target": {f"{share:g}": vars(one) for share, one in found[name].items()}}
            for name, move in shift.moves.items()}},
    )  # fmt: skip
    finding.write(output)
    return finding


def table(shift: Shift, found: Mapping[str, Mapping[float, Score]], own: Mapping[str, Score | None]) -> Table:
    shares = list(next(iter(found.values())))
    columns = ["model", "on its own task", *(f"{shift.target}, {share:.0%} of its rows" for share in shares)]
    rows: list[list[Any]] = [
        [name, None if own[name] is None else str(own[name]), *(str(one) for one in scores.values())]
        for name, scores in found.items()
    ]
    return Table(f"{shift.metric} in percent, with intervals over examples", columns, rows)


def sentences(shift: Shift, found: Mapping[str, Mapping[float, Score]]) -> list[str]:
    """The results in words."""
    lines = []
    for name, scores in found.items():
        said = ", ".join(f"{one.score:.1f} with {share:.0%}" for share, one in scores.items())
        lines.append(f"{name}: {shift.metric} on {shift.target} is {said} of its training rows.")
    if len(found) > 1:
        lines.append("Intervals are over examples, not over seeds: they compare these models, not their methods.")
    return lines
