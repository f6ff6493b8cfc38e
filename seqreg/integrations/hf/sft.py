"""TRL's SFTTrainer: its loss is replaced by a criterion's, and its metrics are kept."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from seqreg.context import Context
from seqreg.criterion import LossReport
from seqreg.errors import Advice, BadInput
from seqreg.forward import Pass
from seqreg.integrations.hf import model as hf
from seqreg.integrations.hf.private_names import READ_IN, SFT_ATTRIBUTES

CHUNK = 1024
"""Positions whose logits are held at a time."""


def is_sft(cls: Any) -> bool:
    """Whether a class is TRL's `SFTTrainer` itself."""
    return bool(cls.__name__ == "SFTTrainer" and cls.__module__.startswith("trl."))


def replace_sft_loss(trainer: Any) -> bool:
    """Say what becomes of the loss of an SFTTrainer, in one line, or refuse it; tells whether the trainer is one."""
    if not any(is_sft(cls) for cls in type(trainer).__mro__):
        return False
    kind = getattr(trainer.args, "loss_type", "nll")
    own = getattr(trainer.criterion, "loss", "nll")
    if kind.removeprefix("chunked_") not in ("nll", own):
        raise BadInput(f"loss_type={kind!r}: the criterion would replace it by its own loss, {own!r}: set 'nll'")
    missing = [name for name in SFT_ATTRIBUTES if not hasattr(trainer, name)]
    if missing:
        raise BadInput(f"this SFTTrainer has no {missing[0]}: its version of trl is not known; {READ_IN['trl']} is")
    if trainer.aux_loss_enabled:  # by a coefficient that is not yet the model's own
        hf.set_aux_loss_coefficient(hf.unwrap(trainer.model), trainer.router_aux_loss_coef)
    if trainer.args.process_index == 0:
        warnings.warn(
            f"SFTTrainer: its loss (loss_type={kind!r}, in chunks of tokens) is replaced by the criterion's, which is "
            "computed in chunks too; its metrics are kept",
            Advice,
            stacklevel=4,
        )
    return True


def record_sft_metrics(trainer: Any, report: LossReport, ctx: Context, inputs: Mapping[str, Any]) -> None:
    """Entropy, token accuracy and the number of tokens, where SFTTrainer's own `log` looks for them."""
    training, view = trainer.model.training, report.clean
    if view is None:
        return
    metrics, gather = trainer._metrics["train" if training else "eval"], trainer.accelerator.gather_for_metrics
    labels, entropy, correct = (gather(number).sum() for number in _sums(view, ctx))
    metrics["entropy"].append(float(entropy / labels) if labels > 0 else 0.0)
    metrics["mean_token_accuracy"].append(float(correct / labels) if labels > 0 else 0.0)
    if training:
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].new_tensor(inputs["input_ids"].numel()) if mask is None else mask.sum()
        trainer._total_train_tokens += int(gather(tokens).sum()) // trainer._tp_size
    metrics["num_tokens"] = [trainer._total_train_tokens]
    if view.aux_loss is not None:
        balance = view.aux_loss.detach() / trainer.router_aux_loss_coef
        metrics["aux_loss"].append(float(gather(balance).mean()))


@torch.no_grad()
def _sums(view: Pass, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
    """Over the positions with a label: how many, the sum of their entropies, and how many labels come out on top."""
    entropy, correct = (torch.zeros((), device=ctx.mask.device) for _ in range(2))
    for logits, labels in _chunks(view, ctx):
        logp = logits.float().log_softmax(-1)
        entropy -= (logp.exp() * logp).sum()
        correct += (logits.argmax(-1) == labels).sum()
    return ctx.mask.sum(), entropy, correct


def _chunks(view: Pass, ctx: Context) -> Iterator[tuple[Tensor, Tensor]]:
    """The logits and labels of positions with a label, a few at a time."""
    labels = ctx.labels.flatten()
    for positions in torch.split(ctx.mask.flatten().nonzero().squeeze(1), CHUNK):
        if view.deferred is None:
            yield view.logits.detach().flatten(0, -2)[positions], labels[positions]
        else:
            yield view.deferred.logits_at(positions)[0], labels[positions]
