"""`seqreg compare`: from a recipe, terms and seeds to a verdict."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from seqreg.errors import BadInput, Interrupted
from seqreg.studies.compare import comparison, kept_models
from seqreg.studies.compare import jobs as trainings
from seqreg.studies.compare.comparison import Job, Plan
from seqreg.workbench.config.methods import BASELINE
from seqreg.workbench.data import loading
from seqreg.workbench.run import disk
from seqreg.workbench.run.run_directory import locked
from seqreg.workbench.text.atomic_files import writable
from seqreg.workbench.text.terminal import say


def compare(
    recipe: str, methods: Sequence[str], seeds: str, folder: Path, *, variants: Sequence[str] = (),
    settings: Sequence[str] = (), alpha: float = 0.05, baseline: str = BASELINE, jobs: int = 1,
    launcher: str | None = None, collect: bool = False, extend: bool = False, retry: bool = False,
    keep_models: str | None = None, trust: bool = False,
) -> Plan | None:  # fmt: skip
    """Train what is missing; the plan if there is something to judge, None if others were asked to train.

    Args:
        jobs: trainings at a time
        launcher: "print", or a command that takes a line of shell in place of {}
        collect: train nothing and write nothing, also while others train
        extend: allow seeds and methods to be added to a comparison that is there
        retry: train again what failed by itself
        keep_models: see `Plan`; by default as the comparison was begun, "best" for a new one
        trust: let code run that comes with a model
    """
    if jobs < 1:
        raise BadInput(f"--jobs {jobs}: expected a whole number from 1")
    writable(folder, "--output ")
    if launcher not in (None, "print"):
        trainings.launcher_words(launcher)
    wanted, run = comparison.make(
        recipe, methods, seeds, variants=variants, settings=settings, alpha=alpha, baseline=baseline
    )
    known = (folder / comparison.PLAN).exists()
    plan = comparison.settle(folder, wanted, extend)
    if collect:
        if not known or plan != comparison.read(folder):
            raise BadInput(
                f"--collect: {folder} has no {'such ' if known else ''}comparison yet: leave it out to begin"
            )
        _tell(plan, folder)
        return plan
    plan = replace(plan, keep_models=keep_models or (comparison.read(folder).keep_models if known else "best"))
    loading.load(run.card, run.config.data)  # what is wrong with the data is said once, not by every training
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            plan.write(folder)
            return None if _left(plan, folder, jobs, launcher, retry, trust) else plan


def _tell(plan: Plan, folder: Path, retry: bool = False) -> tuple[int, list[Job]]:
    """Say how the trainings stand; how many are finished, and those that are to be made."""
    everything = plan.jobs(folder)
    for job in everything:
        if (record := trainings.record_of(job)) is not None:
            comparison.check_filed(plan, job, record)
    states = {job: trainings.state(job) for job in everything}
    wanted = {trainings.OPEN, trainings.FAILED} if retry else {trainings.OPEN}
    todo = [job for job in everything if states[job].kind in wanted]
    done = sum(found.kind == trainings.FINISHED for found in states.values())
    say(f"{len(everything)} trainings: {done} finished, {len(todo)} to do")
    return done, todo


def _left(plan: Plan, folder: Path, most: int, launcher: str | None, retry: bool, trust: bool) -> bool:
    """Train what is missing; whether it was left to others."""
    done, todo = _tell(plan, folder, retry)
    if not todo:
        kept_models.prune(plan, folder)
        return False
    say(kept_models.SAID[plan.keep_models])
    if launcher == "print":
        print("\n".join(trainings.lines(plan, todo, trust)))
    elif launcher is not None:
        trainings.submit(launcher, trainings.lines(plan, todo, trust))
        say(f"{len(todo)} trainings submitted; gather them with the same command and --collect")
    else:
        _work(plan, folder, todo, most, done, trust)
    return launcher is not None


def _work(plan: Plan, folder: Path, todo: Sequence[Job], most: int, done: int, trust: bool) -> None:
    kept = signal.signal(signal.SIGTERM, trainings.stop)
    try:
        with contextlib.closing(trainings.work(plan, todo, most, done, trust)) as ended:
            for _ in ended:
                kept_models.prune(plan, folder)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, "stopped; the same command goes on") from None
    finally:
        signal.signal(signal.SIGTERM, kept)
