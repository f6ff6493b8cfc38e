"""The curves of a run, read back from its TensorBoard files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

Curve = list[tuple[int, float]]


def curves(folder: Path) -> dict[str, Curve]:
    """All scalars of a run by tag, as (step, value); nothing if it wrote none."""
    if not (folder / "tensorboard").is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def mean_curve(found: Sequence[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps that all seeds have, with the mean, the lowest and the highest value."""
    maps = [dict(curve) for curve in found]
    steps = sorted(set.intersection(*(set(one) for one in maps))) if maps else []
    values = np.array([[one[step] for step in steps] for one in maps])
    if not steps:
        return [], [], [], []
    return steps, values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()
