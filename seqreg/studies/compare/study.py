"""`seqreg compare`: from a recipe, terms and seeds to finished runs; models that are not kept are removed."""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from seqreg.errors import BadInput, Interrupted
from seqreg.metrics.texts import greater_is_better
from seqreg.studies.compare import jobs, plan
from seqreg.studies.compare.arms import CHOOSING
from seqreg.studies.compare.plan import ComparisonPlan, Job
from seqreg.workbench.config.methods import BASELINE
from seqreg.workbench.data import loading
from seqreg.workbench.run.checkpoints import PREFIX
from seqreg.workbench.run.launch import processes
from seqreg.workbench.run.run_directory import locked
from seqreg.workbench.scores.results import METRICS, deciding, main_split, scores_of
from seqreg.workbench.text.atomic_files import REMOVED, writable, write_text, writing
from seqreg.workbench.text.terminal import say

KEEP = {
    "best": "of every method the model with the best validation score is kept; --keep-models all keeps every one",
    "all": "all models are kept",
    "none": "no model is kept: scores, predictions and curves are",
}
SEARCH_PHASES = {"rates": "trials of learning rates", "trials": "trials"}
"""The phases of a search, and what their runs are called."""
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def compare(
    recipe: str, methods: Sequence[str], seeds: str, folder: Path, *, variants: Sequence[str] = (),
    settings: Sequence[str] = (), alpha: float = 0.05, baseline: str = BASELINE, arms: Sequence[str] = (),
    search: int = 0, grid: Sequence[str] = (), at_a_time: int = 1, launcher: str | None = None, collect: bool = False,
    extend: bool = False,
    retry: bool = False, keep_models: str | None = None, primary: Sequence[str] = (), nproc: int = 1,
    trust: bool = False,
) -> ComparisonPlan | None:  # fmt: skip
    """Train what is missing; the plan if there is something to judge, None if the runs were left to a launcher.

    First the trials of a search, then the runs, then the free arms: each needs what is before it.

    Args:
        arms: free arms; see `seqreg.studies.compare.arms`
        search: the most trials of a method; 0 for none
        grid: values to search; see `seqreg.studies.compare.search.begun`
        at_a_time: runs at a time
        launcher: "print", or a command that takes a line of shell in place of {}
        collect: train nothing and write nothing, also while others train
        extend: allow seeds and methods to be added to an earlier comparison
        retry: train runs again that have failed
        keep_models: see `ComparisonPlan`; by default as the comparison was begun, "best" for a new one
        primary: the methods whose difference is tested; all by default
        nproc: processes of every run, by `seqreg launch`
        trust: let code run that comes with a model
    """
    if processes()[1] > 1:
        raise BadInput("a comparison runs in one process and starts its runs itself: leave out torchrun; see --nproc")
    if at_a_time < 1:
        raise BadInput(f"--jobs {at_a_time}: expected a whole number from 1")
    writable(folder, "--output ")
    if launcher not in (None, "print"):
        jobs.launcher_words(launcher)
    wanted, run = plan.make(
        recipe, methods, seeds, variants=variants, settings=settings, alpha=alpha, baseline=baseline, arms=arms,
        search=search, grid=grid, primary=primary, nproc=nproc,
    )  # fmt: skip
    exists = (folder / plan.PLAN).exists()
    chosen = plan.settle(folder, wanted, extend)
    if collect:
        if not exists or chosen != plan.read(folder):
            raise BadInput(
                f"--collect: {folder} has no {'such ' if exists else ''}comparison yet: leave it out to begin"
            )
        return _collect(chosen, folder)
    chosen = replace(chosen, keep_models=keep_models or (plan.read(folder).keep_models if exists else "best"))
    splits = loading.load(run.card, run.config.data)  # an error in the data is told once, not by every run
    _check_choosing(chosen, splits.evaluations(run.card))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            _check_sources(chosen, folder)
            chosen.write(folder)
            return _work(chosen, folder, at_a_time, launcher, retry, trust)


