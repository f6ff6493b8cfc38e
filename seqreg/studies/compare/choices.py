"""What was chosen by validation: sentences and a table about the search, and about the free arms."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from seqreg.studies.common.findings import Table
from seqreg.studies.compare.significance import ONE_MODEL

SEARCHED = "Trials of the search, on the validation set"


def searched(values: dict[str, Any]) -> list[str]:
    """What was searched, and what was chosen; nothing without a search."""
    search = values["search"]
    if not search:
        return []
    chosen = [
        f"{name}: {', '.join(search['trials'][name][place]['settings']) or 'its recipe as it is'}"
        for name, place in search["chosen"].items()
    ]
    spaces = search.get("spaces", {})  # none in comparisons of seqreg 0.1, which had as many trials for all
    return [
        f"Every trained method had {'at most ' if spaces else ''}{search['budget']} trials on the validation set, with "
        f"seeds that no run here has ({', '.join(map(str, search['seeds']))}); test sets were not scored in them. "
        f"Chosen: {'; '.join(chosen)}.",
        *covered(spaces),
    ]


def covered(spaces: dict[str, dict[str, list[Any]]]) -> list[str]:
    """The values that every method tried, its own of other settings than the learning rate first."""
    tried = {
        name: "; ".join(f"{key} {', '.join(map(_short, values))}" for key, values in space.items())
        for name, space in spaces.items()
    }
    return [f"{name} tried {values}." for name, values in tried.items()]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def against_free(values: dict[str, Any], judged: Collection[str]) -> list[str]:
    """The best free arm, how it was chosen, and which methods do not beat it.

    Args:
        judged: the methods that have seeds and test examples enough for a verdict
    """
    free = values["free"]
    if not free:
        return []
    arm, methods = free["arm"], values["methods"]
    kept = [name for name in free["validation"] if any(methods[name]["choices"].get("kept_as_trained", []))]
    lines = [
        f"{name}: shares of the trained weights, chosen on validation: "
        + ", ".join(f"{share:g}" for share in methods[name]["choices"]["alpha"])
        + (". The head is new, so that it has no start: only the body is interpolated." if name in kept else ".")
        + (f" A share of 1 is {values['baseline']} itself." if 1 in methods[name]["choices"]["alpha"] else "")
        for name in free["validation"] if "alpha" in methods[name]["choices"]
    ]  # fmt: skip
    scores = ", ".join(f"{name} {score:.2f}" for name, score in free["validation"].items())
    if free["methods"]:
        lines.append(f"The best free arm by validation is {arm} (validation scores: {scores}).")
    return lines + [_beats(name, plus, values, name in judged) for name, plus in free["methods"].items()]


def _beats(name: str, plus: dict[str, Any], values: dict[str, Any], judged: bool) -> str:
    """Whether a method is better than the best free arm."""
    text = f"{plus['difference']:+.2f} {values['metric']} against {values['free']['arm']}"
    better = plus["difference"] != 0 and (plus["difference"] > 0) is values["greater_is_better"]
    if plus["p"] is None or not judged:
        why = "one model is not tested" if plus["test"] == ONE_MODEL else "no verdict, as against the baseline"
        return f"{name} {'has a better mean than' if better else 'does not beat'} the best free arm: {text} ({why})."
    ends = "" if plus["interval"] is None else "uncorrected 95% interval {:+.2f} to {:+.2f}, ".format(*plus["interval"])
    text += f" ({ends}p = {plus['holm']:.2g} after correction over the trained methods)"
    if plus["holm"] <= values["alpha"]:
        return f"{name} {'beats' if better else 'is significantly worse than'} the best free arm: {text}."
    return f"{name} {'is not shown to beat' if better else 'does not beat'} the best free arm: {text}."


def search_table(values: dict[str, Any]) -> Table:
    """Every trial of the search, with its validation score."""
    search = values["search"]
    rows = []
    for name, trials in search["trials"].items():
        scores = search["scores"].get(name, [None] * len(trials))
        for place, (trial, score) in enumerate(zip(trials, scores, strict=True)):
            word = "chosen" if search["chosen"].get(name) == place else "failed" if score is None else ""
            settings = "; ".join(trial["settings"]) or "the recipe as it is"
            rows.append([name, place + 1, settings, trial["seed"], score, word])
    return Table(SEARCHED, ["method", "trial", "settings", "seed", "validation score", ""], rows)
