"""The quickstart: a small model is pretrained on one kind of news, and fine-tuned on a little of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from seqreg.errors import BadInput
from seqreg.workbench.config import methods, run_config
from seqreg.workbench.config.methods import BASELINE
from seqreg.workbench.config.overlay import assigned
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.config.settings import Config
from seqreg.workbench.text.escape import plain

RECIPE, VARIANT, OLD = "quickstart", "people", "synthetic_news"
PRETRAINED = "pretrained"
KINDS = ("rouge1", "rouge2", "rougeL")
CAVEAT = (
    "One seed of a toy: it shows what fine-tuning adds and what it leaves, and not which method is better. "
    "For that, train several seeds: seqreg compare."
)


def plan(words: Sequence[str], folder: Path) -> tuple[Run, list[Run]]:
    """The run that pretrains, and those that fine-tune without and with terms, checked before the first begins.

    Args:
        words: terms, R3F if there are none, also as `r3f:weight=1.0`, and `key=value` for the fine-tuning
    """
    terms = [word for word in words if _is_method(word)] or ["r3f"]
    settings = [word for word in words if not _is_method(word)]
    for setting in settings:
        if setting.partition("=")[0].strip() in ("output", "model.name"):
            raise BadInput(f"{setting}: the quickstart has a model and folders of its own: choose with --output FOLDER")
    pretraining = run_config.resolve(RECIPE, overrides=[assigned("output", folder / PRETRAINED)])
    fine_tuning, model = [], assigned("model.name", folder / PRETRAINED)
    for given in dict.fromkeys([BASELINE, *terms]):
        name = methods.parse(given).name
        chosen = [*settings, model, assigned("output", folder / name)]
        fine_tuning.append(run_config.resolve_method(RECIPE, name, given, [VARIANT], chosen))
    methods.check_reach(settings, {term for run in fine_tuning for term in run.config.terms})
    return pretraining, fine_tuning


def _is_method(word: str) -> bool:
    """Whether a word is a method, such as r3f, r3f:weight=1.0 or strong=r3f:weight=1.0, and not a setting."""
    key, equals, value = word.partition("=")
    named = ":" in value and "." not in key and key.strip() not in Config.model_fields
    return not equals or ":" in key or named


def quickstart(pretraining: Run, fine_tuning: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Train what `plan` gives; returns the scores of every model on the new task and on the old one.

    The run that pretrains is resumed where it was stopped, and left alone if it is finished.
    """
    from seqreg.workbench.run import train
    from seqreg.workbench.text.terminal import say

    total = len(fine_tuning) + 1
    say(f"1 of {total}: a small BART is pretrained on news of cities")
    old = train.train(pretraining)["scores"]["test"]
    scores: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(fine_tuning, start=2):
        name = Path(run.config.output).name
        say(f"{number} of {total}: it is fine-tuned on 400 stories of people: {name}")
        splits = train.train(run, overwrite=True)["scores"]
        scores.setdefault(PRETRAINED, {"new": splits.get("before"), "old": old})
        scores[name] = {"new": splits["test"], "old": splits.get(OLD)}
    return scores


def score_table(scores: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line per model."""
    table = Table(title="ROUGE-1 / 2 / L in percent, on the test sets")
    table.add_column("model")
    table.add_column("new task: news of people", justify="right")
    table.add_column("old task: news of cities", justify="right")
    for name, tasks in scores.items():
        table.add_row(plain(name), _cell(tasks["new"]), _cell(tasks["old"]))
    return table


def _cell(rouge: Mapping[str, float] | None) -> str:
    return "" if rouge is None else " / ".join(f"{rouge[kind]:.1f}" for kind in KINDS)
