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
HONEST = (
    "One seed of a toy: it shows what fine-tuning adds and what it leaves, and not which method is better. "
    "For that, train several seeds: seqreg compare."
)


def plan(words: Sequence[str], folder: Path) -> tuple[Run, list[Run]]:
    """The pretraining, and the fine-tunings without and with terms, all checked before the first begins.

    Args:
        words: terms, R3F if there are none, also as `r3f:weight=1.0`, and `key=value` for the fine-tunings
    """
    terms = [word for word in words if _is_method(word)] or ["r3f"]
    settings = [word for word in words if not _is_method(word)]
    for setting in settings:
        if setting.partition("=")[0].strip() in ("output", "model.name"):
            raise BadInput(f"{setting}: the quickstart has a model and folders of its own: choose with --output FOLDER")
    source = run_config.resolve(RECIPE, overrides=[assigned("output", folder / PRETRAINED)])
    tuned, model = [], assigned("model.name", folder / PRETRAINED)
    for given in dict.fromkeys([BASELINE, *terms]):
        name = methods.parse(given).name
        own = [*settings, model, assigned("output", folder / name)]
        tuned.append(run_config.resolve_method(RECIPE, name, given, [VARIANT], own))
    methods.check_reach(settings, {term for run in tuned for term in run.config.terms})
    return source, tuned


def _is_method(word: str) -> bool:
    """Whether a word is a method, such as r3f, r3f:weight=1.0 or strong=r3f:weight=1.0, and not a setting."""
    key, equals, value = word.partition("=")
    named = ":" in value and "." not in key and key.strip() not in Config.model_fields
    return not equals or ":" in key or named


def quickstart(source: Run, tuned: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Train what `plan` gives; returns the scores of every model on the new task and on the old one.

    The pretraining goes on where it was stopped, and is left alone if it is finished.
    """
    from seqreg.workbench.run import train
    from seqreg.workbench.text.terminal import say

    say(f"1 of {len(tuned) + 1}: a small BART is pretrained on news of cities")
    old = train.train(source)["scores"]["test"]
    found: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(tuned, start=2):
        name = Path(run.config.output).name
        say(f"{number} of {len(tuned) + 1}: it is fine-tuned on 400 stories of people: {name}")
        scores = train.train(run, overwrite=True)["scores"]
        found.setdefault(PRETRAINED, {"new": scores.get("before"), "old": old})
        found[name] = {"new": scores["test"], "old": scores.get(OLD)}
    return found


def shown(found: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line a model."""
    table = Table(title="ROUGE-1 / 2 / L in percent, on the test sets")
    table.add_column("model")
    table.add_column("new task: news of people", justify="right")
    table.add_column("old task: news of cities", justify="right")
    for name, scores in found.items():
        table.add_row(plain(name), _cell(scores["new"]), _cell(scores["old"]))
    return table


def _cell(scores: Mapping[str, float] | None) -> str:
    return "" if scores is None else " / ".join(f"{scores[kind]:.1f}" for kind in KINDS)
