"""What a run would do: its settings, data and loss, without training."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from rich.console import Group
from rich.syntax import Syntax
from rich.table import Table

from seqreg.term import Cost, Term
from seqreg.workbench.config import overlay
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.data import completions
from seqreg.workbench.data.encoding import Encoded, Packed, encode
from seqreg.workbench.run.train import LoadedRun, prepare
from seqreg.workbench.text.escape import plain

EXAMPLES = 1000
"""Of a split, that token statistics are taken from."""


_CHOSEN = "what the card, the recipe and the command line chose; --json prints all settings"


def relative_cost(cost: Cost) -> float:
    """Floating-point operations of a step with a term, over those of a plain one: a backward costs two forwards."""
    return (3 + cost.forwards + 2 * cost.backwards) / 3


@dataclass(frozen=True)
class RunOutline:
    """What a run would do; printed by rich as tables.

    Args:
        settings: of the run
        chosen: those that are not defaults, without those of terms
        data: one entry for every text of every split: numbers of tokens, and the share of texts that is truncated
        loss: its parts, with what they cost
        summary: the model, the steps and the output
    """

    title: str
    settings: dict[str, Any]
    chosen: dict[str, Any]
    data: list[dict[str, Any]]
    loss: list[dict[str, Any]]
    summary: dict[str, Any]

    def __rich__(self) -> Group:
        parts: list[Any] = [self._sentence(), self._loss_table(), *self._loss_settings(), self._data_table()]
        chosen = Syntax(overlay.dump(self.chosen), "yaml", background_color="default", word_wrap=True)
        return Group(*parts, _CHOSEN, chosen)

    def _data_table(self) -> Table:
        table = Table(title=plain(self.title), caption=f"tokens, of the first {EXAMPLES} examples of a split")
        for name in ("split", "examples", "text", "mean", "95%", "longest", "limit", "truncated"):
            table.add_column(name, justify="left" if name in ("split", "text") else "right")
        for entry in self.data:
            count = "streamed" if entry["rows"] is None else f"{entry['rows']:,}"
            split = (plain(entry["split"]), count) if entry["text"] == "source" else ("", "")
            numbers = (f"{entry['mean']:.1f}", f"{entry['high']:.0f}", str(entry["longest"]), str(entry["limit"]))
            table.add_row(*split, entry["text"], *numbers, f"{entry['cut']:.1%}")
        return table

    def _loss_table(self) -> Table:
        table = Table(title="the loss")
        for name in ("part", "extra forwards", "extra backwards", "cost of a step"):
            table.add_column(name, justify="left" if name == "part" else "right")
        for entry in self.loss:
            passes = ("", "") if entry["part"] == "base" else (str(entry["forwards"]), str(entry["backwards"]))
            table.add_row(plain(entry["part"]), *passes, f"{entry['cost']:.2f}x")
        return table

    def _loss_settings(self) -> list[str]:
        """A line per part of the loss, with all its settings."""
        pairs = {entry["part"]: [f"{key}={value}" for key, value in entry["settings"].items()] for entry in self.loss}
        return [plain(f"{part}: {', '.join(settings)}") for part, settings in pairs.items() if settings]

    def _sentence(self) -> str:
        run = self.summary
        what = f"of {run['bins']:,} bins" if run["bins"] else "examples"
        epochs = "" if run["epochs"] is None else f" = {run['epochs']:.2f} epochs"
        return (
            f"{run['model']}, {run['parameters']:,} parameters; {run['steps']:,} steps of {run['batch']} {what} per "
            f"device{epochs}; evaluated on {', '.join(run['evaluations'])}; output in "
            f"{plain(run['output'])}"
        )


def check(run: Run) -> RunOutline:
    """Build everything but the trainer."""
    parts, config, card = prepare(run), run.config, run.card
    title = f"{card.title}, {config.data.path or card.rule}"
    chosen = config.model_dump(mode="json", exclude_defaults=True, exclude={"terms"})
    return RunOutline(title, config.model_dump(mode="json"), chosen, _data(parts), _loss(run), _summary(parts))


def _data(parts: LoadedRun) -> list[dict[str, Any]]:
    data, tokenizer, entries = parts.run.config.data, parts.tokenizer, []
    streamed = {} if parts.splits.stream is None else {"train": parts.splits.first}
    for name, examples in {**streamed, **parts.splits.sets}.items():
        chosen = [examples[index] for index in range(min(EXAMPLES, len(examples)))]
        chats = completions.ChatEncoder(tokenizer, None, data.max_target_length)
        sources = [
            len(
                chats.prompt(example.chat)
                if example.chat
                else encode(tokenizer, example, data.source_prefix, None)["input_ids"]
            )
            for example in chosen
        ]
        texts = {"source": (sources, data.max_source_length)}
        if parts.run.card.kind == "generation":
            targets = [len(tokenizer(text_target=example.target or "")["input_ids"]) for example in chosen]
            texts["target"] = targets, data.max_target_length
        for text, (lengths, limit) in texts.items():
            count = None if name in streamed else len(examples)
            entry = {"split": name, "rows": count, "text": text, **length_statistics(lengths, limit)}
            entries.append({**entry, "limit": limit})
    return entries


def length_statistics(lengths: list[int], limit: int) -> dict[str, float]:
    """Numbers of tokens, and the share of texts that is cut."""
    sizes = np.asarray(lengths)
    high, cut = float(np.quantile(sizes, 0.95)), float((sizes > limit).mean())
    return {"mean": float(sizes.mean()), "high": high, "longest": int(sizes.max()), "cut": cut}


def _loss(run: Run) -> list[dict[str, Any]]:
    base = run.config.loss
    terms: tuple[Term, ...] = run.config.criterion().terms
    settings = {"loss": base.loss, "label_smoothing": base.label_smoothing, "smoothing": base.smoothing}
    entries = [_entry("base", settings, Cost(0, 0))]
    entries += [_entry(term.name, _term_settings(term), term.cost) for term in terms]
    if len(terms) > 1:
        total = Cost(sum(t.cost.forwards for t in terms), sum(t.cost.backwards for t in terms))
        entries.append(_entry("all", {}, total))
    return entries


def _term_settings(term: Term) -> dict[str, str]:
    """All settings of a term as they will be; its name is that of the part."""
    values = {field.name: getattr(term, field.name) for field in fields(term) if field.name != "name"}
    return {key: str(value) for key, value in values.items() if value is not None}


def _entry(part: str, settings: dict[str, Any], cost: Cost) -> dict[str, Any]:
    return {"part": part, "settings": settings, **asdict(cost), "cost": relative_cost(cost)}


def _summary(parts: LoadedRun) -> dict[str, Any]:
    config, train = parts.run.config, parts.splits.sets.get("train", ())
    opt, examples = config.optimisation, len(train)
    if config.data.packing:
        prompt = completions.prompt_of(parts.run, parts.model)
        examples = len(Packed(Encoded(train, parts.tokenizer, config, prompt), config.data.bin_length))
    batch = opt.per_device_train_batch_size * opt.gradient_accumulation_steps
    steps = opt.max_steps or int(np.ceil(examples / batch) * (opt.num_train_epochs or 1))
    epochs = steps * batch / examples if examples else None  # of a stream
    return {
        "model": type(parts.model).__name__, "parameters": sum(p.numel() for p in parts.model.parameters()),
        "steps": steps, "batch": batch, "epochs": epochs, "bins": examples if config.data.packing else 0,
        "evaluations": parts.splits.evaluations(parts.run.card), "output": parts.run.config.output,
    }  # fmt: skip
