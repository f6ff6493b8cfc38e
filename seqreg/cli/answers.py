"""What a trained model says to one source: its output with a probability for every token, without and with noise."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqreg.integrations.embedding_hook import EmbeddingTap
from seqreg.integrations.hf import model as hf
from seqreg.noise import rms
from seqreg.studies.common.trained_model import Batch, Delta, TrainedModel
from seqreg.workbench.data.examples import Example
from seqreg.workbench.scores.evaluate import class_prediction

Token = dict[str, Any]
"""Its text, its probability in percent, and whether noise has changed it: `lost` without noise, `changed` with it."""
NO_NOISE = "noise is not shown: a causal model embeds its source and its own text alike"


@torch.no_grad()
def answer(model: TrainedModel, example: Example, scale: float, seed: int) -> dict[str, Any]:
    """The output of a model without noise, and with normal noise of `scale` times the RMS of the embeddings.

    Probabilities are those of the model itself for the tokens that were generated, each after those before it; rules of
    generation, such as a least length, are not in them.
    """
    batch: Batch = dict(model.collate([model.encoded([example])[0]]).to(model.model.device))
    notes, most = [], model.run.config.data.max_source_length
    if batch["input_ids"].shape[1] >= most:
        notes.append(f"the source fills all {most} tokens that the model reads: what is beyond is cut")
    kind, say = ("text", _text) if model.generates else ("classes" if model.card.labels else "number", _classes)
    if scale and model.generates and model.causal:
        notes.append(NO_NOISE)
        scale = 0.0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        answers = {"clean": say(model, batch, None)}
        if scale:
            torch.manual_seed(seed)  # where the run samples, noise alone is the difference
            answers["noisy"] = say(model, batch, _noise(scale, seed))
    if kind == "text" and scale:
        _mark_changes(answers["clean"]["tokens"], answers["noisy"]["tokens"])
    for tokens in (some.get("tokens", []) for some in answers.values()):
        for token in tokens:
            del token["id"]
    return {"kind": kind, "notes": notes, **answers}


def _noise(scale: float, seed: int) -> Delta:
    def noise(embeds: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        drawn = torch.randn(embeds.shape[-2:], generator=rng).to(embeds.device)
        return (drawn * scale * rms(embeds[:1])).to(embeds.dtype).expand_as(embeds)  # beams are of one source

    return noise


def _text(model: TrainedModel, batch: Batch, delta: Delta | None) -> dict[str, Any]:
    ids = model.generate(batch, delta)[:1]
    shares: list[float] = []
    labels: list[int] = []
    for chunk in model.predictions(model.with_generated(batch, ids), delta):
        logits = torch.from_numpy(chunk.logits()).double()
        places = torch.from_numpy(np.asarray(chunk.labels))
        shares += logits.softmax(-1).gather(-1, places[:, None])[:, 0].tolist()
        labels += places.tolist()
    return {"text": model.texts(ids)[0], "tokens": _tokens(model, labels, shares)}


def _tokens(model: TrainedModel, ids: Sequence[int], shares: Sequence[float]) -> list[Token]:
    """Tokens as the text that each of them adds; special ones are left out, but for the end."""
    special, tokens, before = set(model.tokenizer.all_special_ids), list[Token](), ""
    for place, (token, share) in enumerate(zip(ids, shares, strict=True)):
        after = model.tokenizer.decode(ids[: place + 1], skip_special_tokens=True)
        text = after[len(before) :] if after.startswith(before) else model.tokenizer.decode([token])
        before = after
        if token == model.end:
            tokens.append({"id": token, "text": "", "end": True, "percent": round(100 * share, 1)})
        elif token not in special:
            tokens.append({"id": token, "text": text, "percent": round(100 * share, 1)})
    return tokens


def _mark_changes(clean: Sequence[Token], noisy: Sequence[Token]) -> None:
    """Mark the tokens that the noise has changed: lost ones in the clean output, new ones in the other."""
    before, after = ([token["id"] for token in tokens] for tokens in (clean, noisy))
    for kind, start, end, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        for token in noisy[first:last]:
            token["changed"] = kind != "equal"
        for token in clean[start:end]:
            token["lost"] = kind != "equal"


def _classes(model: TrainedModel, batch: Batch, delta: Delta | None) -> dict[str, Any]:
    tap: Any = contextlib.nullcontext()
    if delta is not None:
        tap = EmbeddingTap(next(iter(hf.stacks(model.model).values())), delta)
    with tap:
        logits = model.model(**batch).logits
    said = class_prediction(0, logits[0].double().cpu().numpy(), model.card)
    shares = {name: round(100 * share, 1) for name, share in said.get("probabilities", {}).items()}
    return {"text": said["prediction"], "percent": shares}
