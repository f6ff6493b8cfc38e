"""Recipes, task cards and settings: from YAML and the command line to the configuration of a run."""
