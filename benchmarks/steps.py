"""The steps that are measured: one training step with every term, and those that others make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

from benchmarks.sizes import Kind
from seqreg.build import build_term, term_class, term_names
from seqreg.criterion import Criterion
from seqreg.errors import BadInput, nearest
from seqreg.integrations.hf import context
from seqreg.losses import LossName
from seqreg.settings import held
from seqreg.term import Term

StepFunction = Callable[[], None]
SMOOTHING = 0.1
HEAVY = 10
"""A term with more extra backwards than this is run once, and not at all on the largest model."""


COMPILED = ", compiled"
"""What the name of a step ends with whose model is compiled."""
HF, PLAIN, DFT = "plain transformers", "plain seqreg", "plain seqreg loss=dft"
UNPREPARED = "plain transformers, as torch comes"
LINEAR, TWO_PASSES = "torch's linear_cross_entropy, no smoothing", "rdrop by hand: two passes, kl_div"
CHEAPER: dict[str, dict[str, dict[str, Any]]] = {
    "anchor": {"anchor divergence=l2": {"divergence": "l2"}},
    "r3f": {
        "r3f grad=clean": {"grad": "clean"},
        "r3f example_fraction=0.5": {"example_fraction": 0.5},
        "r3f token_fraction=0.5": {"token_fraction": 0.5},
        "r3f where=decoder, dropout=shared": {"where": "decoder", "dropout": "shared", "scale": 1e-3},
        "r3f where=decoder, layer=0": {"where": "decoder", "layer": 0, "scale": 1e-3},
    },
    "jachess": {"jachess hessian=0.1": {"hessian": 0.1}},
    "rdrop": {"rdrop where=decoder, layer=0": {"where": "decoder", "layer": 0}},
    "smart": {"smart steps=2": {"attack": {"steps": 2}}, "smart where=decoder": {"attack": {"where": "decoder"}}},
}
"""Settings of terms that are measured besides the defaults."""


Batch = dict[str, torch.Tensor]


def _inputs(model: Any, batch: Batch) -> dict[str, Any]:
    """What the model takes, without labels, so that it computes no loss of its own."""
    inputs: dict[str, Any] = {key: value for key, value in batch.items() if key != "labels"}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    return inputs if _is_classifier(batch) else {**inputs, "use_cache": False}


def _is_classifier(batch: Batch) -> bool:
    return batch["labels"].dim() == 1


def _is_causal(model: Any, batch: Batch) -> bool:
    return not model.config.is_encoder_decoder and not _is_classifier(batch)


def states_and_labels(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head of a language model is given in one pass, and the labels, aligned: [N, D] and [N]."""
    states, labels = model.model(**_inputs(model, batch)).last_hidden_state, batch["labels"]
    if _is_causal(model, batch):
        states, labels = states[:, :-1], labels[:, 1:]
    return states.flatten(0, 1), labels.flatten()


def transformers_step(model: Any, batch: Batch) -> StepFunction:
    """The label-smoothed step that transformers' own Trainer makes."""
    smoother = LabelSmoother(SMOOTHING)

    def step() -> None:
        output = model(**_inputs(model, batch))
        loss: torch.Tensor = smoother(output, batch["labels"], shift_labels=_is_causal(model, batch))
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def linear_cross_entropy_step(model: Any, batch: Batch) -> StepFunction:
    """torch's own loss in chunks of tokens, of torch 2.13 and later, which does so without label smoothing alone."""
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    def step() -> None:
        states, labels = states_and_labels(model, batch)
        loss: torch.Tensor = functional.linear_cross_entropy(
            states, model.lm_head.weight, labels, ignore_index=-100, options=LinearCrossEntropyOptions()
        )
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def two_pass_step(model: Any, batch: Batch, weight: float = 1.0) -> StepFunction:
    """R-Drop as it is usually written by hand: two forwards, their logits, both losses, kl_div both ways."""
    smoother, causal = LabelSmoother(SMOOTHING), _is_causal(model, batch)

    def step() -> None:
        outputs = [model(**_inputs(model, batch)) for _ in range(2)]
        task = sum(smoother(output, batch["labels"], shift_labels=causal) for output in outputs) / 2
        labels = batch["labels"][:, 1:] if causal else batch["labels"]
        p, q = (functional.log_softmax(output.logits[:, :-1] if causal else output.logits, -1) for output in outputs)
        there = functional.kl_div(p, q, reduction="none", log_target=True)
        back = functional.kl_div(q, p, reduction="none", log_target=True)
        padding = labels.eq(-100).unsqueeze(-1)
        apart = (there + back).masked_fill(padding, 0.0).sum() / 2 / (~padding).sum()
        (task + weight * apart).backward()

    return step


