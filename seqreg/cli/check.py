"""What a run would do: its settings, data and loss, without training."""

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
from seqreg.workbench.data import completions
from seqreg.workbench.data.encoding import Encoded, Packed, encode
from seqreg.workbench.run.train import LoadedRun, prepare
from seqreg.workbench.text.escape import plain

EXAMPLES = 1000
"""Of a split, that token statistics are taken from."""


def relative_cost(cost: Cost) -> float:
    """Floating-point operations of a step with a term, over those of a plain one: a backward costs two forwards."""
    return (3 + cost.forwards + 2 * cost.backwards) / 3


@dataclass(frozen=True)
class RunOutline:
    """What a run would do; printed by rich as tables.

    Args:
        settings: of the run
        data: one entry for every text of every split: numbers of tokens, and the share of texts that is truncated
        loss: its parts, with what they cost
        summary: the model, the steps and the output
    """

    title: str
    settings: dict[str, Any]
    data: list[dict[str, Any]]
    loss: list[dict[str, Any]]
    summary: dict[str, Any]

    def __rich__(self) -> Group:
        settings = Syntax(overlay.dump(self.settings), "yaml", background_color="default", word_wrap=True)
        return Group(settings, self._data_table(), self._loss_table(), self._sentence())

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
        for name in ("part", "settings", "extra forwards", "extra backwards", "cost of a step"):
            table.add_column(name, justify="left" if name in ("part", "settings") else "right")
        for entry in self.loss:
            part, settings = entry["part"], ", ".join(f"{key}={value}" for key, value in entry["settings"].items())
            passes = ("", "") if part == "base" else (str(entry["forwards"]), str(entry["backwards"]))
            shown = settings or ("" if part == "all" else "defaults")
            table.add_row(plain(part), plain(shown), *passes, f"{entry['cost']:.2f}x")
        return table

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
    return RunOutline(title, config.model_dump(mode="json"), _data(parts), _loss(run), _summary(parts))


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
    entries += [_entry(t.name, {key: str(value) for key, value in t.settings().items()}, t.cost) for t in terms]
    if len(terms) > 1:
        total = Cost(sum(t.cost.forwards for t in terms), sum(t.cost.backwards for t in terms))
        entries.append(_entry("all", {}, total))
    return entries


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