def _collect(chosen: ComparisonPlan, folder: Path) -> ComparisonPlan | None:
    """What can be judged; None while there are only trials of a search."""
    if _unchosen(chosen):
        _to_do(chosen, chosen.trials(folder), "trials")
        say("no run yet: the same command without --collect, when all trials have ended, gives what follows")
        return None
    _to_do(chosen, chosen.jobs(folder), "runs")
    return chosen


def _check_choosing(chosen: ComparisonPlan, judged: Sequence[str]) -> None:
    """Refuse to choose by the examples that the comparison is judged by."""
    choosing = [f"--arm {arm}" for arm in chosen.arms if arm in CHOOSING] + ["--search"] * bool(chosen.search.budget)
    if len(chosen.arms) > 1:  # the best of them is chosen by validation
        choosing.append(" ".join(f"--arm {arm}" for arm in chosen.arms))
    if "validation" in judged and choosing:
        raise BadInput(
            f"{choosing[0]}: the task is judged by its validation set, which cannot choose settings too: give it a "
            "test set, or a card with holdout"
        )


def _work(
    chosen: ComparisonPlan, folder: Path, at_a_time: int, launcher: str | None, retry: bool, trust: bool
) -> ComparisonPlan | None:
    """Go through trials, runs and arms, and stop where the next cannot begin yet."""
    for phase in ("rates", "trials", "runs", "arms"):
        if (phase == "rates" and not _without_rate(chosen)) or (phase == "trials" and not _unchosen(chosen)):
            continue
        if phase == "arms" and not chosen.arms:
            continue
        everything = chosen.trials(folder) if phase in SEARCH_PHASES else chosen.jobs(folder)
        everything = [job for job in everything if job.trial or bool(job.sources) == (phase == "arms")]
        done, todo = _to_do(chosen, everything, SEARCH_PHASES.get(phase, phase), retry)
        if todo and launcher is not None:
            _launch(chosen, todo, launcher, phase, trust)
            return None
        if todo:
            search = phase in SEARCH_PHASES
            say("no model of a trial is kept, and no test set scored" if search else KEEP[chosen.keep_models])
            _train(chosen, folder, todo, at_a_time, done, trust)
        if any(jobs.state(job).kind == jobs.OPEN for job in everything):  # stopped from outside: the next cannot begin
            break
        if phase in SEARCH_PHASES:
            chosen = _choose(chosen, folder, phase == "rates")
    prune(chosen, folder)
    return chosen


def _launch(chosen: ComparisonPlan, todo: Sequence[Job], launcher: str, phase: str, trust: bool) -> None:
    lines = jobs.shell_lines(chosen, todo, trust)
    if launcher == "print":
        print("\n".join(lines))
    else:
        jobs.submit(launcher, lines)
        say(f"{len(todo)} {SEARCH_PHASES.get(phase, phase)} submitted; gather them with the same command and --collect")
    phases = ["rates", "trials", "runs", *(["arms"] if chosen.arms else [])]
    names = {"trials": "further trials", "runs": "the runs", "arms": "the free arms"}
    later = [names[name] for name in phases[phases.index(phase) + 1 :]]
    if later:
        say(f"the same command again, when all have ended, gives {' and then '.join(later)}")


def _without_rate(chosen: ComparisonPlan) -> list[str]:
    """The methods whose best learning rate is still to be found."""
    return [name for name in _unchosen(chosen) if name not in chosen.search.rates]


def _unchosen(chosen: ComparisonPlan) -> list[str]:
    """The methods whose settings are still to be chosen."""
    return [name for name in chosen.search.trials if name not in chosen.search.chosen]


def _choose(chosen: ComparisonPlan, folder: Path, rates: bool) -> ComparisonPlan:
    """Choose by the validation scores of the trials, and write it down.

    Args:
        rates: the learning rates, which give further trials, and not yet the settings of the methods
    """
    names = _without_rate(chosen) if rates else _unchosen(chosen)
    scores: dict[str, list[float | None]] = {name: [] for name in names}
    sign = 1
    for job in chosen.trials(folder):
        if job.method in scores:
            score = None
            if jobs.finished_record(job) is not None:
                score, sign = _validation_score(job)
            scores[job.method].append(score)
    chosen = (plan.with_rates if rates else plan.with_choices)(chosen, scores, greater_is_better=sign > 0)
    chosen.write(folder)
    for name in scores:
        place = (chosen.search.rates if rates else chosen.search.chosen)[name]
        say(f"{name}: {', '.join(chosen.search.trials[name][place].settings)}")
    return chosen


