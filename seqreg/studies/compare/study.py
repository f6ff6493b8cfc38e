"""`seqreg compare`: from a recipe, terms and seeds to finished runs; models that are not kept are removed."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from seqreg.errors import BadInput, Interrupted
from seqreg.metrics.texts import greater_is_better
from seqreg.studies.compare import jobs, plan
from seqreg.studies.compare.plan import ComparisonPlan, Job
from seqreg.workbench.config.methods import BASELINE
from seqreg.workbench.data import loading
from seqreg.workbench.run import disk
from seqreg.workbench.run.checkpoints import PREFIX
from seqreg.workbench.run.run_directory import locked
from seqreg.workbench.scores.results import METRICS, deciding, main_split, scores_of
from seqreg.workbench.text.atomic_files import REMOVED, writable, write_text
from seqreg.workbench.text.terminal import say

KEEP = {
    "best": "of every method the model with the best validation score is kept; --keep-models all keeps every one",
    "all": "all models are kept",
    "none": "no model is kept: scores, predictions and curves are",
}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def compare(
    recipe: str, methods: Sequence[str], seeds: str, folder: Path, *, variants: Sequence[str] = (),
    settings: Sequence[str] = (), alpha: float = 0.05, baseline: str = BASELINE, at_a_time: int = 1,
    launcher: str | None = None, collect: bool = False, extend: bool = False, retry: bool = False,
    keep_models: str | None = None, primary: Sequence[str] = (), trust: bool = False,
) -> ComparisonPlan | None:  # fmt: skip
    """Train what is missing; the plan if there is something to judge, None if the runs were left to a launcher.

    Args:
        at_a_time: runs at a time
        launcher: "print", or a command that takes a line of shell in place of {}
        collect: train nothing and write nothing, also while others train
        extend: allow seeds and methods to be added to an earlier comparison
        retry: train runs again that have failed
        keep_models: see `ComparisonPlan`; by default as the comparison was begun, "best" for a new one
        primary: the methods whose difference is tested; all by default
        trust: let code run that comes with a model
    """
    if at_a_time < 1:
        raise BadInput(f"--jobs {at_a_time}: expected a whole number from 1")
    writable(folder, "--output ")
    if launcher not in (None, "print"):
        jobs.launcher_words(launcher)
    wanted, run = plan.make(
        recipe, methods, seeds, variants=variants, settings=settings, alpha=alpha, baseline=baseline, primary=primary
    )
    exists = (folder / plan.PLAN).exists()
    chosen = plan.settle(folder, wanted, extend)
    if collect:
        if not exists or chosen != plan.read(folder):
            raise BadInput(
                f"--collect: {folder} has no {'such ' if exists else ''}comparison yet: leave it out to begin"
            )
        _to_do(chosen, folder)
        return chosen
    chosen = replace(chosen, keep_models=keep_models or (plan.read(folder).keep_models if exists else "best"))
    loading.load(run.card, run.config.data)  # an error in the data is told once, not by every run
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            chosen.write(folder)
            done, todo = _to_do(chosen, folder, retry)
            if not todo:
                prune(chosen, folder)
                return chosen
            say(KEEP[chosen.keep_models])
            if launcher is None:
                _train(chosen, folder, todo, at_a_time, done, trust)
                return chosen
            lines = jobs.shell_lines(chosen, todo, trust)
            if launcher == "print":
                print("\n".join(lines))
            else:
                jobs.submit(launcher, lines)
                say(f"{len(todo)} runs submitted; gather them with the same command and --collect")
            return None


def _to_do(chosen: ComparisonPlan, folder: Path, retry: bool = False) -> tuple[int, list[Job]]:
    """How many runs are finished, and those that are to be trained; says so."""
    everything = chosen.jobs(folder)
    for job in everything:
        if (record := jobs.finished_record(job)) is not None:
            plan.check_record(chosen, job, record)
    kinds = {job: jobs.state(job).kind for job in everything}
    wanted = {jobs.OPEN, jobs.FAILED} if retry else {jobs.OPEN}
    todo = [job for job in everything if kinds[job] in wanted]
    done = list(kinds.values()).count(jobs.FINISHED)
    say(f"{len(everything)} runs: {done} finished, {len(todo)} to do")
    return done, todo


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
    """Remove the models of finished runs that the plan does not keep; scores, predictions and curves stay."""
    if chosen.keep_models == "all":
        return
    for name in chosen.methods:
        done = [j for j in chosen.jobs(folder) if j.method == name and jobs.finished_record(j) and _has_model(j)]
        best = max(done, key=_validation_score) if done and chosen.keep_models == "best" else None
        for job in done:
            if job != best:
                _remove_model(chosen, job)


def _has_model(job: Job) -> bool:
    return (job.folder / "config.json").is_file() and (job.folder / METRICS).is_file()


def _validation_score(job: Job) -> float:
    """What chooses between seeds, the larger the better: of the validation set, for the test set must not choose."""
    metrics = scores_of(job.folder)
    scores = metrics["scores"]
    split = "validation" if "validation" in scores else main_split(scores, True)
    return float(scores[split]["score"]) * (1 if greater_is_better(deciding(metrics, split)) else -1)


def _remove_model(chosen: ComparisonPlan, job: Job) -> None:
    again = shlex.join(["seqreg", *chosen.words(job), "--overwrite"])
    write_text(
        job.folder / REMOVED,
        f"seqreg compare has removed the model (--keep-models {chosen.keep_models}). This trains it again:\n{again}\n",
    )
    for pattern in (*_WEIGHTS, "config.json"):
        for path in job.folder.glob(pattern):
            path.unlink()
    for path in job.folder.glob(f"{PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
