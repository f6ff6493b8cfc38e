"""Arguments and options that several commands have, with their help, and how results are printed."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer
from rich.console import Console

from seqreg.errors import BadInput
from seqreg.workbench.config import lookup
from seqreg.workbench.text.terminal import print_json

out = Console(highlight=False, markup=False)
"""For results: the standard output."""


def print_result(document: Any, *tables: Any, as_json: bool) -> None:
    """Print tables and sentences for people, or the document, JSON or a dataclass, for programs."""
    if as_json:
        print_json(asdict(document) if is_dataclass(document) and not isinstance(document, type) else document)
        return
    for table in tables:
        out.print(table, soft_wrap=isinstance(table, str))


Recipe = Annotated[
    str,
    typer.Argument(
        help="A recipe by name (`seqreg list recipes`), or the path of a YAML file.",
        autocompletion=lambda: lookup.names("recipes"),
    ),
]
Settings = Annotated[
    Optional[list[str]],
    typer.Argument(help="Settings to change: `key=value`, such as `optimisation.max_steps=100`."),
]
Terms = Annotated[
    Optional[list[str]],
    typer.Option(
        "--terms",
        "-t",
        help="A term by the name or path of its recipe, such as `r3f`, or `r3f:weight=1.0` with settings; may be "
        "repeated. The default is the baseline without terms.",
        autocompletion=lambda: lookup.names("recipes/terms"),
    ),
]
Methods = Annotated[
    Optional[list[str]],
    typer.Option(
        "--terms",
        "-t",
        help="A method beside the baseline: `r3f`, `r3f+rdrop` for two terms together, `r3f:weight=1.0,scale=0.1` "
        "with settings, `strong=r3f:weight=1.0` under a name, or the path of a YAML file; may be repeated.",
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
        help="Run Python code that comes with a model, or that a run names as a term. Read that code first.",
    ),
]
TrustChanges = Annotated[
    bool,
    typer.Option(
        "--trust-changes",
        help="Take the model as it is, although its weights, tokenizer or configurations are not those that its run "
        "has written.",
    ),
]
Trained = Annotated[Path, typer.Argument(help="The output folder of a finished run.")]
Examples = Annotated[
    int,
    typer.Option(
        "--examples",
        "--rows",
        min=5,
        max=2**31 - 1,
        help="The most examples of a split; the same ones for every model.",
    ),
]
Limit = Annotated[int, typer.Option(help="The most examples, drawn with a fixed seed.")]
Split = Annotated[Optional[str], typer.Option(help="The split of the task; by default the one it is scored on.")]
Pooling = Annotated[Literal["mean", "first"], typer.Option(help="How token states become one vector per text.")]
Output = Annotated[
    Optional[Path],
    typer.Option(
        help="The folder for numbers and figures; by default `evidence` in the run's folder, or beside several runs."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def check_address(host: str, allow_remote: bool) -> None:
    """Refuse an address that others can reach, unless it is asked for."""
    if not allow_remote and not _is_loopback(host):
        raise BadInput(f"--host {host}: other machines could reach the models there: if that is meant, --allow-remote")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
