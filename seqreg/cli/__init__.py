"""The `seqreg` command; all code of the commands."""

from seqreg.errors import require

require("recipes", "typer", "rich")
