"""Changes of a source, for `seqreg robustness`: of its text, its embeddings, or all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from seqreg.ascent import Ascent
from seqreg.context import Evaluation
from seqreg.integrations.hf import context
from seqreg.metrics import text_noise as corruption
from seqreg.noise import norm, rms
from seqreg.objective import BaseLoss
from seqreg.studies.common.trained_model import Batch, Delta, TrainedModel
from seqreg.workbench.data.examples import Example

STEPS = 5
"""Steps of the ascent."""

Change = Callable[[TrainedModel, Sequence[Example], Batch], Delta]
"""What to add to the embeddings of some examples, whose batch this is."""


def text_noise(examples: Sequence[Example], kind: str, rate: float, seed: int) -> list[Example]:
    """Noise in the source, and in the second text where there is one."""
    noise = corruption.KINDS[kind]
    return _texts(examples, lambda text: noise(text, rate, seed))


def word_order(examples: Sequence[Example], seed: int) -> list[Example]:
    """Sources whose words are shuffled."""
    return _texts(examples, lambda text: corruption.shuffled(text, seed))


def other_source(examples: Sequence[Example], seed: int) -> list[Example]:
    """Everyone has the source of another, and the reference of their own."""
    step = 1 + seed % max(len(examples) - 1, 1)
    others = [*examples[step:], *examples[:step]]
    pairs = zip(examples, others, strict=True)
    return [replace(example, source=other.source, second=other.second) for example, other in pairs]


def _texts(examples: Sequence[Example], change: Callable[[str], str]) -> list[Example]:
    return [
        replace(e, source=change(e.source), second=None if e.second is None else change(e.second)) for e in examples
    ]


def embedding_noise(scale: float, seed: int) -> Change:
    """Normal noise of `scale` times the RMS of an example's embeddings; it depends on the example, not on its batch."""

    def change(_: TrainedModel, examples: Sequence[Example], batch: Batch) -> Delta:
        def noise(embeds: Tensor) -> Tensor:
            delta = torch.zeros_like(embeds)
            for row, (example, mask) in enumerate(zip(examples, batch["attention_mask"].bool(), strict=True)):
                rng = torch.Generator().manual_seed(_number("embeddings", seed, example))
                drawn = torch.randn(int(mask.sum()), embeds.shape[-1], generator=rng).to(embeds.device)
                delta[row, mask] = (drawn * scale * rms(embeds[row, mask])).to(embeds.dtype)
            return delta

        return noise

    return change


def attack(radius: float, seed: int, *, ascent: bool, steps: int = STEPS) -> Change:
    """The end of an ascent on the loss of the reference; or only the direction of its random start, of the same norm.

    Args:
        radius: of the sphere, as a share of the l2 norm that all embeddings of an example have at the RMS of its batch
        steps: of the ascent, each half of the radius
    """
    attacker = Ascent(
        noise="uniform",
        scale=radius / 10,
        steps=steps,
        step_size=radius / 2,
        radius=radius,
        norm="l2",
        over="sentence",
        projection="rescale",
        dropout="off",
    )

    def change(model: TrainedModel, examples: Sequence[Example], batch: Batch) -> Delta:
        ctx = Evaluation(context(model.model, batch))
        (site,) = ctx.sites(attacker.where)
        with torch.random.fork_rng():
            torch.manual_seed(_number("attack", seed, examples[0]))
            clean = ctx.forward(dropout="off", grad=False)
            if not ascent:
                deltas, bounds = attacker.init_delta(ctx, clean)
                return deltas[site] / norm(deltas[site], "l2", "sentence").clamp_min(1e-30) * bounds[site].radius
            return attacker.ascend(ctx, clean, lambda view: BaseLoss(view).sum(ctx, ctx.mask)).final[site]

    return change


def _number(kind: str, seed: int, example: Example) -> int:
    """A seed for every example."""
    text = f"{kind} {seed} {example.source}\0{example.second or ''}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
