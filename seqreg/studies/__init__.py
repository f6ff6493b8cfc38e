"""What trained models were worth: comparisons, calibration, robustness, collapse."""

from seqreg.errors import require

require("recipes", "numpy", "scipy")
