"""Runs of somebody else: names and links that lead out of their folder write, read and send nothing outside."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from seqreg.errors import BadInput
from seqreg.studies.common.trained_model import load_all
from seqreg.workbench.config import overlay
from seqreg.workbench.run import checkpoints, nonfinite
from seqreg.workbench.run.replay import replay
from seqreg.workbench.text.atomic_files import digest
from tests.helpers.tiny_tasks import SHORT, bert, seqreg, task

SECRET = "secret.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs of one model."""
    folder = tmp_path_factory.mktemp("hostile")
    bert(folder / "bert"), task(folder, "colour", train=32, test=16)
    common = ["train", "glue", f"task={folder / 'colour.yaml'}", f"data.path={folder / 'colour'}", *SHORT]
    for name in ("one", "two"):
        seqreg(*common, f"model.name={folder / 'bert'}", f"output={folder / name}", cwd=folder)
    return folder


class Watch:
    """Notes what is opened, while it has a file to look for; audit hooks stay for good."""

    def __init__(self) -> None:
        self.wanted: str | None = None
        self.opened: list[str] = []

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if self.wanted is not None and event == "open" and isinstance(given[0], (str, os.PathLike)):
            path, self.wanted = self.wanted, None
            if os.path.realpath(given[0]) == path:
                self.opened.append(str(given[0]))
            self.wanted = path


watch = Watch()
sys.addaudithook(watch)


@pytest.fixture
def place(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the received run `got/run`; nothing may happen to the files beside it."""
    shutil.copytree(trained / "one", tmp_path / "got" / "run")
    (tmp_path / SECRET).write_text('{"secret": 1}')
    (tmp_path / "lines.txt").write_text("the red one\n")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is sent")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", refuse)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    watch.wanted, watch.opened = str((tmp_path / SECRET).resolve()), []
    yield tmp_path
    watch.wanted = None
    assert watch.opened == []
    assert (tmp_path / SECRET).read_text() == '{"secret": 1}'
    assert {path.name for path in tmp_path.iterdir()} <= {"got", SECRET, "lines.txt", "elsewhere"}


def of_run_json(name: str) -> Callable[[Path], None]:
    """Add a name to the files of a run, with the bytes of the secret."""

    def change(run: Path) -> None:
        secret = run.parent.parent / SECRET
        record = json.loads((run / "run.json").read_text())
        entry = {"size": secret.stat().st_size, "sha256": digest(secret)}
        record["files"] = {name.replace("ROOT", str(run.parent.parent)): entry, **record["files"]}
        (run / "run.json").write_text(json.dumps(record))
        watch.opened = []  # of the digest

    return change


def linked(name: str) -> Callable[[Path], None]:
    """Put a link to the secret in the place of a file."""

    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(run.parent.parent / SECRET)

    return change


HOSTILE = {
    "a name with ..": of_run_json(f"../../{SECRET}"),
    "an absolute name": of_run_json(f"ROOT/{SECRET}"),
    **{f"a linked {name}": linked(name) for name in ("README.md", "config.json", "tokenizer.json", "run.json")},
    "a linked config.yaml": linked("config.yaml"),
    "linked weights": linked("model.safetensors"),
    "linked scores": linked("metrics.json"),
}
COMMANDS = {
    "export": ["export", "got/run", "-o", "got/model"],
    "push": ["export", "got/run", "--push-to-hub", "me/model", "--yes"],
    "soup": ["soup", "got/run", "TRAINED/two", "-o", "got/mean"],
    "evaluate": ["evaluate", "got/run", "--output", "got/scores"],
    "predict": ["predict", "got/run", "lines.txt", "-o", "got/said.txt"],
}


@pytest.mark.parametrize("attack", HOSTILE)
@pytest.mark.parametrize("command", [*COMMANDS, "serve"])
def test_what_leads_out_of_a_received_run_is_refused(command: str, attack: str, place: Path, trained: Path) -> None:
    HOSTILE[attack](place / "got" / "run")
    if command == "serve":
        with pytest.raises(BadInput, match=r"leads out of|elsewhere"):
            load_all([place / "got" / "run"])
        return
    words = [word.replace("TRAINED", str(trained)) for word in COMMANDS[command]]
    said = seqreg(*words, cwd=place, code=2).stderr
    assert "out of" in said or "elsewhere" in said
    assert [path.name for path in (place / "got").iterdir()] == ["run"]


def test_predictions_on_a_split_whose_name_leads_out_are_not_written(place: Path) -> None:
    run = place / "got" / "run"
    card = overlay.read(run / "task.yaml")
    name = "x/../../../victim"
    (run / "task.yaml").write_text(overlay.dump({**card, "splits": {name: name}}))
    config = overlay.read(run / "config.yaml")
    data = Path(shutil.copytree(config["data"]["path"], place / "got" / "data" / "deep"))
    (data / "x").mkdir()
    shutil.copyfile(data / "test.jsonl", place / "got" / "victim.jsonl")
    shutil.copyfile(data / "test.jsonl", place / "elsewhere")
    before = {path: path.read_bytes() for path in place.rglob("*.jsonl") if not path.is_relative_to(run)}
    with pytest.raises(BadInput):
        seqreg("evaluate", run, f"data.path={data}", cwd=place)
    assert {path: path.read_bytes() for path in place.rglob("*.jsonl") if not path.is_relative_to(run)} == before


@pytest.mark.parametrize("where", ["crash", "crash/step-1"])
def test_a_crash_that_is_elsewhere_is_not_replayed(where: str, place: Path) -> None:
    run = place / "got" / "run"
    (place / "elsewhere" / "step-1").mkdir(parents=True)
    (run / where).parent.mkdir(exist_ok=True)
    (run / where).symlink_to(place / "elsewhere" / ("step-1" if "step" in where else ""))
    with pytest.raises(BadInput, match="leads out of"):
        replay(run / "crash" / "step-1")


def test_a_crash_with_names_and_links_that_lead_out_is_not_replayed(place: Path) -> None:
    folder = place / "got" / "run" / "crash" / "step-1"
    folder.mkdir(parents=True)
    names = (nonfinite.BATCHES, nonfinite.REPORT, nonfinite.RNG_STATE)
    for name in names:
        (folder / name).symlink_to(place / SECRET)
    secret = place / SECRET
    entry = {"size": secret.stat().st_size, "sha256": digest(secret)}
    watch.opened = []
    for files in ({f"../../../../{SECRET}": entry}, dict.fromkeys(names, entry)):
        manifest = {"files": {**files, **dict.fromkeys(names, entry)}}
        (folder / checkpoints.MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(BadInput, match=r"elsewhere|leads out of"):
            replay(folder)
