"""Train, evaluate and predict from a recipe."""
