"""Shards on disk, by torch.distributed.checkpoint: every rank writes its own, and any number of ranks reads them.

The files are safetensors: reading one runs no code. A plain file of whole tensors is read in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from seqreg.engines.detect import is_sharded, world_size
from seqreg.engines.shards import like, reshard


def save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors; every rank has to call it, and what all ranks hold alike is written once."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    state_dict_saver.save(dict(tensors), storage_writer=writer)


def load(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole ones or shards, with what a folder has under their names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads whole tensors
        reader = HuggingFaceStorageReader(str(folder))
        state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=world_size() == 1)


def read(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a folder, cut as the weights of a model are."""
    stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    cut = next((parameter for parameter in model.parameters() if is_sharded(parameter)), None)
    tensors = {name: _empty(entry, cut) for name, entry in stored.items()}
    load(folder, tensors)
    return tensors


def _empty(entry: Any, cut: Any) -> Tensor:
    if cut is None or not entry.size:
        return torch.zeros(entry.size, dtype=entry.properties.dtype)
    from torch.distributed import tensor

    return tensor.zeros(
        entry.size, dtype=entry.properties.dtype, device_mesh=cut.device_mesh, placements=cut.placements
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and stored buffers of a model, each once: what `save` writes of it."""
    reshard(model)
    stored = model.state_dict(keep_vars=True)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach() for name, tensor in tensors.items() if name in stored}


def load_weights(folder: Path, model: nn.Module) -> None:
    """Give a model, sharded or not, the weights that `save` wrote of it."""
    load(folder, weights(model))


def optimizer_state(optimizer: Any) -> dict[str, Tensor]:
    """What an optimizer remembers of every parameter, by the number of the parameter and a name."""
    state = optimizer.state_dict()["state"]
    return {f"{number}/{name}": value for number, values in state.items() for name, value in values.items()}


def load_optimizer_state(tensors: Mapping[str, Tensor], optimizer: Any) -> None:
    """Take up what `optimizer_state` gave; its settings stay as they are."""
    groups = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition("/")
        parameter = parameters[int(number)]
        shaped = value.shape == parameter.shape and value.dim() > 0
        state.setdefault(int(number), {})[name] = like(value, parameter) if shaped else value
    optimizer.load_state_dict({"state": state, "param_groups": groups})
