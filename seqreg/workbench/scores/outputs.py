"""The files that a run leaves behind for people and programs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from seqreg.version import __version__
from seqreg.workbench.config import overlay
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.scores.evaluate import Scored
from seqreg.workbench.scores.tables import METRICS, scores_of
from seqreg.workbench.text.atomic_files import finite, to_json, write_text
from seqreg.workbench.text.escape import code, one_line, prose


def write_scores(folder: Path, run: Run, found: Mapping[str, Scored], **further: Any) -> dict[str, Any]:
    """metrics.json, brought up to date, and the predictions on every split."""
    folder.mkdir(parents=True, exist_ok=True)
    path, known = folder / METRICS, read_metrics(folder)
    known.setdefault("scores", {})
    for name, scored in found.items():
        known["scores"][name] = {
            **{key: _rounded(value) for key, value in scored.metrics.items()},
            "intervals": {key: [*map(_rounded, ends)] for key, ends in scored.intervals.items()},
            "signature": scored.signature,
        }
    known |= further
    known["versions"] = {"seqreg": __version__, "torch": torch.__version__, "python": platform.python_version()}
    known["versions"]["transformers"] = transformers.__version__
    known = dict(finite(known))
    write_text(path, to_json(known, indent=2) + "\n")
    main = next((name for name in ("test", "validation") if name in found), next(iter(found), ""))
    for name, scored in found.items():
        if scored.rows and name != "before":
            _write_predictions(folder, "" if name == main else f"_{name}", scored.rows, run.card.kind == "generation")
    return known


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def read_metrics(folder: Path) -> dict[str, Any]:
    """What is in metrics.json; nothing if there is none."""
    return scores_of(folder) if (folder / METRICS).exists() else {}


def scores(scored: Scored) -> dict[str, Any]:
    """The numbers of a split, without its rows."""
    return {"metrics": scored.metrics, "intervals": scored.intervals, "signature": scored.signature}


def _write_predictions(folder: Path, suffix: str, rows: list[dict[str, Any]], texts: bool) -> None:
    lines = "".join(to_json(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(folder / f"predictions{suffix}.jsonl", lines)
    if texts:  # one a line: a line break inside a text is written <n>
        plain = "".join(one_line(row["prediction"]) + "\n" for row in rows)
        write_text(folder / f"generated_predictions{suffix}.txt", plain)


def write_card(folder: Path, run: Run, metrics: Mapping[str, Any]) -> None:
    """README.md in the manner of the hub: the method, its settings and its scores."""
    config, card = run.config, run.card
    criterion = code(run.criterion, most=2000)
    base = f"Fine-tuned from {prose(config.model.name)}" if config.model.name else "Trained from scratch"
    scores = [
        f"| {prose(split)} | {name} | {value:.2f} | {_interval(numbers['intervals'].get(name))} |"
        for split, numbers in metrics["scores"].items()
        for name, value in numbers.items()
        if value is not None
        and (name in numbers["intervals"] or (split == "average" and name != "score" and isinstance(value, float)))
    ]
    signatures = sorted({numbers["signature"] for numbers in metrics["scores"].values() if numbers["signature"]})
    base_model = {"base_model": config.model.name} if config.model.name and "/" in config.model.name else {}
    kind = {"generation": "text2text-generation"}.get(card.kind, "text-classification")
    about = {"library_name": "transformers", **base_model, "pipeline_tag": kind, "tags": ["seqreg", *config.terms]}
    lines = [
        "---", f"{overlay.dump(about)}---", "", f"# {prose(card.title)}: {prose(config.method)}", "",
        f"{base} on {prose(card.title)} with seqreg {__version__}.",
        "", f"Loss: {criterion}", "",
        "| split | score | value (%) | interval |", "|---|---|---|---|", *scores, "",
        *(f"Signature: {code(signature).replace('¦', '|')}" for signature in signatures), "",
        f"Trained for {metrics.get('train', {}).get('steps', '?')} steps with seed {config.seed}. All settings are in "
        "config.yaml, which is a recipe: `seqreg train config.yaml`. The scores of every example are in "
        "predictions.jsonl.", "",
    ]  # fmt: skip
    write_text(folder / "README.md", "\n".join(lines))


def _interval(pair: Any) -> str:
    return "" if pair is None or None in pair else f"{pair[0]:.2f} to {pair[1]:.2f}"
