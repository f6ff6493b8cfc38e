"""Which models of a comparison stay on disk. Scores, predictions and curves of every training stay."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from seqreg.studies.compare.comparison import Job, Plan
from seqreg.studies.compare.jobs import record_of
from seqreg.workbench.run.checkpoints import PREFIX
from seqreg.workbench.scores.results import METRICS, main_split, scores_of
from seqreg.workbench.text.atomic_files import REMOVED, write_text

SAID = {
    "best": "of every method the model with the best validation score is kept; --keep-models all keeps every one",
    "all": "all models are kept",
    "none": "no model is kept: scores, predictions and curves are",
}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


def prune(plan: Plan, folder: Path) -> None:
    """Remove the models of finished trainings that the plan does not keep."""
    if plan.keep_models == "all":
        return
    for name in plan.methods:
        done = [job for job in plan.jobs(folder) if job.method == name and record_of(job) and _has_model(job)]
        best = max(done, key=_validation) if done and plan.keep_models == "best" else None
        for job in done:
            if job != best:
                _remove(plan, job)


def _has_model(job: Job) -> bool:
    return (job.folder / "config.json").is_file() and (job.folder / METRICS).is_file()


def _validation(job: Job) -> float:
    """The score that decides between seeds: of the validation set, for the test set must not choose."""
    scores = scores_of(job.folder)["scores"]
    return float(scores["validation" if "validation" in scores else main_split(scores, True)]["score"])


def _remove(plan: Plan, job: Job) -> None:
    again = shlex.join(["seqreg", *plan.words(job), "--overwrite"])
    write_text(
        job.folder / REMOVED,
        f"seqreg compare has removed the model (--keep-models {plan.keep_models}). This trains it again:\n{again}\n",
    )
    for pattern in (*_WEIGHTS, "config.json"):
        for path in job.folder.glob(pattern):
            path.unlink()
    for path in job.folder.glob(f"{PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
