"""ROUGE: the numbers of rouge-score to the last bit, many times faster."""

from seqreg.metrics.rouge.score import RougeReport, rouge

__all__ = ["RougeReport", "rouge"]
