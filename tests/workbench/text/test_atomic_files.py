"""Files and folders that are written aside, and what is refused: links, names that lead out, disks that are full."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

import pytest

from seqreg.errors import BadInput, DiskError
from seqreg.workbench.text import atomic_files
from seqreg.workbench.text.atomic_files import ASIDE, STAGE


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_new_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), atomic_files.staged_folder(tmp_path / "new") as stage:
        (stage / "half").write_text("a")
        raise ZeroDivisionError
    assert names(tmp_path) == []
    with atomic_files.staged_folder(tmp_path / "new") as stage:
        (stage / "a").write_text("a")
        assert not (tmp_path / "new").exists()
    assert names(tmp_path) == ["new", "new/a"]


def test_what_a_killed_process_left_aside_is_written_again(tmp_path: Path) -> None:
    (tmp_path / f"{STAGE}-new").mkdir()
    (tmp_path / f"{STAGE}-new" / "half").write_text("a")
    with atomic_files.staged_folder(tmp_path / "new") as stage:
        (stage / "a").write_text("a")
    assert names(tmp_path) == ["new", "new/a"]


def test_files_of_a_folder_are_replaced_and_those_of_nobody_stay(tmp_path: Path) -> None:
    for name in ("notes.txt", "old", "a"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "old").write_text("mine")
    with atomic_files.staged_folder(tmp_path, ["old", "inner/old", "a", "never there"]) as stage:
        (stage / "a").write_text("new")
    assert names(tmp_path) == ["a", "notes.txt"]
    assert ((tmp_path / "a").read_text(), (tmp_path / "notes.txt").read_text()) == ("new", "mine")


def test_a_stage_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("mine")
    (tmp_path / f"{STAGE}-new").symlink_to(tmp_path / "mine")
    with atomic_files.staged_folder(tmp_path / "new") as stage:
        (stage / "a").write_text("new")
    assert (tmp_path / "mine" / "a").read_text() == "mine"


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    with atomic_files.staged_folder(tmp_path / "new") as stage:
        (stage / "a").write_text("a")
        with pytest.raises(BadInput, match="another process is writing there"):
            with atomic_files.staged_folder(tmp_path / "new"):
                pass
    assert names(tmp_path) == ["new", "new/a"]


def test_a_file_is_the_old_or_the_new_one_and_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "a").symlink_to(tmp_path / "mine")
    (tmp_path / f"{ASIDE}a").write_text("of a process that was killed")
    atomic_files.write_text(tmp_path / "a", "new")
    assert ((tmp_path / "a").read_text(), (tmp_path / "mine").read_text()) == ("new", "mine")
    with contextlib.suppress(ZeroDivisionError), atomic_files.written_aside(tmp_path / "a") as aside:
        aside.write_text("half")
        raise ZeroDivisionError
    assert (names(tmp_path), (tmp_path / "a").read_text()) == (["a", "mine"], "new")


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "link/x", "a/../../out"])
def test_names_that_lead_out_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "out").write_text("mine")
    (tmp_path / "run" / "link").symlink_to(tmp_path)
    for use in (atomic_files.inside, lambda folder, some: atomic_files.remove_files(folder, [some])):
        with pytest.raises(BadInput, match="leads out of"):
            use(tmp_path / "run", name)
    assert (tmp_path / "out").read_text() == "mine"


def test_deleting_a_link_leaves_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "mine")
    atomic_files.remove_files(tmp_path / "run", ["link", "never there"])
    assert names(tmp_path) == ["mine", "run"]


def test_a_full_disk_is_named_with_path_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    line = rf"{re.escape(str(tmp_path / 'a'))}: No space left on device: [\d,]+ bytes free, about 4 needed"
    with pytest.raises(DiskError, match=line):
        atomic_files.write_text(tmp_path / "a", "text")
    with pytest.raises(DiskError, match=r"new: No space left on device: [\d,]+ bytes free, about 9 needed"):
        with atomic_files.staged_folder(tmp_path / "new", needed=9) as stage:
            (stage / "a").write_text("a")
    assert names(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc")
def test_a_file_system_that_holds_no_files_is_one_line() -> None:
    with pytest.raises(DiskError, match=r"^/proc/x: No such file or directory"):
        with atomic_files.staged_folder(Path("/proc/x")):
            pass
    with pytest.raises(DiskError, match=r"^/proc/x\.txt: No such file or directory"):
        atomic_files.write_text(Path("/proc/x.txt"), "text")


@pytest.mark.parametrize("name", ["$HOME/x", "~/x", "${HOME}/x"])
def test_names_that_the_shell_has_not_spelt_out_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    with pytest.raises(BadInput, match=r"would be made here: write /home/ann/x"):
        atomic_files.writable(name, "output=")
    atomic_files.writable("$5 runs/x", "output=")
