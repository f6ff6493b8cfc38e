"""The version, on its own so that everything can read it."""

__version__ = "0.2.0"
