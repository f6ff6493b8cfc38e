"""The scripts of the recipes: in an installed environment they install nothing, and one call prints one table."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from seqreg.workbench.config import lookup, overlay, run_config
from tests.helpers import sample_files

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.name for path in (ROOT / "recipes").glob("*.sh") if not path.name.startswith("_"))
QUICK = [
    "optimisation.max_steps=2", "optimisation.per_device_train_batch_size=2", "evaluation.resamples=10",
    "evaluation.per_device_eval_batch_size=8",
    "logging.diagnostics_steps=0", "logging.tensorboard=false",
]  # fmt: skip


class Clone:
    """A copy of the repository beside an environment in which everything is installed, and pip is out of order."""

    def __init__(self, folder: Path) -> None:
        self.root, self.environment = folder / "clone", folder / "environment"
        self.root.mkdir()
        for name in ("seqreg", "recipes", "research", "tasks", "tools"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.cfg", "setup.py", "constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        self.pip = folder / "pip.log"
        self.command("python", f'if [ "$1 $2" = "-m pip" ]; then echo "$@" >> {self.pip}; exit $PIP; fi', "")
        self.command("seqreg", "", "-m seqreg")
        assert self.bash('source tools/environment.sh ""', "-c", PIP="0").returncode == 0
        assert len(self.pip.read_text().splitlines()) == 1

    def command(self, name: str, first: str, words: str) -> None:
        path = self.environment / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} {words} "$@"\n')
        path.chmod(0o755)

    def bash(self, *words: str, **further: str) -> subprocess.CompletedProcess[str]:
        """Run a script; `-c` at the end makes it a command."""
        if words[-1] == "-c":
            words = ("-c", *words[:-1])
        own = {
            "VIRTUAL_ENV": str(self.environment), "PATH": f"{self.environment / 'bin'}:{os.environ['PATH']}",
            "PIP": "1", "PIP_NO_INDEX": "1", "PYTHONPATH": str(self.root), "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1", "COLUMNS": "120", **further,
        }  # fmt: skip
        return subprocess.run(
            ["bash", *words], cwd=self.root, env={**os.environ, **own}, capture_output=True, text=True, timeout=300
        )

    def runs(self) -> set[str]:
        return {str(path.parent.relative_to(self.root / "runs")) for path in self.root.glob("runs/*/*/metrics.json")}


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "quickstart.sh"])
def test_a_script_runs_with_a_term_a_variant_and_a_setting(script: str, clone: Clone, tmp_path: Path) -> None:
    recipe = script.removesuffix(".sh")
    variants = ["rte", "tiny"] if recipe == "glue" else ["tiny"]
    card = run_config.resolve(recipe, variants=variants).card
    folder = sample_files.folder(tmp_path / "data", card, train=12, held=3)
    size = sample_files.TINY_BART if card.kind == "generation" and recipe != "sft" else sample_files.TINY_BERT
    settings = [f"data.path={folder}", f"model.settings={size}", *QUICK]
    done = clone.bash(f"recipes/{script}", "r3f", *variants, *settings)
    assert done.returncode == 0, done.stderr
    assert len(clone.pip.read_text().splitlines()) == 1  # the installation, and nothing since
    assert clone.runs() == {f"{recipe}-{'-'.join(variants)}/r3f"}
    assert done.stdout.count("scores in percent") == 1
    assert done.stderr.count("Everything is in") == 1
    assert "A toy from scratch" in done.stderr


@pytest.mark.slow
def test_the_quickstart_runs_with_a_term_and_a_setting(clone: Clone) -> None:
    recipe = clone.root / "recipes" / "quickstart.yaml"
    text = recipe.read_text()
    recipe.write_text(text.replace("steps: 240", "steps: 3").replace("d_model: 96", "d_model: 16"))
    card = clone.root / "tasks" / "synthetic_news.yaml"
    card.write_text(
        card.read_text().replace("train: 3000, validation: 200, test: 200", "train: 20, validation: 4, test: 4")
    )
    done = clone.bash("recipes/quickstart.sh", *QUICK, "data.limit={validation: 4, test: 4}")
    assert done.returncode == 0, done.stderr
    assert clone.runs() == {f"quickstart-people/{name}" for name in ("pretrained", "baseline", "r3f")}
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("│")] == [
        "pretrained",
        "baseline",
        "r3f",
    ]
    assert "One seed of a toy" in done.stdout
    again = clone.bash("recipes/quickstart.sh", "rdrop", "--json", *QUICK, "data.limit={validation: 4, test: 4}")
    assert again.returncode == 0, again.stderr
    assert "pretrained: this run is finished, nothing to do" in again.stderr
    assert "quickstart-people/rdrop" in clone.runs()
    assert len(clone.pip.read_text().splitlines()) == 1


@pytest.mark.parametrize("processes", ["8x", "0", "-1", "", " ", "1e3", "1000"])
def test_the_number_of_processes_must_be_a_number(processes: str, clone: Clone) -> None:
    clone.command("seqreg", "echo one process; exit", "")
    done = clone.bash("recipes/gigaword.sh", "r3f", NPROC=processes)
    if processes == "":  # as if it was not set
        assert (done.returncode, done.stdout) == (0, "one process\n")
        return
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"NPROC={processes}: expected a whole number of processes from 1 to 999\n"


def test_arguments_of_a_script_reach_the_command(clone: Clone) -> None:
    """What a script asks of the command: terms, variants and settings in their places, processes and nodes."""
    clone.command("seqreg", 'echo seqreg "$@"; exit', "")
    train = "train gigaword --terms"
    expected = {
        (): f"seqreg {train} baseline\n",
        ("r3f",): f"seqreg {train} r3f\n",
        ("seed=3",): f"seqreg {train} baseline seed=3\n",
        ("r3f", "tiny", "seed=3"): f"seqreg {train} r3f --variant tiny seed=3\n",
    }
    for words, said in expected.items():
        assert clone.bash("recipes/gigaword.sh", *words).stdout == said
    clone.command("python", 'if [ "$2" = research ]; then echo python "$@"; exit; fi', "")
    words = ("noise", "--models", "a b", "--plan")
    assert clone.bash("research/run.sh", *words).stdout == f"python -m research {' '.join(words)}\n"
    started = clone.bash("recipes/gigaword.sh", "r3f", NPROC="8").stdout
    assert started == f"seqreg launch --nproc 8 --max-restarts 0 {train} r3f\n"
    several = {"NNODES": "2", "RDZV_ENDPOINT": "node0:29500", "MAX_RESTARTS": "3"}
    started = clone.bash("recipes/gigaword.sh", "r3f", **several).stdout
    nodes = "--nnodes 2 --rdzv-endpoint node0:29500"
    assert started == f"seqreg launch --nproc 1 --max-restarts 3 {nodes} {train} r3f\n"


@pytest.mark.parametrize(
    ("given", "offline"), [({}, "1"), ({"HF_HUB_OFFLINE": "0"}, "0"), ({"SEQREG_OFFLINE": "0"}, "0")]
)
def test_the_environment_of_the_caller_counts(given: dict[str, str], offline: str, clone: Clone) -> None:
    clone.command("seqreg", "echo $HF_HUB_OFFLINE; exit", "")
    assert clone.bash("recipes/gigaword.sh", "r3f", **given).stdout == f"{offline}\n"


def test_every_recipe_of_a_dataset_has_a_script() -> None:
    tasks = {name: overlay.read(lookup.find("recipes", name))["task"] for name in lookup.names("recipes")}
    assert [f"{name}.sh" for name, task in tasks.items() if not task.startswith("own/")] == SCRIPTS
