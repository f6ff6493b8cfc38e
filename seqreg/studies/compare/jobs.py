"""The runs of a comparison as processes: started, watched, and ended with it."""

from __future__ import annotations

import fcntl
import shlex
import shutil
import subprocess
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seqreg.errors import BadInput, Interrupted
from seqreg.studies.common.processes import ForkedCommand
from seqreg.studies.compare.plan import ComparisonPlan, Job
from seqreg.workbench.run.record import RunRecord
from seqreg.workbench.run.run_directory import LOCK
from seqreg.workbench.scores.results import METRICS, deciding, main_split, scores_examples, scores_of
from seqreg.workbench.text.atomic_files import open_own, write_text
from seqreg.workbench.text.escape import plain
from seqreg.workbench.text.terminal import say, warn

FINISHED, FAILED, OPEN = "finished", "failed", "open"
STOPPED = "stopped; the same command resumes it"
_AGAIN = {2, 4, 130, 143}
"""Exit codes that are not the method's fault: refused input, a full disk, a signal. The same command tries again."""
_EXPLAINED = {2, 3, 4}
"""Exit codes that come with a line of seqreg's; details may be below it."""


@dataclass(frozen=True)
class JobState:
    """How one run stands.

    Args:
        kind: "finished"; "failed" by itself, which counts; "open": not begun, stopped, or under way
        code: its last exit code, if it ended
        line: the line of its log that says why it ended
    """

    kind: str
    code: int | None = None
    line: str = ""


def finished_record(job: Job) -> RunRecord | None:
    """The record of a run if it is finished, else None."""
    record = RunRecord.read(job.folder)
    return record if record is not None and record.finished else None


def state(job: Job) -> JobState:
    """How a run stands, from its files alone."""
    if finished_record(job) is not None:
        return JobState(FINISHED, 0)
    for source in job.sources:
        if (made_of := state(source)).kind == FAILED:
            return JobState(FAILED, made_of.code, f"{source.title}, which it is made of, failed: {made_of.line}")
    if not job.code.is_file():
        return JobState(OPEN)
    text = job.code.read_text(encoding="utf-8", errors="replace").strip()
    if not text.removeprefix("-").isdecimal():  # a shell that could not write it: nothing is known of the run
        return JobState(OPEN)
    code = int(text)
    return JobState(OPEN if code < 0 or code > 128 or code in _AGAIN or code == 0 else FAILED, code, _reason(job, code))


def _reason(job: Job, code: int) -> str:
    """The line of the log that says why a run ended: seqreg's where there is one, else the last."""
    if not job.log.is_file():
        return ""
    text = job.log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("seqreg: ") and not line.startswith("seqreg: warning")]
    return plain(next(reversed(errors if errors and code in _EXPLAINED else lines), ""))


def lock_holder(folder: Path) -> str:
    """The process that works in the folder of a run; "" if none does."""
    path = folder / LOCK
    if not path.exists():
        return ""
    with open_own(path, "r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another process"
    return ""


def work(
    plan: ComparisonPlan, jobs: Sequence[Job], most: int, before: int = 0, trust: bool = False
) -> Generator[Job, None, None]:
    """Train runs, `most` at a time, and yield each that has ended; they end with this process, however that ends.

    Args:
        before: runs of the comparison that were finished earlier, for the count
    """
    pending, running = list(jobs), dict[Job, ForkedCommand]()
    began, told, ended = time.monotonic(), False, 0
    try:
        while pending or running:
            for job in [job for job, process in running.items() if process.poll() is not None]:
                code, ended = running.pop(job).wait(), ended + 1
                left = (time.monotonic() - began) / ended * (len(jobs) - ended)
                _ended(job, code, f"{before + ended} of {before + len(jobs)}, {_minutes(left)}")
                yield job
            free = next((job for job in pending if not lock_holder(job.folder)), None) if len(running) < most else None
            if free is not None:
                pending.remove(free)
                running[free] = start(plan, free, trust)
                continue
            if pending and not running and not told:
                say(f"waiting for {lock_holder(pending[0].folder)}, which works in {pending[0].folder}")
                told = True
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def start(plan: ComparisonPlan, job: Job, trust: bool = False) -> ForkedCommand:
    """Start one run; what it prints goes to its log."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    job.code.unlink(missing_ok=True)
    say(f"{job.title}: begins", "dim")
    with open_own(job.log, "a"):  # a log that cannot be written is the comparison's matter
        pass
    return ForkedCommand(words(plan, job, trust), job.log)


def _minutes(seconds: float) -> str:
    return f"about {seconds / 60:.1f} minutes left" if seconds else "nothing left"


def score_in_words(job: Job) -> str:
    """The score of a finished run, and whether its output has collapsed."""
    if not (job.folder / METRICS).is_file():
        return "finished"
    metrics = scores_of(job.folder)
    split = main_split(metrics["scores"], scores_examples(metrics))
    numbers, name = metrics["scores"][split], deciding(metrics, split)
    if job.trial:
        return f"{numbers[name]:.2f} on {split}"
    return f"{name} {numbers[name]:.2f} on {split}" + (", collapsed" if numbers.get("collapsed") else "")


def _ended(job: Job, code: int, where: str) -> None:
    write_text(job.code, f"{code}\n")
    ended = state(job)
    if ended.kind == FINISHED:
        say(f"{job.title}: {score_in_words(job)}  ({where})")
    else:
        warn(f"{job.title}: exit code {code}: {ended.line}  ({where}; {job.log})")
    if code == 2:
        raise BadInput(f"{job.title}: {ended.line.removeprefix('seqreg: ')}")


def words(plan: ComparisonPlan, job: Job, trust: bool) -> list[str]:
    """The arguments of one run. Trust is given each time, and never written with the plan."""
    return [*plan.words(job), *(["--trust-remote-code"] if trust else [])]


def shell_lines(plan: ComparisonPlan, jobs: Sequence[Job], trust: bool = False) -> list[str]:
    """One line of shell for every run, which leaves the same files as a run that was started here."""
    lines = []
    for job in jobs:
        log, code = shlex.quote(str(job.log)), shlex.quote(str(job.code))
        prepare = f"mkdir -p {shlex.quote(str(job.folder.parent))}; rm -f {code}"
        lines.append(f"{prepare}; {shlex.join(['seqreg', *words(plan, job, trust)])} >> {log} 2>&1; echo $? > {code}")
    return lines


def launcher_words(template: str) -> list[str]:
    """The words of a launcher; refuses what cannot be one."""
    try:
        parts = shlex.split(template)
    except ValueError:  # an open quotation mark
        parts = []
    if not any("{}" in part for part in parts):
        raise BadInput(
            f"--launcher {template!r}: expected 'print', or a command with {{}}, such as 'sbatch --wrap={{}}'"
        )
    if shutil.which(parts[0]) is None:
        raise BadInput(f"--launcher: {parts[0]}: no such program")
    return parts


def submit(template: str, commands: Sequence[str]) -> None:
    """Give every line of shell to a launcher, in place of its {}."""
    parts = launcher_words(template)
    for place, command in enumerate(commands):
        try:
            result = subprocess.run([part.replace("{}", command) for part in parts], check=False)
        except OSError as error:
            raise BadInput(f"--launcher: {parts[0]}: {error.strerror}") from None
        if result.returncode:
            so_far = f"{place} of {len(commands)} runs are submitted"
            raise BadInput(f"--launcher: {parts[0]} ended with exit code {result.returncode}: {so_far}")


def stop(number: int, _: object) -> None:
    """For SIGTERM: end the runs in good order, then ourselves."""
    raise Interrupted(number, STOPPED)
