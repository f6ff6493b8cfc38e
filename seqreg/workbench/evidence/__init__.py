"""From trained runs to evidence: comparisons, probes, calibration, robustness, and the pages that show them."""
