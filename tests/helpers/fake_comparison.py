"""Comparisons that were never trained: the files that runs would have left, with numbers that we choose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from seqreg.studies.compare import plan as plans
from seqreg.studies.compare.plan import ComparisonPlan, Job

NASTY = "<script>document.title='owned'</script> & \"quoted\" </textarea>"


def comparison(
    folder: Path, shifts: dict[str, float], *, seeds: str = "5", examples: int = 60, kind: str = "texts",
    failed: tuple[tuple[str, int], ...] = (), curves: bool = True, collapsed: tuple[str, ...] = (),
    arms: tuple[str, ...] = (), search: int = 0, settings: tuple[str, ...] = (),
) -> ComparisonPlan:  # fmt: skip
    """A finished comparison; `shifts` are how much better each method is, in points, free arms too."""
    methods = [name for name in shifts if name not in arms]
    plan, _ = plans.make("quickstart", methods, seeds, arms=arms, search=search, settings=settings)
    if search:
        for choose in (plans.with_rates, plans.with_choices):
            trials = plan.search.trials.items()
            plan = choose(plan, {name: [50.0 + place for place in range(len(some))] for name, some in trials})
    plan.write(folder)
    rng = np.random.default_rng(0)
    hard = rng.normal(50, 10, examples)
    for job in plan.jobs(folder):
        effect = shifts.get(job.method, 0.0) + rng.normal(0, 0.5)
        if (job.method, job.seed) in failed:
            job.folder.mkdir(parents=True)
            job.log.write_text("  step 3\nseqreg: 3 steps in a row were not finite\n")
            job.code.write_text("3\n")
        elif kind == "texts":
            scores = np.clip(hard + effect + rng.normal(0, 3, examples), 0, 100) / 100
            _texts(plan, job, scores, curves, job.method in collapsed)
        else:
            _classes(plan, job, rng.random(examples) < (60 + effect) / 100, job.method in collapsed)
    return plan


def _texts(plan: ComparisonPlan, job: Job, scores: np.ndarray, curves: bool, collapsed: bool) -> None:
    kinds = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    rows = [
        {"index": place, "prediction": f"the {job.method} wins {NASTY}" if place == 1 else
         f"seed {job.seed} won it{'' if collapsed else f' {place}'}",
         "reference": f"the seed won it again {place}"}
        | {kind: round(float(score) * (0.5 if kind == "rouge2" else 1), 6) for kind in kinds}
        for place, score in enumerate(scores)
    ]  # fmt: skip
    means = {kind: 100 * float(np.mean([row[kind] for row in rows])) for kind in kinds}
    _finish(
        plan,
        job,
        {"score": means["rougeL"], **means},
        {kind: [value - 1, value + 1] for kind, value in means.items()},
        rows,
    )
    if curves:
        with SummaryWriter(str(job.folder / "tensorboard")) as writer:
            for step in (10, 20, 30):
                writer.add_scalar("eval/rougeL", means["rougeL"] * step / 30, step)
                writer.add_scalar("train/part/base", 90 / step, step)
                if job.method != "baseline":
                    writer.add_scalar(f"train/part/{job.method}", 9 / step, step)
                    writer.add_scalar(f"train_diagnostics/{job.method}/noise_over_value", 0.1, step)


def _classes(plan: ComparisonPlan, job: Job, right: np.ndarray, collapsed: bool) -> None:
    truth = [("yes", "no")[place % 2] for place in range(len(right))]
    said = ["yes" if collapsed or (one == "yes") == hit else "no" for one, hit in zip(truth, right, strict=True)]
    rows = [
        {"index": place, "prediction": says, "reference": one, "correct": says == one}
        for place, (says, one) in enumerate(zip(said, truth, strict=True))
    ]  # fmt: skip
    right = np.array([row["correct"] for row in rows])
    mean = 100 * float(right.mean())
    _finish(plan, job, {"score": mean, "accuracy": mean}, {"accuracy": [mean - 1, mean + 1]}, rows)


def _finish(
    plan: ComparisonPlan,
    job: Job,
    scores: dict[str, float],
    intervals: dict[str, list[float]],
    rows: list[dict[str, object]],
) -> None:
    job.folder.mkdir(parents=True)
    found = {**scores, "intervals": intervals, "signature": "rouge|made"}
    train = {"seconds": 20.0, "cpu_seconds": 20.0 if job.method == "baseline" else 30.0, "device": "cpu", "steps": 30}
    soup = {"soup": {"alpha": 0.7, "kept_as_trained": ["head"]}} if job.method == "wise" else {}
    metrics = {
        **soup,
        "scores": {"before": {**found, **{key: value / 2 for key, value in scores.items()}}, "validation": found}
        | {"test": found},
        "method": job.method,
        "train": train,
    }
    (job.folder / "metrics.json").write_text(json.dumps(metrics | {"versions": {"seqreg": "0"}}))
    (job.folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job.folder / "config.yaml").write_text("task: synthetic_news\n")
    settings = {**plan.settings_of(job.method), "seed": job.seed}
    record = {"run": "made", "settings": settings, "versions": {}, "finished": True}
    (job.folder / "run.json").write_text(json.dumps(record))
