"""`seqreg export`: the model of a finished run with its card, in a folder or on the hub."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub

from seqreg.errors import BadInput
from seqreg.workbench.config import overlay
from seqreg.workbench.run.record import RunRecord
from seqreg.workbench.run.train import trained
from seqreg.workbench.scores.results import METRICS
from seqreg.workbench.text.atomic_files import digest, finish, inside, staged_folder, writable
from seqreg.workbench.text.escape import places, without_places

CONFIG = "config.yaml"
ABOUT = ("README.md", CONFIG, "task.yaml", METRICS)
"""Files beside those of the model: its card, the run as a recipe, and its scores."""
_SETTINGS = (CONFIG, "task.yaml", METRICS, "config.json", "tokenizer_config.json", "adapter_config.json")
"""Files with settings, in which there may be paths."""


def export(run: Path, folder: Path, *, trust_changes: bool = False) -> list[str]:
    """Copy the model of a run, as it was kept, to a new folder, and return the names of all files.

    Paths of this machine become the last of their names. A folder that has all of that already is left alone.
    """
    writable(folder, "--output ")
    finish(folder)
    names = exported(run, trust_changes=trust_changes)
    with tempfile.TemporaryDirectory() as scratch:
        changed = _without_places(run, names, Path(scratch))
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            if not _holds(folder, {name: changed.get(name, run / name) for name in names}):
                raise BadInput(f"--output {folder}: there is something already: choose a new folder")
            return names
        with staged_folder(folder, needed=sum((run / name).stat().st_size for name in names)) as stage:
            for name in names:
                (stage / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(changed.get(name, run / name), stage / name)
    return names


def _holds(folder: Path, files: dict[str, Path]) -> bool:
    """Whether a folder has all these files, and no other."""
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    return there == files.keys() and all(digest(folder / name) == digest(path) for name, path in files.items())


def _without_places(run: Path, names: list[str], scratch: Path) -> dict[str, Path]:
    """Copies of the files in which there are paths of this machine, with the last names of these; by name."""
    settings = {name: _parsed(run / name) for name in names if Path(name).name in _SETTINGS}
    found, changed = places(str(run.resolve()), *settings.values()), dict[str, Path]()
    for name in names:
        if name in settings:
            old, new = settings[name], without_places(settings[name], found)
            text = json.dumps(new, indent=2, ensure_ascii=False) + "\n" if name.endswith("json") else overlay.dump(new)
        elif name == "README.md":
            old = (run / name).read_text(encoding="utf-8")
            new = text = without_places(old, found)
        else:
            continue
        if new != old:
            changed[name] = scratch / name
            changed[name].parent.mkdir(parents=True, exist_ok=True)
            changed[name].write_text(text, encoding="utf-8")
    return changed


def _parsed(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else overlay.read(path)


def exported(run: Path, *, trust_changes: bool = False) -> list[str]:
    """Names of what is exported of a finished run; refused if it is not the model that was trained."""
    trained(run, trust_changes=trust_changes)
    record = RunRecord.read(run)
    if record is None or not record.finished:
        raise BadInput(f"{run}: its run has not finished: run the same seqreg train again")
    return sorted(name for name in {*record.files, *ABOUT} if inside(run, name).is_file())


def push_to_hub(run: Path, repo: str, *, private: bool, trust_changes: bool = False) -> str:
    """Upload a run, as it is exported, to a repository of models on the hub; its address.

    The repository is made if it is not there.
    """
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise BadInput(f"--push-to-hub {repo}: HF_HUB_OFFLINE=1 is set: unset it")
    api = huggingface_hub.HfApi()
    with tempfile.TemporaryDirectory() as scratch:
        export(run, Path(scratch) / "model", trust_changes=trust_changes)
        try:
            address = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repo, folder_path=Path(scratch) / "model",
                commit_message=f"Upload {run.resolve().name} by seqreg",
            )  # fmt: skip
        except Exception as error:  # the hub's clients raise dozens of kinds; the answer to all is the same
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise BadInput(
                f"--push-to-hub {repo}: {reason[:200]}: is the name right, and `hf auth login` done?"
            ) from None
    return str(address)
