"""Imports point one way between and inside the packages, folders stay small, and importing seqreg is light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "seqreg"
FILES = sorted(ROOT.rglob("*.py"))

# A module may import from its own layer and from the layers before it.
CORE = {
    "mathematics": "version errors settings losses divergences noise schedules",
    "engines": "engines",
    "passes": "overrides fused forward context objective spectral_norm",
    "term": "term ascent diagnostics smoothness",
    "updates": "selective_update",
    "criterion": "criterion advice",
}
"""The modules and folders of the core, which needs torch alone, by layer."""
LAYERS = [
    "mathematics", "engines", "passes", "term", "terms", "updates", "criterion", "build", "package", "integrations",
    "metrics",
    "workbench", "workbench.text", "workbench.config", "workbench.data", "workbench.scores", "workbench.run",
    "studies", "studies.common", "studies.compare", "studies.calibrate", "studies.robustness", "studies.collapse",
    "cli",
]  # fmt: skip
INDEPENDENT = {
    "studies.compare",
    "studies.calibrate",
    "studies.robustness",
    "studies.collapse",
}
"""Layers that do not import each other."""
APART = [INDEPENDENT, {"terms", "updates", "criterion"}]
FRAMEWORKS = {"transformers", "accelerate", "fairseq", "datasets", "peft", "trl"}
LARGEST_FOLDER = 20
TEXT = (".py", ".md", ".yaml", ".sh", ".html")


def layer(parts: tuple[str, ...]) -> str:
    """The layer of a module given as path parts below seqreg."""
    if not parts:
        return "package"
    if parts[0] in ("workbench", "studies"):
        return ".".join(parts[:2])
    if parts[0] in ("terms", "integrations", "metrics", "cli", "build"):
        return parts[0]
    if parts[0] == "__main__":
        return "cli"
    return next(name for name, modules in CORE.items() if parts[0] in modules.split())


def imported(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports; `from seqreg import noise` counts as seqreg.noise."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inner = ROOT.parent / Path(*node.module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                names.add(f"{node.module}.{alias.name}" if is_module else node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    here = layer(parts)
    for name in imported(path):
        top, *rest = name.split(".")
        if top == "seqreg":
            there = layer(tuple(rest))
            assert LAYERS.index(there) <= LAYERS.index(here), f"{here} must not import {name}"
            assert here == there or not any({here, there} <= layers for layers in APART), f"{here}: {name}"
            assert not (here == "terms" and there == "terms"), f"a term never imports another: {name}"
            assert not (here != "package" and there == "package"), f"import the module, not the package: {name}"
        elif here in (*CORE, "terms", "build", "package"):
            assert top == "torch" or top in sys.stdlib_module_names, f"{here} imports only torch, not {name}"
        if top in FRAMEWORKS:
            assert LAYERS.index(here) >= LAYERS.index("integrations"), f"{here} must not import {name}"
            assert here != "cli", f"{here} must not import {name}"
        inside = parts[:2] == ("integrations", "fairseq_plugin")
        if inside:  # it must work where fairseq is installed, and transformers is not
            assert top not in FRAMEWORKS - {"fairseq"}, f"the fairseq plug-in must not import {name}"
            assert not name.startswith("seqreg.integrations.hf"), f"the fairseq plug-in must not import {name}"
        else:
            assert top not in ("fairseq", "hydra", "omegaconf"), f"only the fairseq plug-in imports {name}"


def test_every_package_has_a_layer() -> None:
    assert {layer(path.relative_to(ROOT).parent.parts or ("errors",)) for path in FILES} <= set(LAYERS)


def test_the_package_imports_nothing_of_the_repository_around_it() -> None:
    around = {"benchmarks", "research", "tests", "tools"}
    assert [str(path) for path in FILES if around & {name.split(".")[0] for name in imported(path)}] == []


def test_folders_are_small() -> None:
    sizes = Counter(path.parent.relative_to(ROOT) for path in FILES if path.name != "__init__.py")
    del sizes[Path("terms")]
    assert {str(folder): size for folder, size in sizes.items() if size > LARGEST_FOLDER} == {}


def test_importing_seqreg_is_light() -> None:
    heavy = ("numpy", "transformers", "fairseq", "datasets", "accelerate")
    code = f"import sys, seqreg; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_type_name_twice() -> None:
    names = Counter(
        node.name for path in FILES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


PRIVATE_WORDS = re.compile(
    r"\b(gone on with|goes? on\b(?! the| a )|anatomy|dice|rooms?|shel(f|ves)|begins? anew|trainings)\b", re.I
)
"""Words that were once ours alone; the field says resume, diagnostics, rng, module, run."""


def test_the_words_are_those_of_the_field() -> None:
    folders = ("seqreg", "benchmarks", "research", "docs", "recipes", "tasks", "tools")
    files = [path for folder in folders for path in (ROOT.parent / folder).rglob("*") if path.suffix in TEXT]
    files += [ROOT.parent / name for name in ("README.md", "CONTRIBUTING.md")]
    found = [
        f"{path.relative_to(ROOT.parent)}:{number}: {match.group()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in PRIVATE_WORDS.finditer(line)
    ]
    assert found == []


def test_the_map_names_every_module() -> None:
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    left_out = ("__init__.py", "__main__.py")
    around = [path for folder in ("benchmarks", "research") for path in (ROOT.parent / folder).glob("*.py")]
    modules = [path for path in [*FILES, *around] if path.name not in left_out and path.parent.name != "terms"]
    assert [str(path) for path in modules if f"`{path.stem}`" not in text] == []
