"""Random perturbations of embeddings, and whether the arithmetic can see them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seqreg.losses import at_least_float32

Noise = Literal["normal", "uniform", "clamped"]
Norm = Literal["l2", "linf"]
Over = Literal["token", "sentence"]


def draw(noise: Noise, shape: torch.Size | tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """N(0, 1), N(0, 1) clamped to [-2, 2], or U(-1, 1) from the global generator, float32."""
    if noise == "uniform":
        return torch.rand(shape, device=device) * 2 - 1
    drawn = torch.randn(shape, device=device)
    return drawn.clamp(-2, 2) if noise == "clamped" else drawn


def sample(noise: Noise, like: Tensor, scale: float | Tensor, mask: Tensor | None = None) -> Tensor:
    """Noise for embeddings `like`, zero outside `mask`.

    Numbers are drawn for real tokens only, row after row, so that padding changes neither the noise of the other
    tokens nor the generator's state.

    Args:
        like: embeddings                                            # [B, S, D]
        scale: standard deviation (normal) or bound (uniform); one number, one per row or per token    # [B, 1 or S, 1]
        mask: True on real tokens; None when all are                # [B, S]
    """
    if mask is None:
        return draw(noise, like.shape, like.device) * scale
    delta = torch.zeros(like.shape, device=like.device)
    delta[mask] = draw(noise, (int(mask.sum()), like.shape[-1]), like.device)
    return delta * scale


def norm(values: Tensor, kind: Norm, over: Over) -> Tensor:
    """The norm of every token, [B, S, 1], or of every sentence, [B, 1, 1], of values [B, S, D]."""
    dims = (-1,) if over == "token" else (-2, -1)
    size: Tensor = torch.linalg.vector_norm(values, 2 if kind == "l2" else float("inf"), dims, keepdim=True)
    return size


def project(delta: Tensor, radius: float | Tensor, kind: Norm, over: Over) -> Tensor:
    """The nearest point of the ball of this radius around 0."""
    if kind == "linf":
        bound = torch.as_tensor(radius, device=delta.device)
        return delta.clamp(-bound, bound)
    return delta * (radius / norm(delta, kind, over).clamp_min(1e-30)).clamp_max(1.0)


def rms(embeds: Tensor, mask: Tensor | None = None) -> Tensor:
    """Root mean square of the embeddings of the real tokens: a float32 scalar without gradient."""
    embeds = at_least_float32(embeds.detach())
    embeds = embeds if mask is None else embeds[mask]
    return embeds.square().mean().sqrt() if embeds.numel() else embeds.new_zeros(())


def resolution(dtype: torch.dtype, size: float) -> float:
    """Half a unit in the last place of a number of `size`: noise below this is mostly rounded away."""
    return torch.finfo(dtype).eps * size / 2


def too_small(amount: float, embeds: Tensor, mask: Tensor | None, dtype: torch.dtype | None) -> str | None:
    """A complaint if a change of these embeddings by `amount` an entry is lost to rounding in this arithmetic."""
    dtype, size = dtype or arithmetic_dtype(embeds), float(rms(embeds, mask))
    least = resolution(dtype, size)
    if not amount < least:  # also where embeddings are not finite: that is told of the loss
        return None
    return (
        f"a perturbation of {amount:.2g} is below what {str(dtype).removeprefix('torch.')} resolves at an embedding "
        f"RMS of {size:.2g} ({least:.2g}): make it larger, or train in float32"
    )


def arithmetic_dtype(embeds: Tensor) -> torch.dtype:
    """The coarsest dtype that these embeddings meet on their way: their own, or autocast's."""
    kind = embeds.device.type
    if not torch.is_autocast_enabled(kind):
        return embeds.dtype
    lower = torch.get_autocast_dtype(kind)
    return lower if torch.finfo(lower).eps > torch.finfo(embeds.dtype).eps else embeds.dtype
