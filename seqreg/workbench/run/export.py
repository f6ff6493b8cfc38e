"""`seqreg export`: the model of a finished run with its card, in a folder or on the hub."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub

from seqreg.errors import BadInput
from seqreg.workbench.config import overlay
from seqreg.workbench.run.record import RunRecord
from seqreg.workbench.run.train import trained
from seqreg.workbench.scores.results import METRICS
from seqreg.workbench.text.atomic_files import writable, write_text

CONFIG = "config.yaml"
ABOUT = ("README.md", CONFIG, "task.yaml", METRICS)
"""Files beside those of the model: its card, the run as a recipe, and its scores."""
PATHS: dict[str, Any] = {
    "data": {"path": True, "unlabelled": True, "cache_dir": True, "also": True, "corpora": True},
    "model": {"name": True, "tokenizer": True, "target_tokenizer": True},
    "terms": {"anchor": {"reference": True}},
    "output": True,
}
"""Settings that may be paths."""


def export(run: Path, folder: Path, *, trust_changes: bool = False) -> list[str]:
    """Copy the model of a run, as it was kept, to a new folder, and return the names of all files."""
    writable(str(folder), "--output ")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"--output {folder}: there is something already: choose a new folder")
    names = exported(run, trust_changes=trust_changes)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run / name, folder / name)  # with the permissions of a new file
    write_text(folder / CONFIG, overlay.dump(_absolute(overlay.read(run / CONFIG), PATHS)))
    return names


def _absolute(value: Any, keys: Mapping[str, Any] | bool) -> Any:
    """Settings with the whole path of every file and folder that is there, so that the recipe works in any folder.

    Args:
        keys: where paths are; True for this value, or all of a mapping
    """
    if isinstance(value, dict):
        chosen = dict.fromkeys(value, True) if keys is True else keys
        return {
            key: _absolute(inner, chosen[key]) if chosen and key in chosen else inner for key, inner in value.items()
        }
    return os.path.abspath(value) if keys is True and isinstance(value, str) and os.path.exists(value) else value


def exported(run: Path, *, trust_changes: bool = False) -> list[str]:
    """What is exported of a finished run; refused if it is not the model that was trained."""
    trained(run, trust_changes=trust_changes)
    record = RunRecord.read(run)
    if record is None or not record.finished:
        raise BadInput(f"{run}: its run has not finished: run the same seqreg train again")
    return sorted(name for name in (*record.files, *ABOUT) if (run / name).is_file())


def push_to_hub(run: Path, repo: str, *, private: bool, names: Sequence[str]) -> str:
    """Upload files of a run to a repository of models on the hub, which is made if it is not there; its address."""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        raise BadInput(f"--push-to-hub {repo}: HF_HUB_OFFLINE=1 is set: unset it")
    api = huggingface_hub.HfApi()
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            (Path(scratch) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(scratch) / name).symlink_to((run / name).resolve())
        try:
            address = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=repo, folder_path=scratch, commit_message=f"Upload {run.resolve().name} by seqreg"
            )
        except Exception as error:  # the hub's clients raise dozens of kinds; the answer to all is the same
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise BadInput(
                f"--push-to-hub {repo}: {reason[:200]}: is the name right, and `hf auth login` done?"
            ) from None
    return str(address)
