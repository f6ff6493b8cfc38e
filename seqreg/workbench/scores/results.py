"""The results of runs: the files that a run leaves behind, and tables of scores."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.table import Table
from rich.text import Text

from seqreg.errors import BadInput
from seqreg.metrics import tags
from seqreg.metrics.texts import greater_is_better
from seqreg.metrics.variety import VARIETY
from seqreg.version import __version__
from seqreg.workbench.config import overlay
from seqreg.workbench.text.atomic_files import finite, inside, to_json, write_text
from seqreg.workbench.text.escape import code, one_line, places, plain, prose, without_places

if TYPE_CHECKING:
    from seqreg.workbench.config.run_config import Run
    from seqreg.workbench.scores.evaluate import Scored

METRICS, SCORES = "metrics.json", "scores"
CPU, STEPS, WHOLE = "CPU time of the training steps", "wall time of the training steps", "wall time of the training"
BEFORE = "before"
"""The scores of the model that training started from, among those of the splits."""
_TITLES = {BEFORE: "before training"}
DRIFT = {
    "kl_trained_start": "KL(trained || start)",
    "kl_start_trained": "KL(start || trained)",
    "body_kl_trained_start": "KL(trained || starting body, same head)",
    "body_kl_start_trained": "KL(starting body, same head || trained)",
    "weight_distance": "|w - w0| / |w0|",
    "cka": "CKA to the start",
}
"""Numbers of the section `drift`, and what they are called in tables."""


class _Split(BaseModel):
    """The numbers of a split."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None] = {}
    intervals: dict[str, tuple[float | None, float | None]] = {}
    signature: str = ""


class _Train(BaseModel):
    seconds: float | None = None
    cpu_seconds: float | None = None
    step_seconds: float | None = None
    device: str = ""


class _Drift(BaseModel):
    model_config = ConfigDict(extra="allow")
    kl_trained_start: float | None = None
    kl_start_trained: float | None = None
    body_kl_trained_start: float | None = None
    body_kl_start_trained: float | None = None
    weight_distance: float | None = None
    cka: float | None = None


class _BeforeAfter(BaseModel):
    before: float | None
    after: float | None


class MadeWith(BaseModel):
    """How scores of a trained model were made where they are not those of its run.

    Args:
        run: the name in its run.json
        settings: all that it was scored with
        differs: what is not as in the run, by key: there, and in these scores
    """

    run: str = ""
    settings: dict[str, Any] = {}
    differs: dict[str, tuple[Any, Any]] = {}


class _Metrics(BaseModel):
    """What is read of metrics.json."""

    made_with: MadeWith = MadeWith()
    scores: dict[str, _Split]
    train: _Train = _Train()
    method: str = ""
    metric: str = ""
    drift: _Drift = _Drift()
    retention: dict[str, dict[str, _BeforeAfter]] = {}


def scores_of(folder: Path) -> dict[str, Any]:
    """The contents of a run's metrics.json."""
    if not (folder / METRICS).is_file():
        raise BadInput(f"{folder}: no {METRICS} in it: has its training ended?")
    return _read(folder / METRICS)


def other_scores_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The scores of a run's model with other settings than the run's, by the names of their files."""
    return {path.stem: _read(path) for path in sorted((folder / SCORES).glob("*.json"))}


def _read(path: Path) -> dict[str, Any]:
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
        _Metrics.model_validate(metrics)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise BadInput(f"{path}: {key or 'all of it'}: not what seqreg writes there: was it changed?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    return dict(metrics)


def read_metrics(folder: Path) -> dict[str, Any]:
    """What is in metrics.json; nothing if there is none."""
    return scores_of(folder) if (folder / METRICS).exists() else {}


def drift_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of the section `drift` that are there."""
    section = metrics.get("drift", {})
    return {key: section[key] for key in DRIFT if section.get(key) is not None}


