"""The documentation is true: its code runs, its links lead somewhere."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from torch.utils.data import DataLoader

from benchmarks import steps as bench_steps
from benchmarks import worker_process
from benchmarks.sizes import SIZES
from seqreg import Cost, Criterion, build_term
from seqreg.build import UPDATES, term_class, term_names
from seqreg.cli.main import app
from seqreg.integrations.hf import r4f
from seqreg.terms.r3f import R3F
from seqreg.workbench.config import cards, lookup, overlay, run_config
from tests.helpers import tiny_models

ROOT = Path(__file__).parents[1]
CARDS = sorted((ROOT / "docs" / "terms").glob("*.md"))
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


def what_the_reader_has(tmp_path: Path) -> dict[str, Any]:
    """The names that the README calls yours."""
    model = tiny_models.make("bart")
    batch = tiny_models.batch("bart")
    rows = [{key: value[row] for key, value in batch.items()} for row in range(3)]
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loader": [batch, batch],
        "micro_batches": [batch, batch],
        "batch": batch,
        "step": 0,
        "dataset": rows,
        "arguments": transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), max_steps=2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
        ),
        "classifier": tiny_models.make("roberta"),
        "folder": tmp_path / "classifier",
    }


def run_blocks(page: str, names: dict[str, Any]) -> None:
    for block in blocks(ROOT / page):
        exec(compile(block, page, "exec"), names)


def test_readme_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("README.md", what_the_reader_has(tmp_path))
    printed = capsys.readouterr().out
    assert re.search(r"^loss [\d.]+ = base [\d.]+ \+ r3f [\d.e-]+$", printed, re.M)
    assert {"part/base", "value/nll", "part/r3f"} <= set(re.findall(r"[a-z]+/\w+", printed))


def test_library_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = what_the_reader_has(tmp_path)
    assert len(blocks(ROOT / "docs" / "library.md")) >= 7
    run_blocks("docs/library.md", names)
    printed = capsys.readouterr().out
    assert "fused" in printed
    assert "r3f/part_over_base" in printed
    assert (tmp_path / "classifier" / "model.safetensors").exists()
    run_blocks("docs/which_term.md", names)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # Lightning's own
def test_the_lightning_example_runs(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning runs this")
    (block,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "library.md").read_text(), re.S)
    names: dict[str, Any] = {"torch": torch}
    exec(compile(block, "docs/library.md", "exec"), names)
    model, batch = tiny_models.make("bart"), tiny_models.batch("bart")
    before = [p.detach().clone() for p in model.parameters()]
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", default_root_dir=tmp_path, **settings)
    trainer.fit(names["Regularized"](model, Criterion(R3F(weight=0.1))), DataLoader([batch] * 2, batch_size=None))
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {"part/base", "part/r3f"} <= set(trainer.logged_metrics)


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    loop = [line for line in blocks(ROOT / "README.md")[0].splitlines() if line]
    assert len([line for line in loop if not line.startswith(("from ", "import "))]) <= 8
    glossary = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    assert len(glossary) <= 40


def test_every_page_is_in_the_index_and_on_the_site() -> None:
    index, site = ((ROOT / name).read_text() for name in ("docs/index.md", "mkdocs.yml"))
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").as_posix()
        if path.parent.name == "results" and path.name != "index.md":  # generated: the index of results has them all
            assert f"({path.name})" in path.with_name("index.md").read_text(), name
            continue
        assert name == "index.md" or f"({name})" in index, name
        assert path.parent.name == "terms" or f"- {name}\n" in site, name


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Criterion" in (tmp_path / "site" / "api" / "index.html").read_text()


def test_every_command_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert commands == set(re.findall(r"`seqreg ([a-z][a-z-]+)", text.partition("## Settings")[0]))


@pytest.mark.parametrize(
    "path", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *CARDS, *RESULTS], ids=str
)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.name)
def test_card_examples_print_what_they_say(path: Path) -> None:
    names = {"model": tiny_models.make("bart"), "batch": tiny_models.batch("bart")}
    (example,) = blocks(path)
    test = doctest.DocTestParser().get_doctest(example, names, path.name, str(path), 0)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert runner.summarize().failed == 0
    assert runner.tries > 3


def test_every_term_has_a_card_with_its_measured_cost() -> None:
    size = SIZES["tiny"]
    model, batch = size.model(), size.batch()
    counted = {
        variant.name: worker_process.count_flops(variant.step(model, batch))
        for variant in bench_steps.variants(presets=False)
    }
    measured = {name: counted[name] / counted[bench_steps.HF] for name in term_names()}
    assert [path.stem for path in CARDS] == term_names() == sorted(measured)
    for path in CARDS:
        text = path.read_text()
        term = build_term(path.stem)
        stated = f"{term.cost.forwards} extra forwards and {term.cost.backwards} extra backwards"
        assert stated in text
        assert f"{measured[path.stem]:.2f} times the floating-point" in text
        assert all(
            heading in text for heading in ("**Formula.**", "**When", "**Cost.**", "**What released", "**Attrib")
        )


@pytest.mark.parametrize("name", term_names())
def test_docstring_states_the_cost(name: str) -> None:
    """The Cost line of the docstring, read with the default number of steps, is what the contract counts."""
    term = build_term(name)
    text = re.search(r"Cost:\n(.*?)\n\n", type(term).__doc__ or "", re.S)
    assert text is not None
    line = " ".join(text.group(1).split())
    if line.startswith("nothing"):
        assert term.cost == Cost(0, 0)
        return
    stated = re.match(r"(.+?) extra forwards?(?: without a graph)?, (.+?) (?:extra )?backwards?\b", line)
    assert stated is not None, line
    attack = getattr(term, "attack", None)
    settings = {"steps": getattr(attack, "steps", 0), "passes": getattr(term, "passes", 0)}
    forwards, backwards = (
        eval(number.replace("no", "0").replace("2 steps", "2 * steps"), settings) for number in stated.groups()
    )
    assert Cost(forwards, backwards) == term.cost


def rows_of_papers() -> list[list[str]]:
    lines = (ROOT / "docs" / "papers.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0] != "paper" and len(row) > 3]  # free arms have three columns, and no settings


@pytest.mark.parametrize("row", rows_of_papers(), ids=lambda row: row[0].partition(",")[0].replace("[", ""))
def test_settings_of_papers_build_the_same_in_python_and_recipes(row: list[str]) -> None:
    names = {kind.__name__: kind for kind in (*map(term_class, term_names()), *UPDATES.values(), Criterion)}
    classifier = tiny_models.make("roberta")
    made = eval(row[1].strip("`"), {**names, "r4f": r4f, "classifier": classifier})
    words = row[2].strip("`").replace("--terms ", "--terms=").split()
    terms = [word.removeprefix("--terms=") for word in words if word.startswith("--terms=")]
    settings = [word for word in words if not word.startswith("--terms=")]
    config = run_config.resolve("glue", variants=["sst2"], terms=terms, overrides=settings).config
    built = [*config.criterion().terms, *filter(None, [config.update()])]
    parts = made if isinstance(made, tuple) else (made,)
    if isinstance(made, Criterion):
        loss = config.loss
        assert (made.loss, made.label_smoothing, made.smoothing) == (loss.loss, loss.label_smoothing, loss.smoothing)
        parts = made.terms
    assert (classifier in parts) == (config.model.head == "r4f")
    wanted = [part for part in parts if part is not classifier]
    assert [type(part) for part in built] == [type(part) for part in wanted]
    assert [vars(part) for part in built] == [vars(part) for part in wanted]
    proofs = re.findall(r"`(tests/[^`]+)`", row[3])
    assert proofs or row[3] == "the same"
    assert all((ROOT / path).exists() for path in proofs)


def test_every_term_and_preset_and_update_has_a_paper() -> None:
    text = " ".join(row[1] for row in rows_of_papers())
    for kind in map(term_class, term_names()):
        assert f"{kind.__name__}(" in text
        assert all(f'{kind.__name__}(preset="{preset}")' in text for preset in kind.presets)
    assert all(f"{kind.__name__}(" in text for kind in UPDATES.values())


def test_the_card_and_the_engine_in_the_docs_are_read() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    card, engine = (
        overlay.parse(example, "docs/recipes.md") for example in re.findall(r"```yaml\n(.*?)```", text, re.S)
    )
    assert cards.parse(card, "docs/recipes.md").evaluations == ["test"]
    words = [f"engine.{key}={json.dumps(value)}" for key, value in engine["engine"].items()]
    assert run_config.resolve("quickstart", overrides=words).config.engine.name == "fsdp2"


def test_readme_lists_every_recipe() -> None:
    text = (ROOT / "README.md").read_text()
    assert all(f"[`{name}`](recipes/{name}.yaml)" in text for name in lookup.names("recipes"))


@pytest.mark.parametrize("name", term_names())
def test_what_a_term_needs_beside_its_module(name: str) -> None:
    """All that a new term lacks is told at once."""
    wanted = {
        "README.md": f"[`{name}`](seqreg/terms/{name}.py)",
        "docs/index.md": f"(terms/{name}.md)",
        f"docs/terms/{name}.md": "**Formula.**",
        "docs/papers.md": f"{term_class(name).__name__}(",
        "docs/support.md": f"| {name} |",
        f"recipes/terms/{name}.yaml": f"{name}:",
    }
    texts = {place: (ROOT / place).read_text() if (ROOT / place).exists() else "" for place in wanted}
    lacking = [f"{place}: {text}" for place, text in wanted.items() if text not in texts[place]]
    assert lacking == [], "add these (docs/support.md: python -m tests.support)"
