"""Scores of a model, and the files that hold them."""
