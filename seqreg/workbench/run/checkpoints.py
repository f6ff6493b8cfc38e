"""Atomic checkpoints: written aside, synced, sealed by a manifest, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers.trainer_pt_utils import safe_globals

from seqreg.workbench.text.atomic_files import ASIDE, digest, inside, move, remove, settle, sync, write_text
from seqreg.workbench.text.terminal import warn

MANIFEST = "manifest.json"
PREFIX, OLD = "checkpoint-", ".old-"
WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"
SHARDED_WEIGHTS = "sharded/model/"
NEEDED = (WEIGHTS, "optimizer.pt", "scheduler.pt", "trainer_state.json")


def _files(folder: Path) -> list[Path]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return [inside(folder, path.relative_to(folder).as_posix()) for path in paths]


def listing(folder: Path) -> dict[str, Any]:
    """Size and SHA-256 of every file of a folder, synced."""
    files: dict[str, Any] = {}
    for path in _files(folder):
        sync(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": digest(path)}
    return files


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Sync every file, then write the manifest: size and SHA-256 of each, and `facts`."""
    files = listing(folder)
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        sync(inner)
    write_text(folder / MANIFEST, json.dumps({**facts, "files": files}, indent=1) + "\n")


def manifest(folder: Path) -> dict[str, Any]:
    """Contents of the manifest of a checkpoint; nothing if it is not sealed."""
    try:
        stored = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) and isinstance(stored.get("files"), dict) else {}


def fault(folder: Path, needed: Sequence[str] = NEEDED) -> str | None:
    """What is wrong with a sealed folder, in a few words; None if every file is as it was."""
    files = manifest(folder).get("files")
    if files is None:
        return "it was never completed: its manifest is missing or cannot be read"
    for name in needed:
        if name not in files and not (name == WEIGHTS and _has_other_weights(files)):
            return f"{name} is not in its manifest"
    return damage(folder, files)


def _has_other_weights(files: Mapping[str, Any]) -> bool:
    """Whether the weights are in several files, those of adapters, or shards."""
    others = {f"{WEIGHTS}.index.json", ADAPTER_WEIGHTS}
    return any(name in others or name.startswith(SHARDED_WEIGHTS) for name in files)


def damage(folder: Path, files: Mapping[str, Any]) -> str | None:
    """The first file of a folder that is not as `listing` found it, in a few words; None if there is none."""
    for name, expected in files.items():
        if not isinstance(expected, dict) or not {"size", "sha256"} <= expected.keys():
            return f"what its manifest says of {name} cannot be read"
        try:
            path = inside(folder, name)
        except ValueError:
            return f"its manifest names {name[:100]}, which is elsewhere"
        if not os.path.isfile(path):  # also where the name is none
            return f"{name[:100]} is missing"
        size = path.stat().st_size
        if size != expected["size"]:
            return f"{name} has {size} bytes instead of {expected['size']}"
        if digest(path) != expected["sha256"]:
            return f"{name} has changed since it was written"
    return None


def step_of(folder: Path) -> int:
    """The step of a checkpoint; -1 for another folder."""
    number = folder.name.removeprefix(PREFIX)
    return int(number) if folder.name.startswith(PREFIX) and number.isdecimal() and folder.is_dir() else -1


def _all(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted((path for path in folder.glob(f"{PREFIX}*") if step_of(path) >= 0), key=step_of)


def sealed(folder: Path, run: str) -> list[Path]:
    """The checkpoints of a run that have a manifest, oldest first. Their files are not looked at."""
    return [path for path in _all(folder) if manifest(path).get("run") == run]


def newest(folder: Path, run: str) -> Path | None:
    """The newest checkpoint of a run that verifies; those that do not are named, and left alone."""
    for path in sorted(folder.glob(f"{ASIDE}{PREFIX}*")):
        warn(f"{path} is left alone: a save that was not completed")
    for path in reversed(_all(folder)):
        problem = fault(path)
        if problem is None and manifest(path).get("run") == run:
            return path
        warn(f"{path} is passed over: {problem or 'it belongs to another run'}")
    return None


def unreadable(folder: Path) -> str | None:
    """The first file of a folder that cannot be opened, although its bytes are those that were written, and why."""
    for path in _files(folder):
        try:
            if path.suffix in (".pt", ".pth") and not isinstance(state := load_state(path), dict):
                return f"{path}: holds a {type(state).__name__} instead of a state"
            if path.suffix == ".safetensors":
                with safetensors.safe_open(path, "pt"):
                    pass
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
        except pickle.UnpicklingError:
            return f"{path}: holds more than numbers, or is no file of torch: it is not loaded"
        except Exception as error:  # torch, zipfile, safetensors and json have kinds of their own
            reason = next(iter(str(error).splitlines()), "")[:100] or type(error).__name__
            return f"{path}: cannot be read ({reason})"
    return None


def load_state(path: Path) -> Any:
    """What torch saved in a file; runs no code."""
    with safe_globals():
        return torch.load(path, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def staged(final: Path, facts: Mapping[str, Any], first: bool, wait: Callable[[], None]) -> Iterator[Path]:
    """A folder to write a checkpoint to, which becomes `final` when all of it is there.

    Args:
        facts: for the manifest
        first: whether this is the process that seals it
        wait: returns when all processes are there
    """
    aside = final.with_name(f"{ASIDE}{final.name}")
    if first:
        shutil.rmtree(aside, ignore_errors=True)  # an earlier attempt at this very step
        aside.mkdir(parents=True)
    wait()
    try:
        yield aside
        wait()
        if first:
            seal(aside, facts)
            _make_way(final)
            aside.rename(final)
            sync(final.parent)
    except BaseException:
        if first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    wait()


def _make_way(final: Path) -> None:
    """Put a checkpoint aside that did not verify and is now written again: it is never deleted."""
    for number in range(1, 1000):
        spoilt = final.with_name(f"spoilt-{final.name}-{number}")
        if not final.exists():
            return
        if not spoilt.exists():
            final.rename(spoilt)


def publish(aside: Path, folder: Path) -> dict[str, Any]:
    """Move synced files to where they belong, one by one; returns their `listing`."""
    settle(aside)
    files = listing(aside)
    move(aside, folder)
    remove([aside])
    return files


def rotate(folder: Path, run: str, keep: int, best: str | None) -> None:
    """Delete all but the newest `keep` sealed checkpoints and the best one."""
    paths = sealed(folder, run)
    for path in paths[: max(len(paths) - keep, 0)]:
        if best is None or path.name != Path(best).name:
            path.rename(path.with_name(f"{OLD}{path.name}"))  # so that a half-deleted one is not taken for a torn one
    for path in folder.glob(f"{OLD}*"):
        shutil.rmtree(path)
