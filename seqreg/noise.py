"""Random perturbations of embeddings, and whether the arithmetic can see them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seqreg.losses import at_least_float32

Noise = Literal["normal", "uniform"]


def draw(noise: Noise, shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """N(0, 1) or U(-1, 1) from the global generator, float32."""
    if noise == "normal":
        return torch.randn(shape, device=device)
    return torch.rand(shape, device=device) * 2 - 1


def sample(noise: Noise, like: Tensor, scale: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """Noise for embeddings `like`, zero outside `mask`.

    Numbers are drawn for real tokens only, row after row, so that padding changes neither the noise of the other
    tokens nor the generator's state.

    Args:
        like: embeddings                                            # [B, S, D]
        scale: standard deviation (normal) or bound (uniform)
        mask: True on real tokens; None when all are                # [B, S]
    """
    if mask is None:
        return draw(noise, like.shape, like.device) * scale
    delta = torch.zeros(like.shape, device=like.device)
    delta[mask] = draw(noise, (int(mask.sum()), like.shape[-1]), like.device) * scale
    return delta


def rms(embeds: Tensor, mask: Tensor | None = None) -> Tensor:
    """Root mean square of the embeddings of the real tokens: a float32 scalar without gradient."""
    embeds = at_least_float32(embeds.detach())
    return (embeds if mask is None else embeds[mask]).square().mean().sqrt()


def resolution(dtype: torch.dtype, size: float) -> float:
    """Half a unit in the last place of a number of `size`: noise below this is mostly rounded away."""
    return torch.finfo(dtype).eps * size / 2


def arithmetic_dtype(embeds: Tensor) -> torch.dtype:
    """The coarsest dtype that these embeddings meet on their way: their own, or autocast's."""
    kind = embeds.device.type
    if not torch.is_autocast_enabled(kind):
        return embeds.dtype
    lower = torch.get_autocast_dtype(kind)
    return lower if torch.finfo(lower).eps > torch.finfo(embeds.dtype).eps else embeds.dtype
