"""What can be said of a method of a comparison, and of all of them in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seqreg.studies.compare.results import Results
from seqreg.studies.compare.significance import ONE_MODEL

DESCRIBED = "described and not tested"
"""Of a difference that is not one of the primary comparisons."""
BETTER, WORSE, NOT_SHOWN = "significantly better", "significantly worse", "not shown to differ"
FEW_SEEDS, FEW_EXAMPLES, BOTH_COLLAPSED = "too few seeds", "too few test examples", "both collapsed"
NOT_MEASURED = "not measured"
"""Of a method all of whose runs, and all of the baseline's, have one and the same score."""
_HEADLINES = {
    BETTER: "{who} {are} significantly better than {base}",
    WORSE: "{who} {are} significantly worse than {base}",
    NOT_SHOWN: "{who} {are} not shown to differ from {base}",
    BOTH_COLLAPSED: "the output of {base} has collapsed, and that of {who} too",
    NOT_MEASURED: "nothing was measured of {who}: every run has the score of {base}",
    FEW_SEEDS: "too few seeds for a verdict on {who}",
    FEW_EXAMPLES: "too few test examples for a verdict on {who}",
    DESCRIBED: "{who} {are} described, not tested",
    ONE_MODEL: "{who} {are} one model of all seeds, not tested",
}
"""Judgements in the order of the headline, as part of its sentence."""


def judgement(stats: dict[str, Any], values: dict[str, Any]) -> str:
    """What can be said of a method that is not the baseline: one of the constants above."""
    plus = stats["difference"]
    if plus["test"] == ONE_MODEL:
        return ONE_MODEL
    if stats.get("described"):
        return DESCRIBED
    if both_collapsed(stats, values):  # which more seeds or examples do not change
        return BOTH_COLLAPSED
    if same_score(stats, values):
        return NOT_MEASURED
    if plus["p"] is None or stats["missing"]:
        return FEW_SEEDS
    if unjudged(stats, values):
        return FEW_EXAMPLES
    if stats["holm"] <= values["alpha"]:
        return BETTER if is_better(plus["difference"], values) else WORSE
    return NOT_SHOWN


def judgement_words(stats: dict[str, Any], values: dict[str, Any]) -> str:
    """The same for a table, with numbers."""
    kind = judgement(stats, values)
    words = {
        ONE_MODEL: "one model: not tested",
        FEW_SEEDS: f"{counted(stats['missing'], 'seed')} more needed",
        FEW_EXAMPLES: f"none: {values['examples']} test examples",
        BOTH_COLLAPSED: "means nothing: both collapsed",
        NOT_MEASURED: "not measured: every run has the same score",
        NOT_SHOWN: "no difference shown",
    }.get(kind, kind)
    if fallen(stats) != fallen(values["methods"][values["baseline"]]):
        words += f" ({'it' if fallen(stats) else values['baseline']} collapsed)"
    return words


def headline(results: Results, values: dict[str, Any]) -> str:
    """The verdict on all methods in one sentence."""
    base, groups = values["baseline"], dict[str, list[str]]()
    for name, stats in values["methods"].items():
        if name != base:
            groups.setdefault(judgement(stats, values), []).append(name)
    parts = [
        _HEADLINES[kind].format(who=listed(groups[kind]), are="is" if len(groups[kind]) == 1 else "are", base=base)
        for kind in _HEADLINES
        if kind in groups
    ]
    unlearned = [name for name, stats in values["methods"].items() if stats["unlearned"]]
    parts = [f"nothing was learned by {listed(unlearned)}", *parts] if unlearned else parts
    parts += [f"{listed(list(values['without']))} has no scores"] if len(values["without"]) == 1 else []
    parts += [f"{listed(list(values['without']))} have no scores"] if len(values["without"]) > 1 else []
    unfinished = any(method.open for method in results.methods.values())
    text = "; ".join(parts) or f"there is nothing beside {base} yet"
    if unfinished:
        return f"Preliminary: {text}."
    named = any(text.startswith(name) for name in [*values["methods"], *values["without"]])  # which stays as it is
    return f"{text if named else text[0].upper() + text[1:]}."


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def is_better(difference: float, values: dict[str, Any]) -> bool:
    """Whether a difference of the score is for the better: of error rates the lower one is."""
    return (difference > 0) is bool(values["greater_is_better"])


def unjudged(stats: dict[str, Any], values: dict[str, Any]) -> str:
    """Why a difference is not judged although there are seeds enough; "" if it is."""
    if both_collapsed(stats, values):
        return "the output of both has collapsed, so a verdict between them means nothing"
    if values["examples"] < values["examples_needed"]:
        return f"too few test examples for a verdict: {values['examples']}, and {values['examples_needed']} are needed"
    return ""


def both_collapsed(stats: dict[str, Any], values: dict[str, Any]) -> bool:
    """Whether the outputs of a method and of the baseline have both collapsed."""
    return fallen(stats) and fallen(values["methods"][values["baseline"]])


def same_score(stats: dict[str, Any], values: dict[str, Any]) -> bool:
    """Whether two or more runs of a method and of the baseline have one and the same score, so that nothing is told."""
    both = [stats, values["methods"][values["baseline"]]]
    return stats["difference"]["difference"] == 0 and all(some["sd"] == 0 for some in both)


def fallen(stats: dict[str, Any]) -> bool:
    """Whether the output of a method has collapsed with half of its seeds or more."""
    return 2 * int(stats["collapse"]["collapsed"]) >= int(stats["collapse"]["of"])


def counted(count: int, what: str) -> str:
    """A number of things, in words."""
    return f"{count} {what}{'s' if count != 1 else ''}"
