"""Compare seqreg's loss with the model's own on every architecture of transformers that can be built tiny.

    python -m tests.sweep                            # all kinds
    python -m tests.sweep --kind causal --kind tokens
    python -m tests.sweep --only gpt2 --only xlnet --json

Without terms and smoothing, the criterion's loss and gradient must be those of `model(**batch).loss`: in training mode,
with dropout from the same seed (off, where a model draws seeds of its own), auxiliary losses switched on, on padded
rows. Beside a term (R3F, dropout off) the base loss must stay what it was. Every model is built and run in a process of
its own, with a limit of time. A row is

    equal       loss and gradient are the model's own
    refused     seqreg says in one line why it does not train this model
    not built   there is no tiny model to compare with, or its own loss cannot be computed
    differs     a fault of seqreg: the exit code is 1
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import transformers
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

from seqreg import BadInput, Criterion
from seqreg.integrations.hf import context
from seqreg.terms.r3f import R3F
from seqreg.workbench.text.terminal import console
from tests.helpers import tiny_configs, tiny_models
from tests.helpers.tiny_configs import EOS, PAD, VOCAB

KINDS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "tokens": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}
LABELS, LARGEST = 3, 8_000_000
Verdict = Literal["equal", "refused", "not built", "differs"]
COLOURS: dict[Verdict, str] = {"equal": "green", "refused": "yellow", "not built": "dim", "differs": "bold red"}


@dataclass(frozen=True)
class Row:
    """What became of one model; `terms` is why terms that perturb embeddings are refused on it, if they are."""

    kind: str
    model_type: str
    model: str
    verdict: Verdict
    reason: str = ""
    terms: str = ""


def models(kinds: Iterable[str], only: Iterable[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Kind, model type and class of every model to compare; `only` are model types."""
    chosen = set(only)
    for kind in kinds:
        for model_type, name in KINDS[kind].items():
            if not chosen or model_type in chosen:
                yield kind, model_type, name


def build(kind: str, model_type: str, name: str) -> Any:
    """A tiny model in training mode, whose weights are enlarged so that its outputs depend on its inputs."""
    cls = getattr(transformers, name)
    own = getattr(cls.config_class, "model_type", "") or model_type  # a text model of a larger whole
    settings = {"num_labels": LABELS, "output_router_logits": True, "is_decoder": kind == "causal"}
    config = tiny_configs.tiny(own, **settings)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters: not tiny")
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if not torch.isfinite(parameter).all():
                parameter.normal_(0, 0.02)
            if parameter.dim() > 1:
                parameter.mul_(2)
    return model.train()


