"""`seqreg robustness`: answers when the source is perturbed."""
