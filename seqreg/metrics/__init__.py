"""Metrics: ROUGE with intervals, classification, calibration, statistics over seeds, noise in text."""

from seqreg.metrics.rouge.score import RougeReport, rouge

__all__ = ["RougeReport", "rouge"]