def batch(kind: str, model: Any) -> dict[str, Tensor]:
    """Rows of unequal length, and what else some models need."""
    draw = torch.Generator().manual_seed(1)
    rows, length = 3, 16
    real = torch.arange(length) < torch.tensor([[16], [11], [7]])
    ids = torch.randint(5, VOCAB, (rows, length), generator=draw)
    ids = ids.masked_fill(~real, PAD)
    ids[torch.arange(rows), real.sum(1) - 1] = EOS
    found = {"input_ids": ids, "attention_mask": real.long()}
    if kind == "classification":
        found["labels"] = torch.arange(rows) % LABELS
    elif kind == "tokens":
        found["labels"] = torch.randint(0, LABELS, ids.shape, generator=draw).masked_fill(~real, -100)
    elif kind == "masked":
        found["labels"] = ids.masked_fill(~real | (torch.rand(ids.shape, generator=draw) < 0.5), -100)
    elif kind == "seq2seq" and model.config.is_encoder_decoder:
        found["labels"] = ids[:, 3:15].masked_fill(~real[:, 3:15], -100)
    else:
        found["labels"] = ids.masked_fill(~real, -100)
    accepted, model_type = inspect.signature(model.forward).parameters, model.config.model_type
    if model_type == "fsmt":  # would shift the source
        found["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(found["labels"])
    if "bbox" in accepted:
        width = 8 if model_type == "bros" else 4
        found["bbox"] = torch.ones(rows, length, width, dtype=torch.float if width == 8 else torch.long)
    return found


def compare(kind: str, model_type: str, name: str) -> Row:
    """Build one model and compare."""
    try:
        model = build(kind, model_type, name)
        given = batch(kind, model)
        if len({_own_loss(model, given).item() for _ in range(3)}) > 1:  # some draw their own seeds
            tiny_models.dropout_off(model)
        theirs = _own_loss(model, given)
        theirs.backward()
        wanted = _gradient(model)
        if not torch.isfinite(theirs) or not wanted.norm() > 0 or not torch.isfinite(wanted).all():
            raise ValueError(f"its own loss is {theirs.item():.4g}, of a gradient {wanted.norm().item():.4g}")
    except Exception as error:  # whatever a model that nobody has shrunk before may say
        return Row(kind, model_type, name, "not built", _line(error))
    try:
        _seed()
        report = Criterion()(context(model, given))
        report.total.backward()
    except BadInput as error:
        return Row(kind, model_type, name, "refused", _line(error))
    except Exception as error:
        return Row(kind, model_type, name, "differs", f"seqreg fails: {_line(error)}")
    ours, found = report.total.item(), _gradient(model)
    off = (found - wanted).norm() / wanted.norm()
    if abs(ours - theirs.item()) > 1e-5 * max(1, abs(theirs.item())) or not off < 1e-4:
        reason = f"loss {ours:.6f}, the model's own {theirs.item():.6f}; gradients differ by {off:.1e}"
        return Row(kind, model_type, name, "differs", reason)
    return _beside_a_term(Row(kind, model_type, name, "equal"), tiny_models.dropout_off(model), given)


def _own_loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    _seed()
    cached = "use_cache" in inspect.signature(model.forward).parameters  # not every cache works while training
    loss: Tensor = model(**given, **({"use_cache": False} if cached else {})).loss
    return loss


def _beside_a_term(row: Row, model: Any, given: dict[str, Tensor]) -> Row:
    """The base loss without dropout, alone and beside R3F's second pass."""
    try:
        _seed()
        alone = Criterion()(context(model, given)).parts["base"].item()
        _seed()
        report = Criterion(R3F(scale=1e-2, relative=True))(context(model, given, step=0))
        report.total.backward()
    except BadInput as error:
        return Row(row.kind, row.model_type, row.model, "equal", terms=_line(error))
    except Exception as error:
        return Row(row.kind, row.model_type, row.model, "differs", f"R3F fails: {_line(error)}")
    beside = report.parts["base"].item()
    if not torch.isfinite(report.total) or abs(beside - alone) > 1e-5 * max(1, abs(alone)):
        reason = f"the base loss is {alone:.6f} alone and {beside:.6f} beside R3F, {report.total.item():.6f} in all"
        return Row(row.kind, row.model_type, row.model, "differs", reason)
    return row


def _seed() -> None:
    transformers.set_seed(3)


def _gradient(model: Any) -> Tensor:
    found = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().float() for p in model.parameters()]
    model.zero_grad()
    return torch.cat(found)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, BadInput) else f"{type(error).__name__}: {text}"[:200]


def guarded(kind: str, model_type: str, name: str, seconds: float) -> Row:
    """`compare` in a process of its own: a crash or a loop without end is a row too."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_send, args=(there, kind, model_type, name), daemon=True
    )
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            return Row(kind, model_type, name, "not built", f"no answer within {seconds:g} s")
        found: Row = here.recv()
        return found
    except EOFError:
        process.join()
        return Row(kind, model_type, name, "not built", f"the process died with code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send(pipe: Any, kind: str, model_type: str, name: str) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable()
    pipe.send(compare(kind, model_type, name))


def sweep(kinds: Iterable[str], only: Iterable[str] = (), seconds: float = 60) -> list[Row]:
    """All rows, with a progress bar on a terminal."""
    todo = list(models(kinds, only))
    shown = track(todo, "comparing", console=console, disable=not console.is_terminal)
    return [guarded(*one, seconds) for one in shown]


def totals(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """How many rows of every verdict, by kind."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        counted = found.setdefault(row.kind, dict.fromkeys(COLOURS, 0))
        counted[row.verdict] += 1
    return found


def show(rows: list[Row]) -> None:
    table = Table("kind", "model type", "class", "verdict", "reason")
    for row in rows:
        reason = row.reason or (f"perturbing terms: {row.terms}" if row.terms else "")
        table.add_row(row.kind, row.model_type, row.model, f"[{COLOURS[row.verdict]}]{row.verdict}[/]", reason)
    summary = Table("kind", *COLOURS, "models")
    counted = totals(rows)
    for kind, numbers in counted.items():
        summary.add_row(kind, *map(str, numbers.values()), str(sum(numbers.values())))
    every = collections.Counter(row.verdict for row in rows)
    summary.add_row("all", *(str(every[verdict]) for verdict in COLOURS), str(len(rows)))
    out = Console()  # the table is the result
    out.print(table)
    out.print(summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="may be given more than once")
    parser.add_argument("--only", action="append", default=[], metavar="MODEL_TYPE", help="may be given more than once")
    parser.add_argument("--seconds", type=float, default=60, help="limit of time for one model")
    parser.add_argument("--json", action="store_true", help="print rows and totals as JSON")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = sweep(chosen.kind or KINDS, chosen.only, chosen.seconds)
    if not rows:
        parser.error(f"--only {' '.join(chosen.only)}: no such model type among these kinds")
    if chosen.json:
        print(json.dumps({"totals": totals(rows), "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        show(rows)
    sys.exit(any(row.verdict == "differs" for row in rows))


if __name__ == "__main__":
    main()