def _to_do(chosen: ComparisonPlan, everything: Sequence[Job], phase: str, retry: bool = False) -> tuple[int, list[Job]]:
    """How many of some runs are finished, and those that are to be trained; says so."""
    for job in everything:
        if (record := jobs.finished_record(job)) is not None:
            plan.check_record(chosen, job, record)
    kinds = {job: jobs.state(job).kind for job in everything}
    wanted = {jobs.OPEN, jobs.FAILED} if retry else {jobs.OPEN}
    todo = [job for job in everything if kinds[job] in wanted and _can_begin(job)]
    done = list(kinds.values()).count(jobs.FINISHED)
    say(f"{len(everything)} {phase}: {done} finished, {len(todo)} to do")
    return done, todo


def _can_begin(job: Job) -> bool:
    """Whether the runs that an arm is made of are finished."""
    return all(jobs.finished_record(source) is not None for source in job.sources)


def _check_sources(chosen: ComparisonPlan, folder: Path) -> None:
    """Refuse arms whose models were removed, before anything is written or trained."""
    for job in chosen.jobs(folder):
        for source in job.sources if jobs.finished_record(job) is None else ():
            if (source.folder / REMOVED).is_file():
                raise BadInput(
                    f"--arm {job.method}: the model of {source.title} was not kept: {source.folder / REMOVED} says how "
                    "to train it again; a comparison with --keep-models all keeps every one"
                )


def _train(chosen: ComparisonPlan, folder: Path, todo: Sequence[Job], at_a_time: int, done: int, trust: bool) -> None:
    before = signal.signal(signal.SIGTERM, jobs.stop)
    try:
        with contextlib.closing(jobs.work(chosen, todo, at_a_time, done, trust)) as ended:
            for _ in ended:
                prune(chosen, folder)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, jobs.STOPPED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def prune(chosen: ComparisonPlan, folder: Path) -> None:
    """Remove the models of finished runs that the plan does not keep; scores, predictions and curves stay.

    Those that free arms are made of stay until the arms are scored.
    """
    for job in chosen.trials(folder):
        if jobs.finished_record(job) is not None and _has_model(job):
            _remove_model(chosen, job)
    if chosen.keep_models == "all":
        return
    everything = chosen.jobs(folder)
    needed = {source for job in everything for source in job.sources if jobs.finished_record(job) is None}
    for name in chosen.methods:
        if any(job.method == name for job in needed):  # its arms are to be made of them
            continue
        done = [j for j in everything if j.method == name and jobs.finished_record(j) and _has_model(j)]
        best = (
            max(done, key=lambda job: math.prod(_validation_score(job)))
            if done and chosen.keep_models == "best"
            else None
        )
        for job in done:
            if job != best:
                _remove_model(chosen, job)


def _has_model(job: Job) -> bool:
    return (job.folder / "config.json").is_file() and (job.folder / METRICS).is_file()


def _validation_score(job: Job) -> tuple[float, int]:
    """The score that chooses, of the validation set, for the test set must not; and 1, or -1 where lower is better."""
    metrics = scores_of(job.folder)
    scores = metrics["scores"]
    split = "validation" if "validation" in scores else main_split(scores, True)
    return float(scores[split]["score"]), 1 if greater_is_better(deciding(metrics, split)) else -1


def _remove_model(chosen: ComparisonPlan, job: Job) -> None:
    again = shlex.join(["seqreg", *chosen.words(job), "--overwrite"])
    why = "a trial of --search" if job.trial else f"--keep-models {chosen.keep_models}"
    write_text(
        job.folder / REMOVED,
        f"seqreg compare has removed the model ({why}). This makes it again:\n{again}\n",
    )
    for pattern in (*_WEIGHTS, "config.json"):
        for path in job.folder.glob(pattern):
            path.unlink()
    for path in job.folder.glob(f"{PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
