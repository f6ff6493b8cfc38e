"""Smoothness regularizers for fine-tuning that keeps what pre-training learned."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from seqreg.version import __version__

if TYPE_CHECKING:
    from seqreg.ascent import Ascent
    from seqreg.build import build_criterion, build_term
    from seqreg.context import Context, Count, Evaluation
    from seqreg.criterion import Criterion, LossReport
    from seqreg.errors import BadInput
    from seqreg.forward import ExtraPass, Forward, Pass, PassRequest, Perturbation, PerturbationSite
    from seqreg.objective import Consistency
    from seqreg.schedules import Every, StartAt, Warmup
    from seqreg.term import Cost, Hints, Passes, Term

__all__ = [
    "Ascent",
    "BadInput",
    "Consistency",
    "Context",
    "Cost",
    "Count",
    "Criterion",
    "Evaluation",
    "Every",
    "ExtraPass",
    "Forward",
    "Hints",
    "LossReport",
    "Pass",
    "PassRequest",
    "Passes",
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
    "ascent": ("Ascent",),
    "build": ("build_criterion", "build_term"),
    "context": ("Context", "Count", "Evaluation"),
    "criterion": ("Criterion", "LossReport"),
    "errors": ("BadInput",),
    "objective": ("Consistency",),
    "schedules": ("Every", "StartAt", "Warmup"),
    "term": ("Cost", "Hints", "Passes", "Term"),
    "integrations.hf": ("attach", "regularized"),
    "integrations.hf.term_advice": ("advise",),
    "forward": ("ExtraPass", "Forward", "Pass", "PassRequest", "Perturbation", "PerturbationSite"),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line stays quick, as torch takes seconds."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
