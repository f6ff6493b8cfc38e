"""Scores of a model on the splits of its task, with its prediction for every example."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from seqreg.context import Context
from seqreg.forward import Pass
from seqreg.metrics import tags as tag_metrics
from seqreg.metrics import texts as text_metrics
from seqreg.metrics.calibration import Outcomes
from seqreg.metrics.classification import classification
from seqreg.metrics.rouge.score import rouge
from seqreg.metrics.variety import collapse, spread, variety
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data.completions import prompt_of
from seqreg.workbench.data.encoding import Encoded, by_length, encode_words
from seqreg.workbench.data.examples import Example, tag_text
from seqreg.workbench.scores.drift import logits_at
from seqreg.workbench.text.terminal import warn

SOURCE = 500
"""Characters of a source that are written beside its prediction: for readers, and not to repeat a dataset."""


@dataclass
class Scored:
    """The scores on one split, in percent.

    Args:
        metrics: by name; "score" is the one that decides between checkpoints
        intervals: of the same names, low and high
        predictions: the prediction, the reference and the scores of every example
        signature: how the numbers were computed
    """

    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    signature: str = ""

    def add_nll(self, nll: Any, tokens: Any) -> None:
        """Add the perplexity of the completions, and to every prediction the mean NLL of its reference.

        Args:
            nll, tokens: of every example: the sum over the tokens of its completion, and how many these are
        """
        with np.errstate(over="ignore"):
            self.metrics["perplexity"] = float(np.exp(np.sum(nll, dtype=np.float64) / max(np.sum(tokens), 1)))
        for prediction, value, count in zip(self.predictions, nll, tokens, strict=True):
            prediction["nll"] = round(float(value) / max(int(count), 1), 6)

    def flat(self) -> dict[str, float]:
        """Scores and the ends of their intervals, for logs."""
        ends = {
            f"{name}_{end}": value
            for name, pair in self.intervals.items()
            for end, value in zip(("low", "high"), pair, strict=True)
        }
        return {**self.metrics, **ends}


class Scorer:
    """The `compute_metrics` of a trainer for one set of examples; `last` has what it computed last.

    Args:
        untrained: the model has not learnt anything yet, so a collapsed output is no surprise
    """

    def __init__(
        self,
        examples: Sequence[Example],
        run: Run,
        tokenizer: Any,
        name: str = "validation",
        *,
        untrained: bool = False,
    ) -> None:
        self.examples, self.run, self.tokenizer, self.name = examples, run, tokenizer, name
        self.last, self.quiet = Scored(), untrained

    def __call__(self, output: Any) -> dict[str, float]:
        columns = output.predictions if isinstance(output.predictions, tuple) else (output.predictions,)
        outputs, *completions = (self._in_order(column) for column in columns)
        settings, card = self.run.config.evaluation, self.run.card
        options = {"confidence": settings.confidence, "resamples": settings.resamples}
        if card.kind == "generation":
            self.last = score_texts(decode(outputs, self.tokenizer, card), self.examples, card, **options)
            if completions:
                self.last.add_nll(*completions)
        elif card.kind == "token_classification":
            self.last = score_tags(
                tag_texts(outputs, self.examples, self.run, self.tokenizer), self.examples, card, **options
            )
        else:
            self.last = score_classes(outputs, self.examples, card, **options)
        self.quiet = self.quiet or warn_of_collapse(self.last, self.name)  # once is enough
        return self.last.flat()

    def _in_order(self, column: Any) -> Any:
        """What a trainer computed from the longest example to the shortest, in the order of the examples."""
        evaluated = by_length(self.examples)
        column = column[: len(evaluated)]  # several processes repeat examples to fill their last batches
        placed = np.empty_like(column)
        placed[evaluated] = column
        return placed


@torch.no_grad()
def completion_nll(view: Pass, ctx: Context) -> tuple[Tensor, Tensor]:
    """The NLL of every row of a batch, summed over its labelled positions in float32, and their number: [B], [B]."""
    labels, rows = ctx.labels[ctx.mask], ctx.mask.nonzero()[:, 0]
    sums, first = torch.zeros(len(ctx.mask), device=labels.device), 0
    for logits in logits_at(view, ctx.mask):
        chosen = slice(first, first + len(logits))
        sums.index_add_(0, rows[chosen], cross_entropy(logits.float(), labels[chosen], reduction="none"))
        first += len(logits)
    return sums, ctx.mask.sum(-1)


def decode(ids: Any, tokenizer: Any, card: Card) -> list[str]:
    """Generated ids as text, cleaned as the card cleans its targets."""
    ids = np.where(np.asarray(ids) < 0, tokenizer.pad_token_id, ids)
    return [tidy(text, card) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def tidy(text: str, card: Card) -> str:
    for rule in card.clean:
        if rule.column == "target":
            text = re.sub(rule.pattern, rule.by, text)
    return text.strip()


def score_texts(texts: Sequence[str], examples: Sequence[Example], card: Card, **options: Any) -> Scored:
    """The card's scores against the whole references, not against what is left of them after truncation."""
    scored = [examples[index] for index in range(len(texts))]
    references = [example.accepted for example in scored]
    ways: dict[str, Any] = {"sentences": card.sentences, "words": card.words, "tokenize": card.tokenize, **options}
    reports = [text_metrics.score(metric, texts, references, **ways) for metric in card.metric]
    means = {name: 100 * mean for report in reports for name, mean in report.means.items()}
    columns = {name: column for report in reports for name, column in report.columns.items()}
    predictions = [
        {"index": index, "source": shown_source(scored[index]), "prediction": text, "reference": accepted[0]}
        | ({"references": list(accepted)} if len(accepted) > 1 else {})
        | {name: round(column[index].item(), 6) for name, column in columns.items()}
        for index, (text, accepted) in enumerate(zip(texts, references, strict=True))
    ]
    first = [accepted[0] for accepted in references]
    return Scored(
        {"score": means[card.score], **means, **_lengths(texts, scored, card), **variety(texts, first, texts=True)},
        {name: (100 * low, 100 * high) for report in reports for name, (low, high) in report.intervals.items()},
        predictions,
        "; ".join(report.signature for report in reports),
    )


