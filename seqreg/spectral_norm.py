"""R4F: spectral normalisation of a classification head, and folding it away for export.

R4F is R3F plus a head whose weight matrices have spectral norm at most 1, which bounds how much the head can amplify
a change of the representation. It is a property of the model, not a term of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from seqreg.errors import BadInput
from seqreg.overrides import training_off

Layers = Literal["all", "out_proj"]


class SpectralNorm(nn.Module):
    """A weight divided by its largest singular value, as power iteration knows it: W / (u' W v).

    Steps in the order of the legacy `torch.nn.utils.spectral_norm`, which fairseq uses: v from u, then u from v. That
    one starts from random vectors, so that its first steps divide by a number that is far from the norm and may be
    negative; `warmup` iterations settle it first. torch's newer parametrization steps in the other order, so that it
    cannot reproduce fairseq's numbers.
    """

    u: Tensor  # [out]
    v: Tensor  # [in]

    def __init__(self, weight: Tensor, warmup: int) -> None:
        super().__init__()
        for name, size in zip("uv", weight.shape, strict=True):
            self.register_buffer(name, functional.normalize(torch.randn(size).to(weight), dim=0))
        for _ in range(warmup):
            self.iterate(weight)

    @torch.no_grad()
    def iterate(self, weight: Tensor) -> None:
        self.v.copy_(functional.normalize(weight.t() @ self.u, dim=0))
        self.u.copy_(functional.normalize(weight @ self.v, dim=0))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            exact = weight.to(self.u.dtype)  # FSDP2 may cast weights for a pass, and not buffers
            if self.training:
                self.iterate(exact)
            u, v = self.u.clone(), self.v.clone()  # the buffers move on before backward has used them
            sigma = torch.dot(u, exact @ v)
            return (exact / torch.where(sigma.abs() < 1e-12, torch.ones_like(sigma), sigma)).to(weight.dtype)


def spectral_norm(head: nn.Module, layers: Layers = "all", warmup: int = 15) -> list[str]:
    """Normalise the linear layers of `head` in place.

    One power iteration per training pass, as in fairseq; but a `Context` lets only the first clean pass of an optimizer
    step iterate, so that extra passes see the same head and accumulation does not change the gradient.

    Args:
        layers: "all" weight matrices (the paper), or the last one, "out_proj" (fairseq)
        warmup: power iterations before the first pass (fairseq makes none)

    Returns:
        the names of the normalised layers
    """
    if layers not in ("all", "out_proj"):
        raise BadInput(f"layers={layers!r}: choose 'all' (the paper) or 'out_proj' (fairseq)")
    linear = [(name, module) for name, module in head.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise BadInput(f"{type(head).__name__} has no linear layer to normalise")
    chosen = linear if layers == "all" else linear[-1:]
    for name, module in chosen:
        if parametrize.is_parametrized(module, "weight"):
            raise BadInput(f"layer {name!r} of the head is normalised already: apply R4F once")
    for _, module in chosen:
        parametrize.register_parametrization(module, "weight", SpectralNorm(module.weight, warmup))
    return [name for name, _ in chosen]


def fold(model: nn.Module) -> nn.Module:
    """Replace every normalised weight by its value, in place: afterwards the model is a plain one.

    To save during training, leave the model as it is: save_pretrained(..., state_dict=folded_state(model)).
    """
    for _, module in list(_normalised(model)):
        cls = type(module)  # copies of a model share it, and folding removes a property from it
        module.__class__ = type(cls.__name__, cls.__bases__, dict(vars(cls)))
        with training_off(module.modules()):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return model


def folded_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the folded model would have; the model itself is left alone."""
    state = dict(model.state_dict())
    for name, module in _normalised(model):
        prefix = f"{name}." if name else ""
        for key in [key for key in state if key.startswith(f"{prefix}parametrizations.")]:
            del state[key]
        with training_off(module.modules()), torch.no_grad():
            state[f"{prefix}weight"] = module.weight.detach().clone()
    return state


def raw_state(model: nn.Module) -> dict[str, Tensor]:
    """What `folded_state` leaves out and a resumed training needs: raw weights and power-iteration vectors."""
    prefixes = tuple(f"{name}.parametrizations.".lstrip(".") for name, _ in _normalised(model))
    return {key: value for key, value in model.state_dict().items() if key.startswith(prefixes)}


def is_normalised(model: nn.Module) -> bool:
    """Whether any layer of a model is normalised."""
    return any(isinstance(module, SpectralNorm) for module in model.modules())


def _normalised(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(isinstance(inner, SpectralNorm) for inner in module.modules()):
            yield name, module
