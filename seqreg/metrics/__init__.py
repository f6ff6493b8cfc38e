"""How good outputs are: ROUGE with intervals, equal to rouge-score and faster."""

from seqreg.metrics.rouge.score import RougeReport, rouge

__all__ = ["RougeReport", "rouge"]
