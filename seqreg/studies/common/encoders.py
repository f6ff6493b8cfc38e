"""Frozen encoders: what they make of texts, and how rich that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor

from seqreg.errors import BadInput
from seqreg.smoothness import effective_rank, linear_cka, tokens
from seqreg.workbench.config import run_config
from seqreg.workbench.config.settings import Data
from seqreg.workbench.data import models
from seqreg.workbench.data.encoding import encode
from seqreg.workbench.data.examples import Example
from seqreg.workbench.text.terminal import console

Pooling = Literal["mean", "first"]

BATCH = 32
MOST_TOKENS = 2000
"""That two layers are compared on: the kernels are square."""


@dataclass(frozen=True)
class Encoder:
    """The encoder of a model, in evaluation mode and without gradients, and the tokenizer that belongs to it."""

    name: str
    module: Any
    tokenizer: Any


def origin(folder: Path) -> str | None:
    """The pretrained model at the beginning of a run, or of a chain of runs; None if one began from scratch."""
    seen: list[Path] = []
    while (folder / "config.yaml").is_file() and folder not in seen:
        seen.append(folder)
        name = run_config.load(folder, build_terms=False).config.model.name
        if name is None:
            return None
        folder = Path(name)
    return str(folder)


def load(name: str, *, tokenizer: str | None = None, trust: bool = False) -> Encoder:
    """The encoder of a run's folder or of a pretrained model; weights that are missing are refused, never drawn."""
    settings = models.fetched(transformers.AutoConfig, name, "model", trust)
    found = models.loaded(transformers.AutoModel, name, trust, settings, new_head=True)
    words = models.stored_tokenizer(tokenizer or name, trust)
    module = found.get_encoder() if found.config.is_encoder_decoder else found
    module.requires_grad_(False).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    return Encoder(name, module, words)


def check_room(encoder: Encoder, task: str, data: Data) -> None:
    """Refuse texts that are longer than a model has places for, before they become an index error."""
    room = models.positions(encoder.module)
    if room is not None and data.max_source_length > room:
        raise BadInput(
            f"{task}: data.max_source_length={data.max_source_length}: "
            f"{encoder.name} has only {room} positions; set it in the file "
            "of tasks"
        )


@torch.no_grad()
def _states(encoder: Encoder, examples: Sequence[Example], data: Data, every: bool) -> tuple[tuple[Tensor, ...], Any]:
    """Outputs of every layer, or of the last, for one batch: [B, S, D] each, and the batch."""
    coded = [dict(encode(encoder.tokenizer, one, data.source_prefix, data.max_source_length)) for one in examples]
    batch = encoder.tokenizer.pad(coded, return_tensors="pt").to(encoder.module.device)
    output = encoder.module(**batch, output_hidden_states=every)
    return (output.hidden_states[1:] if every else (output.last_hidden_state,)), batch


def pooled(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """One vector a text, [B, D]: the mean over its real tokens, or its first real token."""
    if pooling == "first":
        return states[torch.arange(len(states)), mask.to(torch.int).argmax(-1)]
    weights = mask.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)


def features(
    encoder: Encoder, examples: Sequence[Example], data: Data, pooling: Pooling = "mean", batch_size: int = BATCH,
    title: str = "encoding",
) -> NDArray[np.float64]:  # fmt: skip
    """Pooled last hidden states [rows, D], dropout off; texts of like length share a batch."""
    order = sorted(range(len(examples)), key=lambda index: -len(examples[index].source))
    found: list[Any] = [None] * len(order)
    starts = range(0, len(order), batch_size)
    for start in track(starts, title, console=console, transient=True, disable=not console.is_terminal):
        chosen = order[start : start + batch_size]
        (last,), batch = _states(encoder, [examples[index] for index in chosen], data, False)
        vectors = pooled(last.float(), batch["attention_mask"].bool(), pooling).double().cpu().numpy()
        for index, vector in zip(chosen, vectors, strict=True):
            found[index] = vector
    return np.stack(found)


@dataclass(frozen=True)
class Layer:
    """One layer of an encoder: its effective rank, and its CKA to the same layer of the pretrained model."""

    rank: float
    cka: float | None


def token_states(encoder: Encoder, examples: Sequence[Example], data: Data, most: int) -> list[Tensor]:
    """The states of the real tokens of some texts in every layer, [tokens, D]; a fixed sample of at most `most`."""
    layers: list[list[Tensor]] = []
    for start in range(0, len(examples), BATCH):
        states, batch = _states(encoder, examples[start : start + BATCH], data, True)
        layers = layers or [[] for _ in states]
        for kept, values in zip(layers, states, strict=True):
            kept.append(tokens(values.float(), batch["attention_mask"].bool()).cpu())
    whole = [torch.cat(kept) for kept in layers]
    chosen = torch.randperm(len(whole[0]), generator=torch.Generator().manual_seed(0))[:most]
    return [values[chosen] for values in whole]


def geometry(own: Sequence[Tensor], pretrained: Sequence[Tensor] | None) -> list[Layer]:
    """Every layer, from the first to the last, beside the same tokens in the pretrained model."""
    if pretrained is not None and [len(x) for x in own] != [len(x) for x in pretrained]:
        raise BadInput("the model and the pretrained one have other tokens or layers: they cannot be compared by CKA")
    return [
        Layer(effective_rank(values), None if pretrained is None else linear_cka(pretrained[index], values))
        for index, values in enumerate(own)
    ]