BY_HAND = {
    HF: transformers_step,
    UNPREPARED: transformers_step,
    LINEAR: linear_cross_entropy_step,
    TWO_PASSES: two_pass_step,
}
"""Steps without seqreg."""


def criterion_step(criterion: Criterion, model: nn.Module, batch: Batch) -> StepFunction:
    def step() -> None:
        criterion(context(model, batch, step=0)).total.backward()  # type: ignore[no-untyped-call]

    return step


@dataclass(frozen=True)
class Variant:
    """A step by name; without a term it is the plain one of seqreg, or of transformers.

    Args:
        compiled: the model is compiled before
        prepared: products and memory are settled as every command does, if there is something to settle
    """

    name: str
    term: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    fused: bool = True
    loss: LossName = "nll"
    compiled: bool = False
    prepared: bool = True

    def step(self, model: nn.Module, batch: Batch) -> StepFunction:
        by_hand = BY_HAND.get(self.name.removesuffix(COMPILED))
        if by_hand is not None:
            return by_hand(model, batch)
        terms = () if self.term is None else (build_term(self.term, self.settings),)
        smoothing = SMOOTHING if self.loss == "nll" else 0.0  # DFT has none
        criterion = Criterion(*terms, label_smoothing=smoothing, loss=self.loss, fused=self.fused)
        return criterion_step(criterion, model, batch)

    @property
    def heavy(self) -> bool:
        return self.term is not None and build_term(self.term, self.settings).cost.backwards > HEAVY


def variants(
    terms: Sequence[str] | None = None, presets: bool = True, kind: Kind = "seq2seq", compiled: bool = False
) -> list[Variant]:
    """Every step that is measured.

    Args:
        terms: only these; all by default
        presets: also what released code computes
        kind: of the model: only a seq2seq model has a decoder beside its input, and nothing of a classifier is fused
        compiled: also the plain steps, and those of terms by their defaults, with a compiled model
    """
    variants = [Variant(HF), Variant(UNPREPARED, prepared=False), Variant(PLAIN)]
    for term in dict.fromkeys(term_names() if terms is None else terms):
        if term not in term_names():
            raise BadInput(f"unknown term {term!r}; {nearest(term, term_names())}")
        variants.append(Variant(term, term))
        cheaper = CHEAPER.get(term, {}).items()
        for name, it in cheaper:
            if kind == "seq2seq" or "where" not in {**it, **it.get("attack", {})}:
                variants.append(Variant(name, term, it))
        for preset in _presets(term, kind) if presets else ():
            variants.append(Variant(f"{term} preset={preset}", term, {"preset": preset}))
            if term not in ("neftune", "jachess") and kind != "classifier":  # nothing of these is fused
                variants.append(Variant(f"{term} preset={preset}, from logits", term, {"preset": preset}, fused=False))
        if term == "anchor" and kind != "classifier":
            variants.append(Variant(DFT, loss="dft"))  # which the ASFT presets have beside it
        if term == "rdrop":
            variants.append(Variant(TWO_PASSES))
    if compiled:
        light = [each for each in variants if each.name in (HF, PLAIN, each.term) and not each.heavy]
        variants += [replace(each, name=f"{each.name}{COMPILED}", compiled=True) for each in light]
    torchs = hasattr(functional, "linear_cross_entropy") and kind != "classifier"
    return variants + ([Variant(LINEAR)] if torchs else [])


def _presets(term: str, kind: Kind) -> list[str]:
    """Those that the model can have, on labelled examples: a Llama has no LayerNorm on its embeddings."""
    made = {name: build_term(term, {"preset": name}) for name in term_class(term).presets}
    return [
        name for name, one in made.items() if one.on == "labelled" and (kind != "causal" or not _after_layernorm(one))
    ]


def _after_layernorm(term: Term) -> bool:
    return any(getattr(one, "inject", "") in ("normalised", "layernorm") for one in held(term))
