"""`seqreg shift`: a model that was trained on one task, on another, as it is and after a little training there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput
from seqreg.studies.collapse import figures
from seqreg.studies.collapse.chain import one_process, train_run
from seqreg.studies.collapse.probe import Score
from seqreg.studies.common.findings import Finding, Table, command
from seqreg.studies.common.trained_model import TrainedModel, load_all
from seqreg.workbench.config import cards, methods, run_config
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.overlay import assigned, assigned_key
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import loading
from seqreg.workbench.run.signals import Signals
from seqreg.workbench.scores.results import scores_of
from seqreg.workbench.text.terminal import say

SOURCE_SETTINGS = (
    "task", "output", "generation", "data.path", "data.limit", "data.train_fraction", "data.max_source_length",
    "data.max_target_length",
    "model",
)  # fmt: skip
"""Settings of a run that belong to its data and not to its method."""


@dataclass(frozen=True)
class Move:
    """A trained run, and its runs on the target by the share of the target's training examples."""

    folder: Path
    runs: dict[float, Run]


@dataclass(frozen=True)
class ShiftPlan:
    """A study, resolved and checked before anything is trained; its moves by the names of the models."""

    moves: dict[str, Move]
    card: Card
    target: str
    metric: str


@dataclass(frozen=True)
class ShiftScores:
    """A model on its own task, None where that has another metric, and on the target by share."""

    source: Score | None
    target: dict[float, Score]


def resolve_onto(folder: Path, task: str, share: float, settings: Sequence[str], trust: bool = False) -> Run:
    """The run of a folder on another task: its model, its method and its optimisation; the other card's data.

    Texts are truncated at the shorter of the two cards' lengths. It is written to the run's folder, below shift/.
    """
    source, (card, _) = run_config.load(folder, build_terms=False).config, cards.load(task)
    head, data = source.model, source.data
    chosen = [
        assigned("task", task), assigned("model.name", folder),
        f"model.head={head.head}", f"model.head_layers={head.head_layers}",
        f"data.max_source_length={min(data.max_source_length, card.lengths.source)}",
        f"data.max_target_length={min(data.max_target_length, card.lengths.target)}",
        assigned("output", folder / "shift" / Path(task).stem / f"share-{share:g}"),
        *([f"data.train_fraction={share}"] if share else []), *methods.reaching(settings, source.terms),
    ]  # fmt: skip
    return run_config.load(folder, chosen, forget=SOURCE_SETTINGS, trust=trust)


def resolve(
    folders: Sequence[Path], task: str, shares: Sequence[float], settings: Sequence[str], trust: bool = False,
    trust_changes: bool = False,
) -> ShiftPlan:  # fmt: skip
    """Resolve all runs, and compare what the models were trained for with the target."""
    one_process()
    for share in shares:
        if not 0 <= share <= 1:
            raise BadInput(f"--share {share:g}: expected a share of the target's training examples, from 0 to 1")
    for setting in settings:
        if assigned_key(setting) in ("output", "task", "data.train_fraction"):
            raise BadInput(f"{setting}: not here: the folders, --to and --share say so")
    card, _ = cards.load(task)
    models = load_all(list(dict.fromkeys(folders)), trust=trust, trust_changes=trust_changes)
    for model in models.values():
        _check_same_kind(model.folder, model.card, card)
    shares = sorted(dict.fromkeys(shares))
    moves = {
        name: Move(m.folder, {share: resolve_onto(m.folder, task, share, settings, trust) for share in shares})
        for name, m in models.items()
    }
    runs = [run for move in moves.values() for run in move.runs.values()]
    methods.check_reach(settings, {term for run in runs for term in run.config.terms})
    if any(run.config.evaluation.resamples == 0 for run in runs):
        raise BadInput("evaluation.resamples=0: a shift is shown with intervals: add evaluation.resamples=1000")
    loading.load(card, runs[0].config.data, needs_train=any(shares))
    return ShiftPlan(moves, card, Path(task).stem, card.score if card.kind == "generation" else card.metric[0])


