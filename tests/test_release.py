"""The release: wheel and sdist hold what is needed, and an installed wheel trains outside of the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from seqreg import __version__

ROOT = Path(__file__).parents[1]
QUICK = [
    "optimisation.max_steps=2", "optimisation.warmup_steps=0", "data.limit={train: 20, validation: 4, test: 4}",
    "evaluation.resamples=10", "evaluation.eval_steps=0", "logging.diagnostics_steps=0", "output=run",
]  # fmt: skip


def _build(kind: str, source: Path, folder: Path) -> Path:
    """Build what is asked for from a folder, as pip and build do, with the setuptools that is here."""
    code = f"import setuptools.build_meta as b; print(b.build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    for name in ("seqreg", "recipes", "tasks"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "setup.py", "MANIFEST.in", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    return _build("sdist", folder / "source", folder)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what the sdist holds, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return _build("wheel", folder / f"seqreg-{__version__}", folder)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _environment(tmp_path_factory.mktemp("environment") / "env", wheel)


def _environment(folder: Path, wheel: Path, *, libraries: bool = True) -> Path:
    """A new environment with a wheel, and with the libraries of this one but for its seqreg."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(list(map(str, command)), check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    if libraries:
        (site / "libraries.pth").write_text(_libraries() + "\n")  # their .pth files are not read
    return folder


def _libraries() -> str:
    """The folder of this environment's libraries."""
    return str(Path(torch.__file__).parents[1])


@pytest.fixture(scope="module")
def clone(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the name of the package, as `git clone` makes it."""
    folder = tmp_path_factory.mktemp("clones")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return (folder / f"seqreg-{__version__}").rename(folder / "seqreg")


def test_a_script_beside_the_clone_imports_the_package(clone: Path, tmp_path: Path) -> None:
    environment = _environment(tmp_path / "env", _build("editable", clone, tmp_path))
    code = (
        "from seqreg import Criterion; from seqreg.workbench.config import lookup; print(len(lookup.names('recipes')))"
    )
    (clone.parent / "script.py").write_text(code)
    recipes = len(list((ROOT / "recipes").glob("*.yaml")))
    assert _run(environment, clone.parent, "python", "script.py").stdout == f"{recipes}\n"
    assert _run(environment, clone.parent, "seqreg", "--version").stdout == f"seqreg {__version__}\n"


@pytest.mark.parametrize(
    ("code", "extra"),
    [("import seqreg.integrations.hf", "hf"), ("import seqreg.__main__ as m; m.main()", "recipes"),
     ("import seqreg.workbench.run.train", "recipes"), ("import seqreg.metrics", "recipes")],
)  # fmt: skip
def test_what_an_extra_brings_is_asked_for_in_one_line(code: str, extra: str, wheel: Path, tmp_path: Path) -> None:
    environment = _environment(tmp_path / "env", wheel, libraries=False)
    done = subprocess.run([environment / "bin" / "python", "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert done.stderr.splitlines()[-1].endswith(f"not installed: pip install 'seqreg[{extra}]'")
    assert ("Traceback" in done.stderr) == ("main" not in code)


def test_the_plain_install_requires_torch_alone(wheel: Path) -> None:
    folder = zipfile.ZipFile(wheel)
    name = next(name for name in folder.namelist() if name.endswith("METADATA"))
    required = [
        line.split(": ")[1] for line in folder.read(name).decode().splitlines() if line.startswith("Requires-Dist")
    ]
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.6"]
    assert 'transformers>=4.57; extra == "hf"' in required


def test_the_wheel_holds_nothing_that_only_serves_the_repository(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"seqreg", f"seqreg-{__version__}.dist-info"}


def _run(environment: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    known = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    known |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [str(environment / "bin" / words[0]), *words[1:]], cwd=cwd, env=known, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_version_is_a_release_and_the_same_everywhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert f"to {__version__}" in (ROOT / "docs" / "upgrading.md").read_text()


def test_the_wheel_holds_every_module_recipe_and_card(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = [
        path for path in (ROOT / "seqreg").rglob("*") if path.suffix in (".py", ".html", ".css", ".js", ".typed")
    ]
    wanted = {path.relative_to(ROOT).as_posix() for path in package}
    wanted |= {
        f"seqreg/{path.relative_to(ROOT).as_posix()}"
        for kind in ("recipes", "tasks")
        for path in (ROOT / kind).rglob("*.yaml")
    }
    assert wanted <= names


def test_wheel_and_sdist_pass_twine_check(wheel: Path, sdist: Path) -> None:
    pytest.importorskip("twine")
    command = [sys.executable, "-W", "ignore", "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("PASSED") == 2


@pytest.mark.slow
def test_an_installed_wheel_trains_outside_of_the_repository(installed: Path, tmp_path: Path) -> None:
    where = _run(installed, tmp_path, "python", "-c", "import seqreg; print(seqreg.__file__)").stdout
    assert Path(where.strip()).is_relative_to(installed)
    assert _run(installed, tmp_path, "seqreg", "--version").stdout == f"seqreg {__version__}\n"
    listed = json.loads(_run(installed, tmp_path, "seqreg", "list", "--json").stdout)
    assert {"quickstart", "ner"} <= {entry["name"] for entry in listed["recipes"]}
    _run(installed, tmp_path, "seqreg", "train", "quickstart", "--terms", "r3f", *QUICK)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["versions"]["seqreg"] == __version__
    assert metrics["train"]["steps"] == 2
    _run(installed, tmp_path, "seqreg", "evaluate", "run")


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_the_sources_are_read_by_every_python_that_is_declared(minor: int) -> None:
    """With the interpreters that are at hand; their libraries are not."""
    assert f"Python :: 3.{minor}\n" in (ROOT / "setup.cfg").read_text()
    places = [*(Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python"), shutil.which(f"python3.{minor}")]
    pythons = [str(place) for place in places if place and _version(str(place)) == f"3.{minor}"]
    if not pythons:
        pytest.skip(f"no Python 3.{minor} on this machine")
    code = (
        "import pathlib, sys\n"
        "for path in pathlib.Path(sys.argv[1]).rglob('*.py'): compile(path.read_text('utf-8'), str(path), 'exec')"
    )
    done = subprocess.run([pythons[0], "-W", "error", "-c", code, str(ROOT / "seqreg")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_oldest_python_is_the_same_everywhere_and_no_pin_asks_for_it() -> None:
    texts = {name: (ROOT / name).read_text() for name in ("setup.cfg", "pyproject.toml", "tools/environment.sh")}
    assert "python_requires = >=3.11\n" in texts["setup.cfg"]
    assert "Python :: 3.10" not in texts["setup.cfg"]
    assert 'target-version = "py311"' in texts["pyproject.toml"]
    assert "sys.version_info < (3, 11)" in texts["tools/environment.sh"]
    assert "Python 3.11 to 3.13" in (ROOT / "README.md").read_text()
    assert "python_version" not in (ROOT / "constraints.txt").read_text()


def _version(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
