"""`seqreg compare`: from a recipe, terms and seeds to a verdict."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from seqreg.errors import BadInput, Interrupted
from seqreg.workbench import data, guard
from seqreg.workbench.console import say
from seqreg.workbench.evidence import comparison
from seqreg.workbench.evidence import jobs as trainings
from seqreg.workbench.evidence.comparison import Job, Plan
from seqreg.workbench.files import writable
from seqreg.workbench.runs import locked


def compare(
    recipe: str, methods: Sequence[str], seeds: str, folder: Path, *, variants: Sequence[str] = (),
    settings: Sequence[str] = (), alpha: float = 0.05, baseline: str = comparison.BASELINE, jobs: int = 1,
    launcher: str | None = None, collect: bool = False, extend: bool = False, retry: bool = False,
    trust: bool = False,
) -> Plan | None:  # fmt: skip
    """Train what is missing; the plan if there is something to judge, None if others were asked to train.

    Args:
        jobs: trainings at a time
        launcher: "print", or a command that takes a line of shell in place of {}
        collect: train nothing
        extend: allow seeds and methods to be added to a comparison that is there
        retry: train again what failed by itself
        trust: let code run that comes with a model
    """
    if jobs < 1:
        raise BadInput(f"--jobs {jobs}: expected a whole number from 1")
    writable(folder, "--output ")
    wanted, run = comparison.make(
        recipe, methods, seeds, variants=variants, settings=settings, alpha=alpha, baseline=baseline
    )
    plan = comparison.settle(folder, wanted, extend)
    if collect and not (folder / comparison.PLAN).exists():
        raise BadInput(f"--collect: {folder} has no comparison yet")
    data.load(run.card, run.config.data)  # what is wrong with the data is said once, not by every training
    with guard.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            plan.write(folder)
            return None if _left(plan, folder, jobs, launcher, collect, retry, trust) else plan


def _left(plan: Plan, folder: Path, most: int, launcher: str | None, collect: bool, retry: bool, trust: bool) -> bool:
    """Train what is missing; whether it was left to others."""
    everything = plan.jobs(folder)
    states = {job: trainings.state(job) for job in everything}
    wanted = {trainings.OPEN, trainings.FAILED} if retry else {trainings.OPEN}
    todo = [job for job in everything if states[job].kind in wanted]
    done = sum(found.kind == trainings.FINISHED for found in states.values())
    say(f"{len(everything)} trainings: {done} finished, {len(todo)} to do")
    if collect or not todo:
        return False
    if launcher == "print":
        print("\n".join(trainings.lines(plan, todo, trust)))
    elif launcher is not None:
        trainings.submit(launcher, trainings.lines(plan, todo, trust))
        say(f"{len(todo)} trainings submitted; gather them with the same command and --collect")
    else:
        _work(plan, todo, most, trust)
    return launcher is not None


def _work(plan: Plan, todo: Sequence[Job], most: int, trust: bool) -> None:
    kept = signal.signal(signal.SIGTERM, trainings.stop)
    try:
        trainings.work(plan, todo, most, trust)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT, "stopped; the same command goes on") from None
    finally:
        signal.signal(signal.SIGTERM, kept)
