"""Smoothness regularizers for fine-tuning that keeps what pre-training learned."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from seqreg.version import __version__

if TYPE_CHECKING:
    from seqreg.build import build_criterion, build_term
    from seqreg.context import Context, Count, Evaluation
    from seqreg.criterion import Criterion, LossReport
    from seqreg.errors import BadInput
    from seqreg.forward import Forward, Pass, Perturbation, PerturbationSite
    from seqreg.objective import Consistency
    from seqreg.schedules import Every, StartAt, Warmup
    from seqreg.term import Cost, Term

__all__ = [
    "BadInput",
    "Consistency",
    "Context",
    "Cost",
    "Count",
    "Criterion",
    "Evaluation",
    "Every",
    "Forward",
    "LossReport",
    "Pass",
    "Perturbation",
    "PerturbationSite",
    "StartAt",
    "Term",
    "Warmup",
    "__version__",
    "advise",
    "attach",
    "build_criterion",
    "build_term",
    "regularized",
]

_HOMES = {
    "build": ("build_criterion", "build_term"),
    "context": ("Context", "Count", "Evaluation"),
    "criterion": ("Criterion", "LossReport"),
    "errors": ("BadInput",),
    "objective": ("Consistency",),
    "schedules": ("Every", "StartAt", "Warmup"),
    "term": ("Cost", "Term"),
    "integrations.hf": ("attach", "regularized"),
    "integrations.hf.term_advice": ("advise",),
    "forward": ("Forward", "Perturbation", "PerturbationSite", "Pass"),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line stays quick, as torch takes seconds."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
