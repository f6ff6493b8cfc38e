"""Perplexity of plain texts: what a causal language model still knows of what it was not trained on here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from seqreg.errors import BadInput
from seqreg.integrations.hf.model import unwrap
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data.completions import features, is_causal
from seqreg.workbench.data.examples import Example
from seqreg.workbench.scores.evaluate import Scored

CHECKED = 1024
"""Tokens of a window of the check, which any two tokens are in."""


def windows(texts: Sequence[Example], tokenizer: Any, length: int) -> list[dict[str, list[int]]]:
    """Texts as rows of at most so many token ids, one after the other; all but the first id of a row are predicted."""
    ids = (tokenizer(text.source)["input_ids"] for text in texts)
    cut = itertools.chain.from_iterable(
        (text[start : start + length] for start in range(0, len(text), length)) for text in ids
    )
    return [features([], row) for row in cut if len(row) > 1]


def check(corpora: Mapping[str, Sequence[Example]], model: Any, tokenizer: Any) -> None:
    """Refuse texts for a model that is not causal, and texts of which no token is predicted."""
    for name, texts in corpora.items():
        if not is_causal(model):
            kind = type(unwrap(model)).__name__
            raise BadInput(f"data.corpora.{name}: perplexity is that of causal language models, and this is a {kind}")
        if not any(windows([text], tokenizer, CHECKED) for text in texts):
            raise BadInput(f"data.corpora.{name}: no text of two tokens or more in it")


def perplexity(trainer: Any, run: Run, tokenizer: Any, texts: Sequence[Example], name: str) -> Scored:
    """The mean NLL of a token in nats ("loss"), its exponential ("perplexity"), and how many tokens were predicted."""
    data, begin = run.config.data, time.perf_counter()
    rows = windows(texts, tokenizer, data.max_source_length + data.max_target_length)
    numbers: dict[str, float] = {}

    def score(output: Any) -> dict[str, float]:
        nll, tokens = (np.sum(column[: len(rows)], dtype=np.float64) for column in output.predictions)
        numbers["loss"], numbers["tokens"] = float(nll / max(tokens, 1)), int(tokens)
        return {}

    former, trainer.compute_metrics, trainer.generating = trainer.compute_metrics, score, False
    try:
        trainer.predict(rows, metric_key_prefix=name)
    finally:
        trainer.compute_metrics, trainer.generating = former, True
    with np.errstate(over="ignore"):
        numbers["perplexity"] = float(np.exp(numbers["loss"]))
    return Scored({**numbers, "rows": len(texts), "seconds": time.perf_counter() - begin})
