"""One optimizer step of `seqreg train`, walked from file to file.

    python -m tests.walk [--calls]

A tiny BART is trained with R3F. Of one step in the middle, calls from one file of seqreg into another are traced, in
the order in which they first happen, and counted once per pair of files. `--calls` prints every pair of functions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import transformers

import seqreg
from seqreg.workbench.config import run_config
from seqreg.workbench.run import train
from tests.helpers import sample_files

ROOT = Path(seqreg.__file__).parent


def file_of(frame: FrameType | None) -> str | None:
    """The file of a frame below seqreg/; None for other code, and for what the interpreter makes itself."""
    if frame is None or frame.f_code.co_name.startswith("<"):
        return None
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


class Walk:
    """Calls between files, in order, while it is switched on."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, str]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        to = file_of(frame) if event == "call" else None
        if to is None:
            return
        caller = frame.f_back
        while caller is not None and file_of(caller) is None:
            caller = caller.f_back
        start = file_of(caller)
        if start is None or start == to or caller is None:
            return
        call = (start, caller.f_code.co_name, to, frame.f_code.co_name)
        if call not in self.calls:
            self.calls.append(call)


def walk(folder: Path) -> list[tuple[str, str, str, str]]:
    """The calls of one optimizer step."""
    plain = run_config.resolve("gigaword")
    data = sample_files.folder(folder / "data", plain.card, train=16, held=6)
    settings = [*sample_files.tiny("bart", data), f"output={folder / 'run'}", "optimisation.max_steps=3"]
    settings += ["logging.logging_steps=100", "checkpoints.save_minutes=0", "logging.diagnostics_steps=0"]
    run = run_config.resolve("gigaword", terms=["r3f"], overrides=settings)
    recorded, batches = Walk(), 0
    original = transformers.Trainer.get_batch_samples

    def fetched(*args: Any, **kwargs: Any) -> Any:
        nonlocal batches
        batches += 1
        sys.setprofile(recorded if batches == 2 else None)
        return original(*args, **kwargs)

    transformers.Trainer.get_batch_samples = fetched
    try:
        train.train(run)
    finally:
        transformers.Trainer.get_batch_samples = original
    return recorded.calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", action="store_true", help="print every call")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = walk(Path(folder))
    if chosen.calls:
        for start, caller, to, callee in calls:
            print(f"{start}:{caller} -> {to}:{callee}")
    files: list[str] = []
    steps = list(dict.fromkeys((start, to) for start, _, to, _ in calls))
    returns = 0
    for start, to in steps:
        returns += to in files
        files += [name for name in (start, to) if name not in files]
    print("\n".join(files))
    print(f"{len(files)} files, {len(steps)} different steps from file to file, {returns} into a file visited before")


if __name__ == "__main__":
    main()
