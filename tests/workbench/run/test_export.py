"""`seqreg export`: what leaves a run's folder. The hub is a stand-in of its client's interface: nothing is sent."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import HfApi
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from seqreg.errors import BadInput
from seqreg.workbench.config import cards, overlay, run_config
from seqreg.workbench.run import checkpoints, export
from seqreg.workbench.run.train import train
from seqreg.workbench.text.atomic_files import ASIDE
from tests.helpers import sample_files


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    data = sample_files.folder(folder / "data", cards.load("xsum")[0])
    settings = [*sample_files.tiny("bart", data), "logging.tensorboard=false", f"output={folder / 'run'}"]
    train(run_config.resolve("xsum", overrides=settings))
    return folder / "run"


class HubStandIn:
    """A stand-in for `huggingface_hub.HfApi`: a folder is the hub. Calls must fit the real signatures."""

    root: Path
    repositories: dict[str, bool | None]

    def create_repo(self, *words: Any, **options: Any) -> str:
        given = inspect.signature(HfApi.create_repo).bind(self, *words, **options).arguments
        assert given["exist_ok"]
        if "/" not in given["repo_id"]:
            raise ValueError("401 Client Error\nmore")
        self.repositories.setdefault(given["repo_id"], given["private"])
        return f"https://hub/{given['repo_id']}"

    def upload_folder(self, **options: Any) -> None:
        given = inspect.signature(HfApi.upload_folder).bind(self, **options).arguments
        shutil.copytree(given["folder_path"], self.root / given["repo_id"], dirs_exist_ok=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[HubStandIn]:
    HubStandIn.root, HubStandIn.repositories = tmp_path / "hub", {}
    monkeypatch.setattr(huggingface_hub, "HfApi", HubStandIn)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return HubStandIn


def test_an_exported_folder_is_a_model_with_its_card_and_no_more(run: Path, tmp_path: Path) -> None:
    names = export.export(run, tmp_path / "model")
    there = {str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert there == set(names)
    assert {"README.md", "config.json", "config.yaml", "model.safetensors", "tokenizer.json", "metrics.json"} <= there
    assert not [name for name in there if "predictions" in name or name == "run.json" or "checkpoint" in name]
    model, source = (AutoModelForSeq2SeqLM.from_pretrained(place) for place in (tmp_path / "model", run))
    assert all(map(bool, ((a == b).all() for a, b in zip(model.parameters(), source.parameters(), strict=True))))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == model.config.vocab_size


def test_what_is_exported_names_no_place_of_this_machine(run: Path, tmp_path: Path, hub: type[HubStandIn]) -> None:
    moved = Path(shutil.copytree(run, tmp_path / "run"))
    config = overlay.read(moved / "config.yaml")
    config["data"]["path"], config["model"]["name"] = "/home/ann/my news", "/home/ann/models/bart"
    config["model"] |= {"architecture": None, "settings": {}}
    (moved / "config.yaml").write_text(overlay.dump(config))
    (moved / "README.md").write_text(f"Fine-tuned from /home/ann/models/bart, in {moved}.")
    stored = json.loads((moved / "metrics.json").read_text())
    (moved / "metrics.json").write_text(json.dumps({**stored, "soup": {"runs": [{"folder": "../ann/one"}]}}))
    inner = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**inner, "_name_or_path": "/home/ann/models/bart"}))
    record = json.loads((moved / "run.json").read_text())
    record["files"] |= {"config.json": checkpoints.listing(moved)["config.json"]}
    (moved / "run.json").write_text(json.dumps(record))
    export.export(moved, tmp_path / "model")
    export.push_to_hub(moved, "me/model", private=True)
    for place in (tmp_path / "model", tmp_path / "hub" / "me" / "model"):
        exported = overlay.read(place / "config.yaml")
        assert (exported["data"]["path"], exported["model"]["name"]) == ("my news", "bart")
        assert (place / "README.md").read_text() == "Fine-tuned from bart, in run."
        for path in place.rglob("*"):
            text = b"" if path.is_dir() else path.read_bytes()
            assert not [piece for piece in (b"/home/ann", b"../ann", os.fsencode(tmp_path)) if piece in text], path


def test_the_card_of_a_run_names_no_place_of_this_machine(run: Path) -> None:
    assert str(run.parent) not in (run / "README.md").read_text()


def test_an_export_that_is_there_is_left_alone_and_anything_else_too(run: Path, tmp_path: Path) -> None:
    names = export.export(run, tmp_path / "model")
    assert export.export(run, tmp_path / "model") == names
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="choose a new folder"):
        export.export(run, tmp_path / "model")
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert export.export(run, tmp_path / "empty") == names
    assert not list(tmp_path.rglob(f"{ASIDE}*"))


def test_a_run_without_one_of_its_files_is_refused_and_nothing_is_written(run: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(run, tmp_path / "broken"))
    (broken / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"tokenizer\.json is missing"):
        export.export(broken, tmp_path / "model")
    assert os.listdir(tmp_path) == ["broken"]


def test_others_may_read_a_model_where_the_umask_lets_them(run: Path, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        (folder := tmp_path / "aside").mkdir()
        shutil.copytree(run, folder, dirs_exist_ok=True)
        (folder / "model.safetensors").chmod(0o600)  # as safetensors writes it
        checkpoints.publish(folder, tmp_path / "published")
        export.export(run, tmp_path / "model")
    finally:
        os.umask(old)
    for name in ("model.safetensors", "config.json", "README.md"):
        for place in ("published", "model"):
            assert (tmp_path / place / name).stat().st_mode & 0o777 == 0o644, (place, name)


def test_what_is_pushed_is_what_is_exported(run: Path, tmp_path: Path, hub: type[HubStandIn]) -> None:
    names = export.exported(run)
    assert export.push_to_hub(run, "me/model", private=True) == "https://hub/me/model"
    assert hub.repositories == {"me/model": True}
    pushed = tmp_path / "hub" / "me" / "model"
    assert {str(path.relative_to(pushed)) for path in pushed.rglob("*") if path.is_file()} == set(names)
    assert (pushed / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    assert (pushed / "README.md").read_text().startswith("---\nlibrary_name: transformers")


def test_nothing_is_pushed_by_training(run: Path) -> None:
    assert not json.loads((run / "run.json").read_text())["settings"].get("push_to_hub")


def test_what_cannot_be_exported_is_one_line(
    run: Path, tmp_path: Path, hub: type[HubStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match="--push-to-hub model: 401 Client Error: is the name right"):
        export.push_to_hub(run, "model", private=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(BadInput, match="choose a new folder"):
        export.export(run, tmp_path / "full")
    broken = Path(shutil.copytree(run, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"other")
    with pytest.raises(BadInput, match="its model is not the one that was trained"):
        export.export(broken, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInput, match="HF_HUB_OFFLINE=1 is set"):
        export.push_to_hub(run, "me/model", private=True)
