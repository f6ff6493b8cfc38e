"""One training run: trainer, checkpoints, output directory, TensorBoard."""