def _check_same_kind(folder: Path, source: Card, target: Card) -> None:
    if source.kind != target.kind:
        raise BadInput(f"{folder}: was trained for {source.kind}, and {target.title} is {target.kind}")
    if source.labels != target.labels:
        classes, others = (", ".join(card.labels or ()) for card in (source, target))
        raise BadInput(f"{folder}: its classes are {classes}; those of {target.title} are {others}: expected the same")


def _source_score(folder: Path, metric: str) -> Score | None:
    """The score on the task that the run was trained for; None where it has another metric."""
    scores = scores_of(folder)["scores"]
    main = next((name for name in ("test", "validation") if name in scores), next(iter(scores)))
    return _score(scores[main], metric) if metric in scores[main].get("intervals", {}) else None


def _target_score(run: Run, share: float, folder: Path, metric: str) -> Score:
    splits = loading.load(run.card, run.config.data, needs_train=bool(share))
    main = splits.evaluations(run.card)[0]
    if share:
        return _score(train_run(run)["scores"][main], metric)
    scored = TrainedModel.on_task(str(folder), run).score(splits.sets[main], main)
    return Score(scored.metrics[metric], *scored.intervals[metric])


def _score(scores: Mapping[str, Any], metric: str) -> Score:
    return Score(scores[metric], *scores["intervals"][metric])


def study(
    folders: Sequence[Path], task: str, shares: Sequence[float], output: Path, *, settings: Sequence[str] = (),
    trust: bool = False, trust_changes: bool = False,
) -> Finding:  # fmt: skip
    """Score every run on the target, train what is not trained yet, and write what was found."""
    plan = resolve(folders, task, shares, settings, trust, trust_changes)
    results: dict[str, ShiftScores] = {}
    with Signals():
        for name, move in plan.moves.items():
            results[name] = ShiftScores(_source_score(move.folder, plan.metric), {})
            for share, run in move.runs.items():
                say(f"{name}: {share:.0%} of the training examples of {plan.target}")
                results[name].target[share] = _target_score(run, share, move.folder, plan.metric)
    figures.shift(results, plan.target, plan.metric, output / "shift.svg", output / "shift.png")
    models = {
        name: {"folder": str(plan.moves[name].folder), "source": scores.source and asdict(scores.source),
               "target": {f"{share:g}": asdict(score) for share, score in scores.target.items()}}
        for name, scores in results.items()
    }  # fmt: skip
    words = ["shift", *folders, *settings, "--to", task, *(w for share in shares for w in ("--share", f"{share:g}"))]
    return Finding(
        "shift", f"From another domain to {plan.card.title}", command(*words), sentences(plan, results),
        [table(plan, results)], ["shift.svg"], {"target": plan.target, "metric": plan.metric, "models": models},
    ).write(output)  # fmt: skip


def table(plan: ShiftPlan, results: Mapping[str, ShiftScores]) -> Table:
    shares = next(iter(results.values())).target
    columns = ["model", "on its own task", *(f"{plan.target}, {share:.0%} of its examples" for share in shares)]
    rows: list[list[Any]] = [
        [name, scores.source and str(scores.source), *map(str, scores.target.values())]
        for name, scores in results.items()
    ]
    return Table(f"{plan.metric} in percent, with intervals over examples", columns, rows)


def sentences(plan: ShiftPlan, results: Mapping[str, ShiftScores]) -> list[str]:
    """The results in words."""
    lines = []
    for name, scores in results.items():
        numbers = ", ".join(f"{score.score:.1f} with {share:.0%}" for share, score in scores.target.items())
        lines.append(f"{name}: {plan.metric} on {plan.target} is {numbers} of its training examples.")
    if len(results) > 1:
        lines.append("Intervals are over examples, not over seeds: they compare these models, not their methods.")
    return lines
