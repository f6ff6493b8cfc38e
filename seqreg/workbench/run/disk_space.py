"""Whether the disk has room for a run, before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seqreg.errors import NoRoom
from seqreg.workbench.config.settings import Config
from seqreg.workbench.run import checkpoints, disk

OPTIMIZER = {"adamw": 2.0, "adafactor": 0.1}
"""What an optimizer remembers, in copies of the weights."""


def check(model: Any, config: Config, folder: Path) -> int:
    """Refuse to begin what cannot be saved: all checkpoints that stay, one more that is written, and the model.

    Returns the bytes of one checkpoint, about.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    remembered = sum(term.remembers for term in config.criterion().terms)
    one = int(weights * (1 + OPTIMIZER[config.optimisation.optim] + remembered))
    saves = config.checkpoints.save_steps or config.checkpoints.save_minutes
    count = config.checkpoints.save_total_limit + 1 + config.evaluation.load_best_model_at_end if saves else 0
    there = len(list(folder.glob(f"{checkpoints.PREFIX}*"))) if folder.is_dir() else 0
    needed, left = one * max(count - there, 1 if saves else 0) + weights, disk.free(folder)
    if left < needed:
        raise NoRoom(
            f"{folder}: {left:,} bytes free, about {needed:,} needed ({count} checkpoints of {one:,}, and the model): "
            "free some space, or set checkpoints.save_total_limit or another output"
        )
    return one
