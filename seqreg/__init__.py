"""Smoothness regularizers for fine-tuning that keeps what pre-training learned."""

from seqreg.build import build_criterion, build_term
from seqreg.context import Context, Count
from seqreg.criterion import Cost, Criterion, LossReport, Term
from seqreg.errors import BadInput
from seqreg.parts import Agreement
from seqreg.schedules import Every, StartAt, Warmup
from seqreg.views import Forward, Shift, Site, View

__version__ = "0.1.0"

__all__ = [
    "Agreement",
    "BadInput",
    "Context",
    "Cost",
    "Count",
    "Criterion",
    "Every",
    "Forward",
    "LossReport",
    "Shift",
    "Site",
    "StartAt",
    "Term",
    "View",
    "Warmup",
    "build_criterion",
    "build_term",
]
