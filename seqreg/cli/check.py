"""Look at a recipe and its data without training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.syntax import Syntax
from rich.table import Table

from seqreg.term import Cost, Term
from seqreg.workbench.config import overlay
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data.encoding import encode
from seqreg.workbench.run.train import LoadedRun, prepare
from seqreg.workbench.text.escape import plain

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


@dataclass(frozen=True)
class Checked:
    """What a training would do; printed by rich as tables.

    Args:
        settings: of the run
        data: one entry for every text of every split, as in `Lengths`
        loss: its parts, with what they cost
        summary: the model, the steps and the output, in words
    """

    title: str
    settings: dict[str, Any]
    data: list[dict[str, Any]]
    loss: list[dict[str, Any]]
    summary: dict[str, Any]

    def json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)

    def __rich__(self) -> Group:
        settings = Syntax(overlay.dump(self.settings), "yaml", background_color="default", word_wrap=True)
        return Group(settings, self._data_table(), self._loss_table(), self._sentence())

    def _data_table(self) -> Table:
        table = Table(title=plain(self.title))
        for name in ("split", "rows", "text", "mean", "95%", "longest", "limit", "cut"):
            table.add_column(name, justify="left" if name in ("split", "text") else "right")
        for one in self.data:
            first = one["text"] == "source"
            numbers = (f"{one['mean']:.1f}", f"{one['high']:.0f}", str(one["longest"]), str(one["limit"]))
            size = f"{one['rows']:,}" if first else ""
            table.add_row(plain(one["split"]) if first else "", size, one["text"], *numbers, f"{one['cut']:.1%}")
        table.caption = f"tokens, of the first {ROWS} rows of a split"
        return table

    def _loss_table(self) -> Table:
        table = Table(title="the loss")
        for name in ("part", "settings", "extra forwards", "extra backwards", "cost of a step"):
            table.add_column(name, justify="left" if name in ("part", "settings") else "right")
        for one in self.loss:
            shown = ", ".join(f"{key}={value}" for key, value in one["settings"].items())
            passes = ("", "") if one["part"] == "base" else (str(one["forwards"]), str(one["backwards"]))
            table.add_row(
                plain(one["part"]),
                plain(shown or ("" if one["part"] == "all" else "defaults")),
                *passes,
                f"{one['cost']:.2f}x",
            )
        return table

    def _sentence(self) -> str:
        one = self.summary
        return (
            f"{one['model']}, {one['parameters']:,} parameters; {one['steps']:,} steps of {one['batch']} rows a device "
            f"= {one['epochs']:.2f} epochs; evaluated on {', '.join(one['evaluations'])}; output in "
            f"{plain(one['output'])}"
        )


def check(run: Run) -> Checked:
    """Build everything, and tell what was found."""
    shop, config, card = prepare(run), run.config, run.card
    title = f"{card.title}, {config.data.path or card.rule}"
    return Checked(title, config.model_dump(mode="json"), _data(shop), _loss(run), _summary(shop))


def _data(shop: LoadedRun) -> list[dict[str, Any]]:
    config, found = shop.run.config, []
    for name, examples in shop.splits.sets.items():
        chosen = [examples[index] for index in range(min(ROWS, len(examples)))]
        coded = (encode(shop.tokenizer, one, config.data.source_prefix, None) for one in chosen)
        sides = {"source": [len(one["input_ids"]) for one in coded]}
        if shop.run.card.kind == "generation":
            sides["target"] = [len(shop.tokenizer(text_target=one.target or "")["input_ids"]) for one in chosen]
        for side, sizes in sides.items():
            limit = config.data.max_source_length if side == "source" else config.data.max_target_length
            numbers = asdict(lengths(sizes, limit))
            found.append({"split": name, "rows": len(examples), "text": side, **numbers, "limit": limit})
    return found


def _loss(run: Run) -> list[dict[str, Any]]:
    base = run.config.loss
    settings: dict[str, Any] = {"label_smoothing": base.label_smoothing, "smoothing": base.smoothing}
    found = [_part("base", settings, Cost(0, 0))]
    terms: tuple[Term, ...] = run.config.criterion().terms
    for term in terms:
        found.append(_part(term.name, {key: str(value) for key, value in term.settings().items()}, term.cost))
    if len(terms) > 1:
        total = Cost(sum(t.cost.forwards for t in terms), sum(t.cost.backwards for t in terms))
        found.append(_part("all", {}, total))
    return found


def _part(name: str, settings: dict[str, Any], cost: Cost) -> dict[str, Any]:
    numbers = {"forwards": cost.forwards, "backwards": cost.backwards, "cost": relative_cost(cost)}
    return {"part": name, "settings": settings, **numbers}


def _summary(shop: LoadedRun) -> dict[str, Any]:
    opt, size = shop.run.config.optimisation, sum(p.numel() for p in shop.model.parameters())
    rows, batch = len(shop.splits.sets["train"]), opt.per_device_train_batch_size * opt.gradient_accumulation_steps
    steps = opt.max_steps or int(np.ceil(rows / batch) * (opt.num_train_epochs or 1))
    return {
        "model": type(shop.model).__name__, "parameters": size, "steps": steps, "batch": batch,
        "epochs": steps * batch / rows, "evaluations": shop.splits.evaluations(shop.run.card),
        "output": shop.run.config.output,
    }  # fmt: skip
