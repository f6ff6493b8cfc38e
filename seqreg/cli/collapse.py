"""What `seqreg probe`, `chain` and `shift` do: check, work, print."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput, nearest
from seqreg.studies.common import study_files
from seqreg.studies.common.findings import FOLDER
from seqreg.studies.compare.comparison import read_seeds, write_seeds
from seqreg.workbench.config import cards, lookup, run_config
from seqreg.workbench.config.methods import parse


def _command(*words: object) -> str:
    return shlex.join(["seqreg", *(str(word) for word in words)])


def probe(
    folders: Sequence[Path], file: Path | None, output: Path | None, *, as_json: bool, rows: int, **settings: Any
) -> None:
    """Probe runs, and print what was found."""
    if file is not None:
        study_files.read(study_files.ProbeFile, file)
    for folder in folders:
        if not os.path.isdir(folder):
            raise BadInput(f"{folder}: no such folder")
    from seqreg.studies.collapse import probe as work
    from seqreg.studies.common import display
    from seqreg.workbench.text.terminal import quiet

    quiet()
    where = display.place(folders, output)
    words = ["probe", *folders, *(["--tasks", file] if file else []), "--rows", rows, "--pooling", settings["pooling"]]
    words += ["--pretrained", settings["pretrained"]] if settings["pretrained"] else []
    finding = work.study(folders, file, where, command=_command(*words), rows=rows, **settings)
    display.show(finding, where, as_json=as_json)


def chain(
    file: Path, methods: Sequence[str], settings: Sequence[str], output: Path | None, *, as_json: bool, cycles: int,
    seeds: str | None, rows: int, pooling: Any, trust: bool,
) -> None:  # fmt: skip
    """Train and probe a chain, and print what was found."""
    plan = study_files.read(study_files.Plan, file)
    plan = plan if seeds is None else plan.updated(seeds=read_seeds(seeds))
    for name in (part.recipe for method in methods for part in parse(method).parts):
        known = lookup.names("recipes/terms")
        if name not in (*known, "baseline") and not name.endswith((".yaml", ".yml")):
            raise BadInput(f"--terms {name}: unknown; {nearest(name, known)}")
    for word in settings:
        if word.partition("=")[0] in ("output", "seed"):
            raise BadInput(f"{word}: a chain sets it itself: see --seeds and --output")
    for step in plan.steps:
        own = [word for word in (*plan.settings, *step.settings, *settings) if not word.startswith("terms")]
        try:
            run_config.resolve(step.recipe, variants=step.variants, overrides=own, paths=["data.path", "model.name"])
        except BadInput as error:
            raise BadInput(f"{file}: step {step.title}: {str(error).removeprefix('command line: ')}") from None
    from seqreg.studies.collapse import chain as work
    from seqreg.studies.common import display
    from seqreg.workbench.text.terminal import quiet

    quiet()
    where = output or Path(plan.output or f"runs/chain-{file.stem}")
    into = display.place([where], where / FOLDER)
    laid = work.lay(plan, str(file), where, methods, cycles, settings, rows, trust)
    words = ["chain", file, *(word for name in methods for word in ("--terms", name)), "--cycles", cycles, *settings]
    words += ["--seeds", write_seeds(list(dict.fromkeys(plan.seeds)))]
    words += ["--rows", rows, "--pooling", pooling, "--output", where]
    finding = work.study(laid, into, command=_command(*words), cycles=cycles, pooling=pooling, trust=trust)
    display.show(finding, into, as_json=as_json)


def shift(
    words: Sequence[str], to: str, shares: Sequence[float], output: Path | None, *, as_json: bool, trust: bool
) -> None:
    """Move runs to another domain, and print what was found."""
    folders = [Path(word) for word in words if "=" not in word or os.path.isdir(word)]
    settings = [word for word in words if "=" in word and not os.path.isdir(word)]
    if not folders:
        raise BadInput("give the output folder of a training, such as runs/glue-rte/baseline")
    for folder in folders:
        run_config.check_trained(folder)
    cards.load(to)
    for word in settings:
        key, _, path = word.partition("=")
        if key == "data.path" and not os.path.exists(path):
            raise BadInput(f"{word}: no such file or folder")
    from seqreg.studies.collapse import shift as work
    from seqreg.studies.common import display
    from seqreg.workbench.text.terminal import quiet

    quiet()
    where = display.place(folders, output)
    laid = work.lay(folders, to, shares, settings, trust)
    asked = [word for share in shares for word in ("--share", f"{share:g}")]
    finding = work.study(laid, where, command=_command("shift", *words, "--to", to, *asked), trust=trust)
    display.show(finding, where, as_json=as_json)
