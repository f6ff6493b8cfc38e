"""Tensor parallelism: every rank computes a part of each layer for the same batch, and has to draw the same noise."""

from __future__ import annotations

import torch


def share_generators(device: torch.device) -> None:
    """Give all ranks the generators of the first."""
    state = torch.get_rng_state().to(device)
    torch.distributed.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())
    if device.type != "cpu":
        generators = torch.get_device_module(device)
        state = generators.get_rng_state(device).to(device)
        torch.distributed.broadcast(state, src=0)
        generators.set_rng_state(state.cpu(), device)
