"""Examples of a comparison for its page: outputs side by side, differences marked, and scores by example."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqreg.metrics.texts import PSEUDOVALUE
from seqreg.studies.common.figures import look
from seqreg.studies.compare.arms import SOUPS
from seqreg.studies.compare.results import MethodResults, Results

BUDGET = 2_000_000
"""Characters of text on a page."""
EDGES = (-50, -25, -10, 0, 0, 10, 25, 50)
"""Points between the bins of differences by example; the middle one holds those without any."""
BINS = [
    "worse by more than 50 points", "worse by 25 to 50", "worse by 10 to 25", "worse by up to 10", "equal",
    "better by up to 10", "better by 10 to 25", "better by 25 to 50", "better by more than 50 points",
]  # fmt: skip
_SAME, _EXTRA, _MISSING = "=", "+", "-"


def reader(compared: Results, budget: int = BUDGET) -> dict[str, Any] | None:
    """All that the page's reader shows, as JSON; None where predictions are numbers.

    Scores of every example are there, texts of as many as `budget` allows: those that come first in the test set, and
    those on which methods differ most. An output is a list of pieces: "=" begins what the reference has too, "+" what
    it has not, "-" what only the reference has. A method that is one model of all seeds has one output, others one per
    seed of the plan, null where there is none.
    """
    first = next(iter(compared.baseline.predictions.values()))
    if not compared.texts and "correct" not in first[0]:
        return None
    scores = {method.name: _scores(compared, method) for method in compared.scored}
    base, sign = scores[compared.plan.baseline].mean(0), 1 if compared.greater_is_better else -1
    binned = {name: bins(sign * (some.mean(0) - base)) for name, some in scores.items()}
    examples = [
        _example(compared, index, scores) | {"bins": [int(some[index]) for some in binned.values()]}
        for index in _chosen(compared, scores, budget)
    ]
    return {
        "metric": compared.metric, "texts": compared.texts, "greater": compared.greater_is_better,
        "baseline": compared.plan.baseline, "seeds": list(compared.plan.seeds), "total": len(first),
        "methods": [
            {"name": name, "free": name in compared.plan.arms, "colour": look(place)["color"]}
            for place, name in enumerate(scores)
        ],
        "examples": examples,
        "bins": [
            {"name": name, "counts": np.bincount(some, minlength=len(BINS)).tolist()}
            for name, some in binned.items() if name != compared.plan.baseline
        ],
    }  # fmt: skip


def bins(changes: NDArray[np.float64]) -> NDArray[np.int64]:
    """The bin of every difference.

    >>> bins(np.array([-60.0, -50.0, -0.1, 0.0, 10.0, 50.0, 50.1])).tolist()
    [0, 1, 3, 4, 5, 7, 8]
    """
    rounded = np.round(changes, 6)
    below = np.searchsorted(EDGES[:4], rounded, side="right")  # worse: the edge belongs to the bin nearer to 0
    above = 4 + np.searchsorted(EDGES[4:], rounded, side="left")
    return np.where(rounded < 0, below, np.where(rounded > 0, above, 4))


def _scores(compared: Results, method: MethodResults) -> NDArray[np.float64]:
    """Scores of a method in percent, [seeds, examples]."""
    return 100 * np.array(
        [[_score(line, compared.metric) for line in lines] for lines in method.predictions.values()], dtype=np.float64
    )


def _score(line: dict[str, Any], metric: str) -> float:
    """The score of one example; of BLEU and chrF, which none has alone, its pseudo-value; of classes, 0 or 1."""
    if "correct" in line:
        return float(line["correct"])
    return float(line[metric] if metric in line else line[f"{metric}{PSEUDOVALUE}"])


def _chosen(compared: Results, scores: dict[str, NDArray[np.float64]], budget: int) -> list[int]:
    """Indices of examples whose texts are on the page, in the order of the test set."""
    means = np.array([some.mean(0) for some in scores.values()])
    apart = np.argsort(-np.ptp(means, 0), kind="stable").tolist()
    order = dict.fromkeys(index for both in zip(range(len(apart)), apart, strict=True) for index in both)
    lines = [predictions for method in compared.scored for predictions in method.predictions.values()]
    chosen: list[int] = []
    for index in order:
        budget -= sum(len(str(some[index]["prediction"])) for some in lines)
        budget -= len(str(lines[0][index]["reference"])) + len(lines[0][index].get("source", ""))
        if budget < 0 and chosen:
            break
        chosen.append(index)
    return sorted(chosen)


def _example(compared: Results, index: int, scores: dict[str, NDArray[np.float64]]) -> dict[str, Any]:
    line = next(iter(compared.baseline.predictions.values()))[index]
    references = [str(text) for text in line.get("references", [line["reference"]])]
    outputs, numbers, shares = [], [], []
    for method in compared.scored:
        one_model = method.name in SOUPS and method.name in compared.plan.arms
        seeds = list(method.predictions) if one_model else list(compared.plan.seeds)
        places = {seed: place for place, seed in enumerate(method.predictions)}
        lines = [method.predictions[seed][index] if seed in places else None for seed in seeds]
        outputs.append([some and _pieces(some, references, compared.texts) for some in lines])
        known = scores[method.name][:, index]
        numbers.append([round(float(known[places[seed]]), 1) if seed in places else None for seed in seeds])
        shares.append([some and _share(some) for some in lines])
    example = {"index": index, "source": line.get("source", ""), "references": references, "outputs": outputs}
    return {**example, "scores": numbers} | ({} if compared.texts else {"shares": shares})


def _pieces(line: dict[str, Any], references: Sequence[str], texts: bool) -> list[str]:
    """A text with its differences; a class as a whole, right or wrong."""
    if texts:
        return differences(str(line["prediction"]), references)
    return [f"{_SAME if line['correct'] else _EXTRA}{line['prediction']}"]


def _share(line: dict[str, Any]) -> float | None:
    """The probability of the predicted class, where it was written."""
    share = line.get("probabilities", {}).get(line["prediction"])
    return None if share is None else round(100 * share, 1)


def differences(text: str, references: Sequence[str]) -> list[str]:
    """A text in pieces, against the reference that it is most like: by words, or by characters of single words.

    >>> differences("the cat sat", ["the dog sat"])
    ['=the ', '+cat ', '-dog ', '=sat']
    >>> differences("kæt", ["kat"])
    ['=k', '+æ', '-a', '=t']
    """
    matchers = [_matcher(text, reference) for reference in references]
    words, wanted, matcher = max(matchers, key=lambda some: some[2].ratio()) if len(matchers) > 1 else matchers[0]
    pieces = []
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            pieces.append(_SAME + "".join(words[a:b]))
        else:
            pieces += [_EXTRA + "".join(words[a:b])] if b > a else []
            pieces += [_MISSING + "".join(wanted[c:d])] if d > c else []
    return pieces


def _matcher(text: str, reference: str) -> tuple[list[str], list[str], difflib.SequenceMatcher[str]]:
    single = len(text.split()) <= 1 and len(reference.split()) <= 1
    pattern = r"(?s)." if single else r"\s*\S+\s*"
    words, wanted = (re.findall(pattern, some) for some in (text, reference))
    plain = [[word if single else word.strip().lower() for word in some] for some in (words, wanted)]
    return words, wanted, difflib.SequenceMatcher(None, plain[0], plain[1], autojunk=False)
