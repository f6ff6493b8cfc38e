"""Smoothness regularizers for fine-tuning that keeps what pre-training learned."""

from seqreg.build import build_criterion, build_term
from seqreg.context import Context, Count, Forward, Shift, Site, View
from seqreg.criterion import Agreement, Cost, Criterion, LossReport, Term
from seqreg.errors import BadInput
from seqreg.schedules import Every, StartAt, Warmup

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
