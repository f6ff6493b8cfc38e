"""Examples, batches, tokenizers and models."""
