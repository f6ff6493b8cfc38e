"""Every kind of bad input that we know of: one case a row, which makes the input and looks at what happens."""

from tests.bad_input import data_rows, loss_rows, model_rows, outside_rows, settings_rows
from tests.bad_input.table import ROWS, Row

__all__ = ["ROWS", "Row", "data_rows", "loss_rows", "model_rows", "outside_rows", "settings_rows"]
