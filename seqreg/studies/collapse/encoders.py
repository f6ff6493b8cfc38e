"""Frozen encoders: their states of texts, and how rich these are."""

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


def pretrained_model(folder: Path) -> str | None:
    """The pretrained model that a run, or a chain of runs, started from; None if it started from scratch."""
    seen: list[Path] = []
    while (folder / "config.yaml").is_file() and folder not in seen:
        seen.append(folder)
        name = run_config.load(folder, build_terms=False).config.model.name
        if name is None:
            return None
        folder = Path(name)
    return str(folder)


@dataclass(frozen=True)
class Encoder:
    """The encoder of a run or of a pretrained model, without a task: in evaluation mode and without gradients."""

    name: str
    module: Any
    tokenizer: Any

    @classmethod
    def load(cls, name: str, *, trust: bool = False) -> Encoder:
        """Load it from a run's folder or by the name of a model; missing weights are refused, never initialized."""
        settings = models.fetched(transformers.AutoConfig, name, "model", trust)
        model = models.loaded(transformers.AutoModel, name, trust, settings, new_head=True)
        tokenizer = models.stored_tokenizer(name, trust)
        if tokenizer.pad_token_id is None:  # of a causal model; padding is masked
            tokenizer.pad_token = tokenizer.eos_token
        module = model.get_encoder() if model.config.is_encoder_decoder else model
        module.requires_grad_(False).eval().to("cuda" if torch.cuda.is_available() else "cpu")
        return cls(name, module, tokenizer)

    def check_length(self, task: str, data: Data) -> None:
        """Refuse texts that are longer than the model has positions for, before they become an index error."""
        most = models.positions(self.module)
        if most is not None and data.max_source_length > most:
            raise BadInput(
                f"{task}: data.max_source_length={data.max_source_length}: {self.name} has only {most} positions; "
                "set it in the file of tasks"
            )

    @torch.no_grad()
    def _states(self, examples: Sequence[Example], data: Data, every: bool) -> tuple[tuple[Tensor, ...], Tensor]:
        """Outputs of every layer, or of the last, for one batch: [B, S, D] each; and its mask [B, S]."""
        prefix, most = data.source_prefix, data.max_source_length
        encoded = [dict(encode(self.tokenizer, example, prefix, most)) for example in examples]
        batch = self.tokenizer.pad(encoded, return_tensors="pt").to(self.module.device)
        output = self.module(**batch, output_hidden_states=every)
        states = output.hidden_states[1:] if every else (output.last_hidden_state,)
        return tuple(layer.float() for layer in states), batch["attention_mask"].bool()

    def features(
        self, examples: Sequence[Example], data: Data, pooling: Pooling = "mean", title: str = "encoding"
    ) -> NDArray[np.float64]:
        """Pooled last hidden states [examples, D], dropout off; texts of like length share a batch."""
        if pooling == "first" and models.is_decoder(self.module.config.model_type):
            raise BadInput(f"--pooling first: {self.name} is causal, and its first token sees no other: choose mean")
        order = sorted(range(len(examples)), key=lambda index: -len(examples[index].source))
        vectors: list[Any] = [None] * len(order)
        starts = range(0, len(order), BATCH)
        for start in track(starts, title, console=console, transient=True, disable=not console.is_terminal):
            chosen = order[start : start + BATCH]
            (last,), mask = self._states([examples[index] for index in chosen], data, False)
            for index, vector in zip(chosen, pooled(last, mask, pooling).double().cpu().numpy(), strict=True):
                vectors[index] = vector
        return np.stack(vectors)

    def token_states(self, examples: Sequence[Example], data: Data, most: int) -> list[Tensor]:
        """The states of real tokens in every layer, [tokens, D]; a fixed sample of at most `most`."""
        batches = []
        for start in range(0, len(examples), BATCH):
            states, mask = self._states(examples[start : start + BATCH], data, True)
            batches.append([tokens(layer, mask).cpu() for layer in states])
        layers = [torch.cat(layer) for layer in zip(*batches, strict=True)]
        chosen = torch.randperm(len(layers[0]), generator=torch.Generator().manual_seed(0))[:most]
        return [layer[chosen] for layer in layers]


def pooled(states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """One vector per text, [B, D]: the mean over its real tokens, or its first real token."""
    if pooling == "first":
        return states[torch.arange(len(states)), mask.to(torch.int).argmax(-1)]
    weights = mask.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(1) / weights.sum(1).clamp_min(1)


@dataclass(frozen=True)
class Layer:
    """One layer of an encoder: its effective rank, and its CKA to the same layer of the pretrained model."""

    rank: float
    cka: float | None


def layers(states: Sequence[Tensor], pretrained: Sequence[Tensor] | None) -> list[Layer]:
    """Every layer, from the first to the last, beside the same tokens in the pretrained model."""
    if pretrained is not None and [len(layer) for layer in states] != [len(layer) for layer in pretrained]:
        raise BadInput("the model and the pretrained one have other tokens or layers: they cannot be compared by CKA")
    return [
        Layer(effective_rank(layer), None if pretrained is None else linear_cka(pretrained[index], layer))
        for index, layer in enumerate(states)
    ]
