"""Arguments that several commands have, with what `--help` says about them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from seqreg.workbench.config import lookup


def _recipes() -> list[str]:
    """For shells: what can be completed."""
    return lookup.names("recipes")


def _terms() -> list[str]:
    return lookup.names("recipes/terms")


Recipe = Annotated[
    str,
    typer.Argument(
        help="A recipe by name (`seqreg list recipes`), or the path of a YAML file.", autocompletion=_recipes
    ),
]
Settings = Annotated[
    Optional[list[str]],
    typer.Argument(help="Changes of the recipe: `key=value`, such as `optimisation.max_steps=100`."),
]
Terms = Annotated[
    Optional[list[str]],
    typer.Option(
        "--terms",
        "-t",
        help=(
            "A recipe of terms by name or path, such as `r3f`, or `r3f:weight=1.0` with settings; may be repeated. "
            "None is the baseline."
        ),
        autocompletion=_terms,
    ),
]
Variants = Annotated[
    Optional[list[str]],
    typer.Option("--variant", "-v", help="A variant of the recipe, such as `tiny` or `pegasus`; may be repeated."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with a model, or that a run names as a term. Read it first: it can do all.",
    ),
]
Rows = Annotated[int, typer.Option(min=5, max=2**31 - 1, help="At most so many rows of a split, the same for all.")]
Trained = Annotated[Path, typer.Argument(help="The output folder of a training.")]
Output = Annotated[
    Optional[Path],
    typer.Option(help="A folder for numbers and figures; by default `evidence` in the run's, or beside several runs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
