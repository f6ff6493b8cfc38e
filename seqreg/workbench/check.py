"""Look at a recipe and its data without training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.syntax import Syntax
from rich.table import Table

from seqreg.term import Cost, Term
from seqreg.workbench import layers, models
from seqreg.workbench.config import Run
from seqreg.workbench.train import Workshop, prepare
from seqreg.workbench.untrusted import plain

ROWS = 1000
"""Rows of a split that token statistics are taken from."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a text column, and the share of texts that is cut."""

    mean: float
    high: float
    longest: int
    cut: float


def lengths(found: list[int], limit: int) -> Lengths:
    sizes = np.asarray(found)
    return Lengths(
        float(sizes.mean()), float(np.quantile(sizes, 0.95)), int(sizes.max()), float((sizes > limit).mean())
    )


def relative_cost(cost: Cost) -> float:
    """Floating-point operations of a step with a term, over those of a plain one: a backward costs two forwards."""
    return (3 + cost.forwards + 2 * cost.backwards) / 3


def check(run: Run) -> Group:
    """Build everything, and tell what was found."""
    shop = prepare(run)
    parts: list[Any] = [
        Syntax(layers.dump(run.config.model_dump(mode="json")), "yaml", background_color="default", word_wrap=True),
        _data_table(shop),
        _term_table(run),
        _summary(shop),
    ]
    return Group(*parts)


def _data_table(shop: Workshop) -> Table:
    config, card = shop.run.config, shop.run.card
    table = Table(title=plain(f"{card.title}, {config.data.path or card.rule}"))
    for name in ("split", "rows", "text", "mean", "95%", "longest", "limit", "cut"):
        table.add_column(name, justify="left" if name in ("split", "text") else "right")
    for name, examples in shop.splits.sets.items():
        chosen = [examples[index] for index in range(min(ROWS, len(examples)))]
        coded = (models.encode(shop.tokenizer, one, config.data.prefix, None) for one in chosen)
        sides = {"source": [len(found["input_ids"]) for found in coded]}
        if shop.run.card.kind == "generation":
            sides["target"] = [len(shop.tokenizer(text_target=one.target or "")["input_ids"]) for one in chosen]
        for side, found in sides.items():
            limit = config.data.max_source if side == "source" else config.data.max_target
            one = lengths(found, limit)
            size = f"{len(examples):,}" if side == "source" else ""
            numbers = (f"{one.mean:.1f}", f"{one.high:.0f}", str(one.longest), str(limit), f"{one.cut:.1%}")
            table.add_row(plain(name) if size else "", size, side, *numbers)
    table.caption = f"tokens, of the first {ROWS} rows of a split"
    return table


def _term_table(run: Run) -> Table:
    table = Table(title="the loss")
    for name in ("part", "settings", "extra forwards", "extra backwards", "cost of a step"):
        table.add_column(name, justify="left" if name in ("part", "settings") else "right")
    loss = run.config.loss
    table.add_row("base", f"label_smoothing={loss.label_smoothing}, smoothing={loss.smoothing}", "", "", "1.00x")
    terms: tuple[Term, ...] = run.config.criterion().terms
    for term in terms:
        shown = ", ".join(f"{key}={value}" for key, value in term.settings().items())
        passes = (str(term.cost.forwards), str(term.cost.backwards), f"{relative_cost(term.cost):.2f}x")
        table.add_row(plain(term.name), plain(shown or "defaults"), *passes)
    if len(terms) > 1:
        total = Cost(sum(t.cost.forwards for t in terms), sum(t.cost.backwards for t in terms))
        table.add_row("all", "", str(total.forwards), str(total.backwards), f"{relative_cost(total):.2f}x")
    return table


def _summary(shop: Workshop) -> str:
    opt, size = shop.run.config.optimisation, sum(p.numel() for p in shop.model.parameters())
    rows, batch = len(shop.splits.sets["train"]), opt.batch_size * opt.accumulation
    steps = opt.steps or int(np.ceil(rows / batch) * (opt.epochs or 1))
    kind = type(shop.model).__name__
    return (
        f"{kind}, {size:,} parameters; {steps:,} steps of {batch} rows a device = {steps * batch / rows:.2f} epochs; "
        f"evaluated on {', '.join(shop.splits.evaluations(shop.run.card))}; output in {plain(shop.run.config.output)}"
    )