def shown_source(example: Example) -> str:
    """The beginning of a source, and of the second text of a pair after a tab."""
    text = example.source if example.second is None else f"{example.source}\t{example.second}"
    return text if len(text) <= SOURCE else f"{text[:SOURCE]} ..."


def tag_texts(outputs: Any, examples: Sequence[Example], run: Run, tokenizer: Any) -> list[str]:
    """The predicted tags of every example, from logits [examples, tokens, classes]: one per word, apart by spaces.

    A word that was cut off has no prediction, and counts as outside.
    """
    data, predicted = run.config.data, np.asarray(outputs).argmax(-1)
    texts = []
    for index, row in enumerate(predicted):
        _, places = encode_words(tokenizer, examples[index], data.source_prefix, data.max_source_length)
        texts.append(tag_text(run.card, (None if place is None else int(row[place]) for place in places)))
    return texts


def score_tags(texts: Sequence[str], examples: Sequence[Example], card: Card, **options: Any) -> Scored:
    """The card's scores of tags, against those of all words, also of words that were cut off."""
    references = [tag_text(card, examples[index].tags or ()) for index in range(len(texts))]
    reports = [tag_metrics.score(metric, texts, references, **options) for metric in card.metric]
    means = {name: 100 * mean for report in reports for name, mean in report.means.items()}
    columns = {name: column for report in reports for name, column in report.columns.items()}
    predictions = [
        {"index": index, "source": shown_source(examples[index]), "prediction": text, "reference": reference}
        | {name: round(column[index].item(), 6) for name, column in columns.items()}
        for index, (text, reference) in enumerate(zip(texts, references, strict=True))
    ]
    types = tag_metrics.entity_types(texts, references) if "entity_f1" in card.metric else {}
    flat = [tag_metrics.flat(some) for some in (texts, references)]
    return Scored(
        {
            "score": means[card.score], **means, **{f"entity_f1_{kind}": 100 * value for kind, value in types.items()},
            **variety(*flat, texts=False), "words": len(flat[1]),
        },
        {name: (100 * low, 100 * high) for report in reports for name, (low, high) in report.intervals.items()},
        predictions,
        "; ".join(report.signature for report in reports),
    )  # fmt: skip


