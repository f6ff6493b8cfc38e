"""What is kept of a step that was not finite, so that `seqreg replay` can compute it again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from seqreg.errors import BadInput, NoRoom
from seqreg.workbench.run import checkpoints, disk, rng
from seqreg.workbench.text import stored_json
from seqreg.workbench.text.atomic_files import to_json
from seqreg.workbench.text.terminal import warn

BATCH, STORY = "batch.safetensors", "crash.json"
MOST = 10
"""Steps of a run that are kept."""
SMALL = 256 * 2**20
"""Bytes of weights up to which they are kept with the step."""


def write(run: Path, trainer: Any, attempt: Any, skip: bool) -> Path | None:
    """Write RUN/crash/step-N: the batches, the generators, what was wrong, and the weights of a small model."""
    rank = trainer.args.process_index
    folder = run / "crash" / f"step-{trainer.state.global_step + 1}{f'-process-{rank}' if rank else ''}"
    if folder.exists():  # of the same step before the run was resumed: torn, or with other settings, for all we know
        shutil.rmtree(folder)
    if len(list((run / "crash").glob("step-*"))) >= MOST:
        return None
    story = {
        **trainer.facts, "step": trainer.state.global_step, "rows": attempt.rows, "made": not skip,
        "not_finite": sorted(attempt.faults | attempt.dropped), "batches": len(attempt.batches),
        "draws": _plain(attempt.draws),
    }  # fmt: skip
    tensors = {
        f"{index}/{key}": value.cpu().contiguous()
        for index, batch in enumerate(attempt.batches)
        for key, value in batch.items()
        if isinstance(value, torch.Tensor)
    }
    try:
        with disk.writing(folder):
            folder.mkdir(parents=True)
            safetensors.torch.save_file(tensors, folder / BATCH)
            (folder / STORY).write_text(to_json(story, indent=1) + "\n", encoding="utf-8")
            if sum(p.numel() * p.element_size() for p in trainer.model.parameters()) <= SMALL:
                trainer._save(str(folder))
                trainer._save_terms(str(folder))
            checkpoints.seal(folder, {"step": trainer.state.global_step})
    except NoRoom as error:
        warn(f"the step is not kept for a replay: {error}")
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return folder


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The story of a crash folder, with its generators as `rng.set_rng_state` takes them, and its batches."""
    if not os.path.isdir(folder):
        raise BadInput(f"{folder}: no such folder; a training writes one as RUN/crash/step-N")
    wrong = checkpoints.fault(folder, (BATCH, STORY))
    if wrong is not None:
        raise BadInput(f"{folder}: cannot be replayed: {wrong}")
    found = stored_json.read(stored_json.Story, folder / STORY, "it cannot be replayed")
    try:
        draws = _draws(found.draws)
        with rng.preserve_rng_state():
            rng.set_rng_state(draws)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise BadInput(f"{folder / STORY}: draws: not the state of a generator: {error}") from None
    try:
        tensors = safetensors.torch.load_file(folder / BATCH)
    except (safetensors.SafetensorError, OSError) as error:
        raise BadInput(f"{folder / BATCH}: cannot be read ({error})") from None
    batches: dict[int, dict[str, Any]] = {}
    for path, tensor in tensors.items():
        index, _, key = path.partition("/")
        batches.setdefault(int(index) if index.isdecimal() else -1, {})[key] = tensor
    if sorted(batches) != list(range(len(batches))) or len(batches) != found.batches:
        raise BadInput(f"{folder}: {STORY} tells of {found.batches} batches, and {BATCH} holds {len(batches)}")
    return {**found.model_dump(), "draws": draws}, [batches[index] for index in range(len(batches))]


def _draws(found: stored_json.Draws) -> dict[str, Any]:
    """The generators as `rng.set_rng_state` takes them."""
    version, numbers, gauss = found.python
    kind, keys, *rest = found.numpy
    draws: dict[str, Any] = {
        "python": (version, tuple(numbers), gauss),
        "numpy": (kind, np.asarray(keys, dtype=np.uint32), *rest),
        "torch": torch.tensor(found.torch, dtype=torch.uint8),
    }
    if found.cuda and torch.cuda.is_available():
        draws["cuda"] = [torch.tensor(one, dtype=torch.uint8) for one in found.cuda]
    return draws


def _plain(value: Any) -> Any:
    """Tensors, arrays and tuples as lists, for JSON."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
