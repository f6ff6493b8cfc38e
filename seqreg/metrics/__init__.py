"""Metrics: ROUGE with intervals, classification, calibration, statistics over seeds, noise in text."""

from seqreg.errors import require

require("recipes", "numpy", "scipy")

from seqreg.metrics.rouge.score import RougeReport, rouge

__all__ = ["RougeReport", "rouge"]