def _lengths(texts: Sequence[str], examples: Sequence[Example], card: Card) -> dict[str, float]:
    """How long, repetitive and new texts are, in the words of ROUGE; those of every script where it is not a score."""
    words = card.words if "rouge" in card.metric else "unicode"
    sources, same = [example.source for example in examples], ["" for _ in texts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scripts: said where ROUGE is computed
        return rouge(texts, same, sources=sources, kinds=["rouge1"], tokenizer=words, resamples=1).counts


def warn_of_collapse(scored: Scored, name: str) -> bool:
    """Warn if a model has written nothing at all, or one thing about everything; whether it has."""
    count = len(scored.predictions)
    words = scored.metrics.get("words")
    warning = collapse(scored.metrics, count) if words is None else collapse(scored.metrics, int(words), "words")
    if scored.metrics.get("empty") == count:
        warning = f"all {count} predictions are empty: has the model learnt anything yet?"
    elif warning:
        warning += ": the output has collapsed, and its score means little"
    if warning:
        warn(f"seqreg: warning: {name}: {warning}")
    return bool(warning)


def score_classes(outputs: Any, examples: Sequence[Example], card: Card, **options: Any) -> Scored:
    """GLUE's scores of logits [examples, classes], or of numbers [examples, 1]."""
    outputs = np.asarray(outputs, dtype=np.float64)
    labels = [examples[index].label for index in range(len(outputs))]
    predicted = outputs[:, 0] if card.labels is None else outputs.argmax(-1)
    scores, intervals = classification(card.metric, predicted, labels, **options)
    varied = spread(predicted, labels) if card.labels is None else variety(predicted.tolist(), labels, texts=False)
    means = {name: 100 * value for name, value in scores.items()}
    predictions = [
        {"index": index, "source": shown_source(examples[index])}
        | class_prediction(index, output, card)
        | _truth(output, label, card)
        for index, (output, label) in enumerate(zip(outputs, labels, strict=True))
    ]
    return Scored(
        {"score": float(np.mean(list(means.values()))), **means, **_calibration(outputs, labels, card), **varied},
        {name: (100 * low, 100 * high) for name, (low, high) in intervals.items()},
        predictions,
        f"{'+'.join(card.metric)}|glue",
    )


def _calibration(outputs: Any, labels: Sequence[int | float | None], card: Card) -> dict[str, float]:
    """NLL without label smoothing, Brier score, and ECE in percent with 15 bins; nothing without labels of classes."""
    if card.labels is None or not len(labels) or None in labels or not np.isfinite(outputs).all():
        return {}
    numbers = Outcomes.of(outputs, np.asarray(labels)).summary(15)
    return {"nll": numbers["nll"], "brier": numbers["brier"], "ece": 100 * numbers["ece"]}


def class_prediction(index: int, output: Any, card: Card) -> dict[str, Any]:
    """One prediction of a classifier, as written to predictions.jsonl."""
    if card.labels is None:
        return {"index": index, "prediction": float(output[0])}
    shifted = np.exp(output - output.max())
    shares = {name: round(float(share), 6) for name, share in zip(card.labels, shifted / shifted.sum(), strict=True)}
    return {"index": index, "prediction": card.labels[int(output.argmax())], "probabilities": shares}


def _truth(output: Any, label: int | float | None, card: Card) -> dict[str, Any]:
    if card.labels is None or label is None:
        return {"reference": label}
    return {"reference": card.labels[int(label)], "correct": bool(output.argmax() == label)}


def evaluate(
    trainer: Any, run: Run, tokenizer: Any, examples: Sequence[Example], name: str, *, untrained: bool = False
) -> Scored:
    """Generate or classify with a trainer, and score it."""
    scorer, former = Scorer(examples, run, tokenizer, name, untrained=untrained), trainer.compute_metrics
    trainer.compute_metrics = scorer
    begin = time.perf_counter()
    try:
        encoded = Encoded(examples, tokenizer, run.config, prompt_of(run, trainer.model))
        output = trainer.predict(encoded, metric_key_prefix=name)
    finally:
        trainer.compute_metrics = former
    scored = scorer.last
    scored.metrics["loss"] = float(output.metrics[f"{name}_loss"])
    if not np.isfinite(scored.metrics["loss"]):
        warn(f"{name}: the loss is not finite: what the model says means nothing")
    scored.metrics["rows"], scored.metrics["seconds"] = len(examples), time.perf_counter() - begin
    return scored


def with_average(splits: dict[str, Scored], card: Card) -> dict[str, Scored]:
    """The same, and the mean over the sets that a model is judged by, where the card asks for it."""
    judged = {name: splits[name] for name in card.evaluations if name in splits}
    if not card.average or len(judged) < 2:
        return splits
    mean = {key: float(np.mean([scored.metrics[key] for scored in judged.values()])) for key in ["score", *card.scores]}
    return {**splits, "average": Scored(mean, signature=f"mean of {len(judged)} sets: {', '.join(judged)}")}