def drift_lines(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Drift and retention of a run for a table: what, which number, and its value."""
    lines = [("drift", DRIFT[key], f"{value:.4g}") for key, value in drift_numbers(metrics).items()]
    if "left_out" in metrics.get("drift", {}):
        lines.append(("drift", "not measured", str(metrics["drift"]["left_out"])))
    for task, numbers in metrics.get("retention", {}).items():
        for name, pair in numbers.items():
            before, after = pair["before"], pair["after"]
            known = before is not None and after is not None
            shown = f"{before:.4g}, {after:.4g} ({after - before:+.3g})" if known else "not finite"
            lines.append((f"retention: {task}", f"{name}, before and after", shown))
    return lines


def scores(scored: Scored) -> dict[str, Any]:
    """The numbers of a split, without its predictions."""
    return {"metrics": scored.metrics, "intervals": scored.intervals, "signature": scored.signature}


def made_with_of(metrics: Mapping[str, Any]) -> MadeWith:
    """How the scores in a file were made; the default for those of a run."""
    return MadeWith(**metrics.get("made_with", {}))


def place(folder: Path, output: Path | None, made_with: MadeWith) -> Path:
    """The file for scores of the model in a folder: the run's metrics.json is for those of the run alone."""
    if output is None and not made_with.differs:
        return folder / METRICS
    if output is None:
        if (folder / SCORES).is_symlink():
            raise BadInput(f"{folder / SCORES}: a symbolic link: a run writes to its own folder alone: remove it")
        return folder / SCORES / f"{_name_of(made_with)}.json"
    path = output / METRICS
    if path.is_file() and made_with_of(_read(path)) != made_with:
        raise BadInput(f"--output {output}: has scores of another model, or with other settings: choose another")
    return path


def _name_of(made_with: MadeWith) -> str:
    """A name for the file of scores, by what differs: `num_beams=5`."""
    settings = {key: key.rpartition(".")[2] for key in made_with.settings}
    pairs = {settings.get(key, key): str(now) for key, (_, now) in made_with.differs.items()}
    exact = ",".join(f"{key}={now}" for key, now in pairs.items())
    short = ",".join(f"{key}={now if len(now) <= 30 else 'other'}" for key, now in pairs.items())
    name = re.sub(r"[^\w.=+,-]+", "_", short)[:80]
    return name if name == exact else f"{name}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def difference_lines(made_with: MadeWith) -> list[str]:
    """What differs from the run, a line for each."""
    return [f"{key}: {_shown(now)}, in the run {_shown(was)}" for key, (was, now) in made_with.differs.items()]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def forget_scores(folder: Path) -> None:
    """Remove all scores of the model in a folder, which is about to become another."""
    (folder / METRICS).unlink(missing_ok=True)
    if not (folder / SCORES).is_symlink():
        shutil.rmtree(folder / SCORES, ignore_errors=True)


def predictions_of(path: Path) -> Path:
    """The folder of the predictions that the scores in a file are of."""
    return path.parent if path.name == METRICS else path.with_suffix("")


def write_scores(
    path: Path, run: Run, splits: Mapping[str, Scored], *, made_with: MadeWith | None = None, **further: Any
) -> dict[str, Any]:
    """Bring a metrics.json, or scores/NAME.json, up to date, and write the predictions on every split.

    Args:
        made_with: what it was scored with, where these are not the scores of the run itself
    """
    import torch
    import transformers

    folder = predictions_of(path)
    metrics = _read(path) if path.is_file() else {}
    made_with = MadeWith() if made_with is None else made_with
    if made_with_of(metrics) != made_with:  # which nothing is added to
        metrics = {}
    metrics.setdefault("scores", {})
    for name, scored in splits.items():
        metrics["scores"][name] = {
            **{key: _rounded(value) for key, value in scored.metrics.items()},
            "intervals": {key: [*map(_rounded, ends)] for key, ends in scored.intervals.items()},
            "signature": scored.signature,
        }
    versions = {"seqreg": __version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {"transformers": transformers.__version__}
    if made_with != MadeWith():
        metrics["made_with"] = made_with.model_dump()
    metrics |= {"metric": run.card.score, **further, "versions": versions}
    metrics = dict(finite(metrics))
    write_text(path, to_json(metrics, indent=2) + "\n")
    main = next((name for name in ("test", "validation") if name in splits), next(iter(splits), ""))
    for name, scored in splits.items():
        if scored.predictions and name != BEFORE:
            _write_predictions(folder, "" if name == main else f"_{name}", scored, run.card.kind == "generation")
    return metrics


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _write_predictions(folder: Path, suffix: str, scored: Scored, texts: bool) -> None:
    lines = "".join(to_json(prediction, ensure_ascii=False) + "\n" for prediction in scored.predictions)
    write_text(inside(folder, f"predictions{suffix}.jsonl"), lines)
    if texts:  # one per line: a line break inside a text is written <n>
        lines = "".join(one_line(prediction["prediction"]) + "\n" for prediction in scored.predictions)
        write_text(inside(folder, f"generated_predictions{suffix}.txt"), lines)


def write_card(folder: Path, run: Run, metrics: Mapping[str, Any]) -> None:
    """Write README.md in the manner of the hub: the method, its settings and its scores."""
    config, card = run.config, run.card
    criterion = code(run.criterion, most=2000)
    base = f"Fine-tuned from {prose(config.model.name)}" if config.model.name else "Trained from scratch"
    signatures = sorted({numbers["signature"] for numbers in metrics["scores"].values() if numbers["signature"]})
    base_model = {"base_model": config.model.name} if config.model.name and "/" in config.model.name else {}
    causal = any("perplexity" in numbers for numbers in metrics["scores"].values())
    kinds = {"generation": "text-generation" if causal else "text2text-generation"}
    kind = {**kinds, "token_classification": "token-classification"}.get(card.kind, "text-classification")
    about = {"library_name": "transformers", **base_model, "pipeline_tag": kind, "tags": ["seqreg", *config.terms]}
    page = [
        "---", f"{overlay.dump(about)}---", "", f"# {prose(card.title)}: {prose(config.method)}", "",
        f"{base} on {prose(card.title)} with seqreg {__version__}.",
        "", f"Loss: {criterion}", "",
        *score_lines(metrics),
        *(f"Signature: {code(signature).replace('¦', '|')}" for signature in signatures), "",
        f"Trained with seed {config.seed} for {trained_steps(metrics)}. All settings are in config.yaml, which is a "
        "recipe: `seqreg train config.yaml`.", "",
    ]  # fmt: skip
    write_text(folder / "README.md", without_places("\n".join(page), places(config.model_dump())))


def trained_steps(metrics: Mapping[str, Any]) -> str:
    """How long a run was trained, whether it stopped early, and which step its model is of.

    >>> trained_steps({"train": {"steps": 60, "stopped_early": True, "best_step": 20, "model_step": 20}})
    '60 steps, where it stopped early; the best validation score is that of step 20, which the model is of'
    """
    train = metrics.get("train", {})
    text = f"{train.get('steps', '?')} steps"
    text += ", where it stopped early" * bool(train.get("stopped_early"))
    if train.get("best_step") is None:
        return text
    model, best = train.get("model_step"), train["best_step"]
    own = "which the model is of" if model == best else f"and the model is that of step {model}"
    return f"{text}; the best validation score is that of step {best}, {own}"


def score_lines(metrics: Mapping[str, Any]) -> list[str]:
    """Scores with intervals, then drift and retention, as tables in Markdown; of the contents of metrics.json."""
    lines = [
        f"| {prose(_TITLES.get(split, split))} | {name} | {value:.2f} | {_interval(numbers['intervals'].get(name))} |"
        for split, numbers in metrics["scores"].items()
        for name, value in numbers.items()
        if value is not None
        and (name in numbers["intervals"] or (split == "average" and name != "score" and isinstance(value, float)))
    ]
    lesson = nothing_learned(metrics)
    told = [f"**{lesson[0].upper()}{lesson[1:]}.**", ""] if lesson else []
    return [*told, "| split | score | value (%) | interval |", "|---|---|---|---|", *lines, "", *_drift_page(metrics)]


def _drift_page(metrics: Mapping[str, Any]) -> list[str]:
    """Drift and retention for the card of a run; nothing where they were not measured."""
    lines = [f"| {prose(what)} | {prose(name)} | {prose(value)} |" for what, name, value in drift_lines(metrics)]
    if not lines:
        return []
    notes = []
    if drift_numbers(metrics):
        notes.append(
            f"Drift: from the starting model, on {metrics['drift']['examples']} validation examples, KL in nats."
        )
    if metrics.get("retention"):
        notes.append("Retention: other tasks, before training and after it; the score in percent.")
    return ["| | number | value |", "|---|---|---|", *lines, "", " ".join(notes), ""]


def _interval(pair: Any) -> str:
    return "" if pair is None or None in pair else f"{pair[0]:.2f} to {pair[1]:.2f}"


def cost(runs: Sequence[Mapping[str, Any]]) -> tuple[str, list[float]]:
    """What training cost in several runs: what was measured, and its seconds.

    On a CPU that is the time that all threads of the process spent on steps, which other work on the machine does not
    change; on an accelerator the wall time of the steps. Runs that did not measure either have their wall time.
    """
    timings = [metrics.get("train", {}) for metrics in runs]
    if all(timing.get("cpu_seconds") and timing.get("device") == "cpu" for timing in timings):
        return CPU, [timing["cpu_seconds"] for timing in timings]
    if all(timing.get("step_seconds") for timing in timings):
        return STEPS, [timing["step_seconds"] for timing in timings]
    return WHOLE, [timing.get("seconds") or 0.0 for timing in timings]


def scores_examples(metrics: Mapping[str, Any]) -> bool:
    """Whether the contents of a metrics.json are scores of texts or of tags: every example has numbers of its own."""
    texts = any("gen_len" in numbers or "rougeL" in numbers for numbers in metrics["scores"].values())
    return texts or metrics.get("metric") in tags.METRICS


def deciding(metrics: Mapping[str, Any], split: str) -> str:
    """The score of a split that decides between runs; `metrics` are the contents of metrics.json.

    Several scores of a classifier decide by their mean, "score". Runs of before there was a choice had ROUGE.
    """
    numbers = metrics["scores"][split]
    if metrics.get("metric") in numbers:
        return str(metrics["metric"])
    if "rougeL" in numbers:
        return "rougeL"
    names = [key for key in numbers.get("intervals", {}) if key != "score"]
    return names[0] if len(names) == 1 else "score"


def main_split(scores: Mapping[str, Any], texts: bool) -> str:
    """The split whose scores decide: the average over sets of a classifier, the test set, or what there is."""
    if "average" in scores and not texts:
        return "average"
    named = [name for name in scores if name not in (BEFORE, "average")]
    return next((name for name in ("test", "validation") if name in named), named[0])


def nothing_learned(metrics: Mapping[str, Any]) -> str:
    """Why a run has learned nothing, in one sentence; "" where it has, or where the starting model was not scored."""
    scores = metrics["scores"]
    trained = {name: numbers for name, numbers in scores.items() if name not in (BEFORE, "average")}
    if not trained:
        return ""
    split = main_split(trained, texts=True)
    key = deciding(metrics, split)
    return not_better(key, trained[split].get(key), scores.get(BEFORE, {}).get(key))


def not_better(key: str, after: float | None, before: float | None) -> str:
    """Why a score says that nothing was learned: it is at the floor, or not better than before training."""
    if after is None:
        return ""
    if (after == 0 and (before is None or after <= before)) if greater_is_better(key) else after >= 100:
        return f"nothing was learned: {key} is {after:.2f}, the worst that there is"
    if before is None or (after > before if greater_is_better(key) else after < before):
        return ""
    return f"nothing was learned: {key} is {after:.2f} after training and was {before:.2f} before"


def score_table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Scores of one run or several side by side; `runs` are contents of metrics.json."""
    table = Table(title="scores in percent, with intervals over examples" if len(runs) == 1 else "scores in percent")
    table.add_column("split")
    table.add_column("score")
    for name in runs:
        table.add_column(plain(name), justify="right")
    for split, key in _lines(list(runs.values())):
        cells = [_cell(metrics["scores"].get(split, {}), key, len(runs) == 1) for metrics in runs.values()]
        table.add_row(
            plain(_TITLES.get(split, split)),
            plain(key) + ("" if greater_is_better(key) else " (lower is better)"),
            *cells,
        )
    _add_drift(table, list(runs.values()))
    seconds = [metrics.get("train", {}).get("seconds") for metrics in runs.values()]
    if all(seconds):
        table.add_section()
        table.add_row("training", "seconds", *(f"{value:.1f}" for value in seconds))
        what, spent = cost(list(runs.values()))
        if what != WHOLE:
            head = "CPU seconds" if what == CPU else "seconds of steps"
            table.add_row("training", head, *(f"{value:.1f}" for value in spent))
        if len(runs) > 1:
            head = f"{'CPU time' if what == CPU else 'time'} / {plain(next(iter(runs)))}"
            table.add_row("training", head, *(f"{value / spent[0]:.2f}x" for value in spent))
    return table


def _add_drift(table: Table, runs: Sequence[Mapping[str, Any]]) -> None:
    """A section of a table of scores: drift and retention of every run."""
    cells = [{(what, name): value for what, name, value in drift_lines(metrics)} for metrics in runs]
    keys = dict.fromkeys(key for run in cells for key in run)
    if keys:
        table.add_section()
    for what, name in keys:
        table.add_row(plain(what), plain(name), *(plain(run.get((what, name), "")) for run in cells))


def _lines(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Split and score of every line: what has an interval, of all runs."""
    lines: dict[tuple[str, str], None] = {}
    for metrics in runs:
        for split, numbers in metrics["scores"].items():
            keys = list(numbers.get("intervals", {})) or [
                key for key in numbers if key not in ("score", "intervals", "signature", *VARIETY)
            ]
            keys += [key for key in numbers if key.startswith("entity_f1_") and isinstance(numbers[key], float)]
            shown = ("perplexity", "gen_len", "empty", "distinct", "most_common", "spread")
            keys += [key for key in shown if key in numbers and not (key == "distinct" and "words" in numbers)]
            lines |= dict.fromkeys((split, key) for key in keys)
    return list(lines)


def _cell(numbers: Mapping[str, Any], key: str, wide: bool) -> str | Text:
    if key not in numbers:
        return ""
    if numbers[key] is None:
        return "not finite"
    if key == "empty":
        return f"{numbers[key]:.0f} texts"
    if key == "perplexity":
        return f"{numbers[key]:.4g}"
    if key == "gen_len":
        return f"{numbers[key]:.1f} words"
    if key in VARIETY:
        reference = {"distinct": "distinct_references", "most_common": "most_common_reference"}.get(key, "")
        truth = f", references {numbers[reference]:.1f}%" if wide and reference in numbers else ""
        collapsed = bool(numbers.get("collapsed"))
        return Text(f"{numbers[key]:.1f}%{truth}{' (collapsed)' if collapsed else ''}", "yellow" if collapsed else "")
    interval = _interval(numbers.get("intervals", {}).get(key))
    return Text.assemble(f"{numbers[key]:.2f}  ", (interval, "dim")) if wide and interval else f"{numbers[key]:.2f}"
