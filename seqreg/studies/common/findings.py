"""What a study found, in one form for all of them: a JSON file beside its figures, read by `seqreg report`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput
from seqreg.workbench.text.atomic_files import ASIDE, to_json, write_text

FOLDER = "evidence"
"""In a run's folder, or a comparison's: what was found out about it later."""


def check_own(folder: Path) -> None:
    """Refuse an `evidence` that is a symbolic link: what is written there would be in somebody else's folder."""
    if folder.name == FOLDER and folder.is_symlink():
        raise BadInput(f"{folder}: a symbolic link: remove it, or choose a folder with --output")


@dataclass(frozen=True)
class Table:
    """Numbers and words in columns; a number is shown with as many digits as it deserves by whoever shows it."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Finding:
    """One study and its result.

    Args:
        kind: the command that made it, such as "calibrate"; also the name of its file
        title: for a heading
        command: what repeats it
        summary: plain sentences, each a result with its numbers
        tables: for people
        figures: names of SVG or PNG files in the same folder
        values: all numbers, for programs
    """

    kind: str
    title: str
    command: str
    summary: list[str]
    tables: list[Table] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write it down as `<kind>.json`."""
        check_own(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.kind}.json"
        write_text(path, to_json(asdict(self), indent=1, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Finding:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**found, "tables": [Table(**table) for table in found["tables"]]})
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise BadInput(f"{path}: is not a finding of seqreg ({error})") from None


def findings(folder: Path) -> list[Finding]:
    """All that was found out about a run or a comparison, by name."""
    whole = [path for path in (folder / FOLDER).glob("*.json") if not path.name.startswith(ASIDE)]
    return [Finding.read(path) for path in sorted(whole)]
