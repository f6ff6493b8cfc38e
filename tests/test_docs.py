"""The documentation is true: its code runs, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import zoo

ROOT = Path(__file__).parents[1]


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


def what_the_reader_has(tmp_path: Path) -> dict[str, Any]:
    """The names that the README calls yours."""
    model = zoo.make("bart")
    batch = zoo.batch("bart")
    rows = [{key: value[row] for key, value in batch.items()} for row in range(3)]
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loader": [batch, batch],
        "micro_batches": [batch, batch],
        "dataset": rows,
        "arguments": transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), max_steps=2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
        ),
        "classifier": zoo.make("roberta"),
        "folder": tmp_path / "classifier",
    }


def test_readme_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = what_the_reader_has(tmp_path)
    found = blocks(ROOT / "README.md")
    assert len(found) >= 8
    for block in found:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"^loss [\d.]+ = base [\d.]+ \+ r3f [\d.e-]+$", printed, re.M)
    assert {"part/base", "value/nll", "part/r3f"} <= set(re.findall(r"[a-z]+/\w+", printed))
    assert (tmp_path / "classifier" / "model.safetensors").exists()


def test_the_loop_is_eight_lines() -> None:
    lines = [line for line in blocks(ROOT / "README.md")[0].splitlines() if line]
    assert len([line for line in lines if not line.startswith(("from ", "import "))]) <= 8


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")), ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_readme_lists_every_term() -> None:
    from seqreg.build import term_names

    text = (ROOT / "README.md").read_text()
    assert all(f"[`{name}`](seqreg/terms/{name}.py)" in text for name in term_names())
