"""The steps that `seqreg bench` measures: models, batches, and one training step with every term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import BartConfig, BartForConditionalGeneration
from transformers.trainer_pt_utils import LabelSmoother

from seqreg.build import build_term, term_class, term_names
from seqreg.criterion import Criterion
from seqreg.errors import BadInput, nearest
from seqreg.integrations.hf import context

StepFunction = Callable[[], None]
SMOOTHING = 0.1
HEAVY = 10
"""A term with more extra backwards than this is run once, and not at all on the largest model."""


@dataclass(frozen=True)
class Size:
    """A BART of random weights, and a batch for it."""

    width: int
    layers: int
    heads: int
    classes: int
    source: int
    target: int
    rows: int
    together: int
    """Processes that fit into 16 GB side by side."""

    def model(self) -> BartForConditionalGeneration:
        config = BartConfig(
            vocab_size=self.classes, d_model=self.width, max_position_embeddings=max(self.source, self.target),
            encoder_layers=self.layers, encoder_attention_heads=self.heads, encoder_ffn_dim=4 * self.width,
            decoder_layers=self.layers, decoder_attention_heads=self.heads, decoder_ffn_dim=4 * self.width,
            dropout=0.1, attention_dropout=0.0, activation_dropout=0.0,
        )  # fmt: skip
        torch.manual_seed(0)
        return BartForConditionalGeneration(config).train()

    def batch(self, padding: float = 0.0) -> dict[str, torch.Tensor]:
        """Random tokens.

        Args:
            padding: the share of the targets that is padding
        """
        drawn = torch.Generator().manual_seed(1)
        source = torch.randint(4, self.classes, (self.rows, self.source), generator=drawn)
        labels = torch.randint(4, self.classes, (self.rows, self.target), generator=drawn)
        labels[:, self.target - round(padding * self.target) :] = -100
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": labels}


SIZES = {
    "tiny": Size(width=128, layers=3, heads=4, classes=2000, source=64, target=24, rows=4, together=8),
    "small": Size(width=256, layers=3, heads=4, classes=50265, source=128, target=48, rows=8, together=7),
    "long": Size(width=256, layers=6, heads=4, classes=50265, source=1024, target=64, rows=2, together=5),
    "bart-base": Size(width=768, layers=6, heads=12, classes=50265, source=256, target=64, rows=4, together=4),
}

HF, PLAIN = "plain transformers", "plain seqreg"
LINEAR, TWO_PASSES = "torch's linear_cross_entropy, no smoothing", "rdrop by hand: two passes, kl_div"
CHEAPER: dict[str, dict[str, dict[str, Any]]] = {
    "anchor": {"anchor divergence=l2": {"divergence": "l2"}},
    "r3f": {
        "r3f grad=clean": {"grad": "clean"},
        "r3f example_fraction=0.5": {"example_fraction": 0.5},
        "r3f token_fraction=0.5": {"token_fraction": 0.5},
        "r3f where=decoder, dropout=shared": {"where": "decoder", "dropout": "shared", "scale": 1e-3},
    },
    "jachess": {"jachess hessian=0.1": {"hessian": 0.1}},
    "smart": {"smart steps=2": {"steps": 2}, "smart where=decoder": {"where": "decoder"}},
}
"""Settings of terms that are measured besides the defaults."""


def transformers_step(model: Any, batch: dict[str, torch.Tensor]) -> StepFunction:
    """The label-smoothed step that transformers' own Trainer makes."""
    smoother = LabelSmoother(SMOOTHING)

    def step() -> None:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        loss: torch.Tensor = smoother(model(**inputs, use_cache=False), batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def linear_cross_entropy_step(model: Any, batch: dict[str, torch.Tensor]) -> StepFunction:
    """torch's own loss in chunks of tokens, of torch 2.13 and later, which does so without label smoothing alone."""
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    def step() -> None:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        states = model.model(**inputs, use_cache=False).last_hidden_state
        loss: torch.Tensor = functional.linear_cross_entropy(
            states.flatten(0, 1), model.lm_head.weight, batch["labels"].flatten(), ignore_index=-100,
            options=LinearCrossEntropyOptions(),
        )  # fmt: skip
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def two_pass_step(model: Any, batch: dict[str, torch.Tensor], weight: float = 1.0) -> StepFunction:
    """R-Drop as it is usually written by hand: two forwards, their logits, both losses, kl_div both ways."""
    smoother = LabelSmoother(SMOOTHING)

    def step() -> None:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        outputs = [model(**inputs, use_cache=False) for _ in range(2)]
        task = sum(smoother(output, batch["labels"]) for output in outputs) / 2
        p, q = (functional.log_softmax(output.logits, -1) for output in outputs)
        there = functional.kl_div(p, q, reduction="none", log_target=True)
        back = functional.kl_div(q, p, reduction="none", log_target=True)
        padding = batch["labels"].eq(-100).unsqueeze(-1)
        apart = (there + back).masked_fill(padding, 0.0).sum() / 2 / (~padding).sum()
        (task + weight * apart).backward()

    return step


BY_HAND = {HF: transformers_step, LINEAR: linear_cross_entropy_step, TWO_PASSES: two_pass_step}
"""Steps without seqreg."""


def criterion_step(criterion: Criterion, model: nn.Module, batch: dict[str, torch.Tensor]) -> StepFunction:
    def step() -> None:
        criterion(context(model, batch, step=0)).total.backward()  # type: ignore[no-untyped-call]

    return step


@dataclass(frozen=True)
class Variant:
    """A step by name; without a term it is the plain one of seqreg, or of transformers."""

    name: str
    term: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    fused: bool = True

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> StepFunction:
        if self.name in BY_HAND:
            return BY_HAND[self.name](model, batch)
        terms = () if self.term is None else (build_term(self.term, self.settings),)
        return criterion_step(Criterion(*terms, label_smoothing=SMOOTHING, fused=self.fused), model, batch)

    @property
    def heavy(self) -> bool:
        return self.term is not None and build_term(self.term, self.settings).cost.backwards > HEAVY


def variants(terms: Sequence[str] | None = None, presets: bool = True) -> list[Variant]:
    """Every step that is measured.

    Args:
        terms: only these; all by default
        presets: also what released code computes
    """
    variants = [Variant(HF), Variant(PLAIN)]
    for term in dict.fromkeys(term_names() if terms is None else terms):
        if term not in term_names():
            raise BadInput(f"unknown term {term!r}; {nearest(term, term_names())}")
        variants.append(Variant(term, term))
        variants += [Variant(name, term, settings) for name, settings in CHEAPER.get(term, {}).items()]
        for preset in term_class(term).presets if presets else ():
            variants.append(Variant(f"{term} preset={preset}", term, {"preset": preset}))
            if term not in ("neftune", "jachess"):  # nothing of these is fused
                variants.append(Variant(f"{term} preset={preset}, from logits", term, {"preset": preset}, fused=False))
        if term == "rdrop":
            variants.append(Variant(TWO_PASSES))
    return variants + ([Variant(LINEAR)] if hasattr(functional, "linear_cross_entropy") else [])
