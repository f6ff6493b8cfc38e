"""From a recipe to a trained, scored model: text -> config -> data -> scores -> run."""

from seqreg.errors import require

require("recipes", "pydantic", "rich", "transformers")
