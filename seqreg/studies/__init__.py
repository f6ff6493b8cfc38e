"""What trained models were worth: comparisons, calibration, robustness, collapse."""
