"""All commands: `--json` is one document alone on the standard output, help teaches, wrong paths are told at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from seqreg import __version__
from seqreg.cli import main as cli
from seqreg.workbench.config import run_config
from seqreg.workbench.run import train
from tests.helpers import fake_comparison, forked_process, tiny_tasks
from tests.helpers.tiny_tasks import seqreg

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a run, a comparison, a plan of a chain, and two files of text."""
    folder = tmp_path_factory.mktemp("commands")
    tiny_tasks.plan(folder, "colour", "size")
    settings = [f"task={folder / 'colour.yaml'}", f"data.path={folder / 'colour'}", f"model.name={folder / 'bert'}"]
    settings += [*tiny_tasks.SHORT, f"output={folder / 'run'}"]
    train.train(run_config.resolve("glue", terms=["r3f"], overrides=settings))
    fake_comparison.comparison(folder / "compare", {"r3f": 1.0}, seeds="2", curves=False)
    (folder / "a.txt").write_text("one two\nthree\n")
    (folder / "b.txt").write_text("one\nthree four\n")
    (folder / "broken.yaml").write_text((folder / "plan.yaml").read_text().replace('/size"', '/gone"'))
    return folder


def strictly(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


TRAINED = "glue task=colour.yaml data.path=colour model.name=./bert".split() + tiny_tasks.SHORT
PRINTED = {
    "train": ([*TRAINED, "output=json"], {"scores", "train", "method", "versions", "output"}),
    "evaluate": (["run"], {"scores", "train", "method", "versions"}),
    "predict": (["run", "a.txt", "-o", "c.txt"], {"predictions", "output"}),
    "rouge": (["a.txt", "b.txt"], {"means", "intervals", "counts", "signature"}),
    "check": ([*TRAINED, "-t", "r3f"], {"title", "settings", "data", "loss", "summary"}),
    "list": ([], {"recipes", "tasks", "terms"}),
    "new-task": (["colour/train.jsonl", "--output", "new.yaml"], {"card", "command", "columns", "labels"}),
    "show": (["run", "r3f"], {"files", "runs"}),
    "fairseq-dir": ([], {"folder"}),
    "compare": (["quickstart", "-t", "r3f", "--seeds", "2", "-o", "compare", "--collect"], {"kind", "values"}),
    "advise": (["./bert", "-t", "r3f"], {"terms"}),
    "export": (["run", "-o", "exported"], {"output", "files"}),
    "soup": (["run", "--interpolate", "0.5", "-o", "soup"], {"kind", "runs", "start", "alpha", "output"}),
    "report": (["compare"], {"written"}),
    "calibrate": (["run", "--limit", "20"], {"kind", "values"}),
    "robustness": (["run", "--noise", "order", "--draws", "1", "--limit", "8"], {"kind", "values"}),
    "probe": (["run", "--rows", "20"], {"kind", "values"}),
    "chain": (["plan.yaml", "--rows", "20", "--output", "chain"], {"kind", "values"}),
    "shift": (["run", "--to", "colour.yaml", "data.path=colour", "--share", "0"], {"kind", "values"}),
}


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_json_is_one_document_alone_on_the_standard_output(name: str, place: Path) -> None:
    words, keys = PRINTED[name]
    found = strictly(seqreg(name, *words, "--json", cwd=place).stdout)
    assert keys <= set(found)


def test_every_command_has_json() -> None:
    assert set(PRINTED) | {"replay", "quickstart", "serve", "launch"} == set(COMMANDS), "a command that nobody walks"
    for name, command in COMMANDS.items():
        if name == "launch":  # it hands the options of another command on
            continue
        assert any("--json" in option.opts for option in command.params), name


def test_predictions_as_jsonl(place: Path) -> None:
    lines = seqreg("predict", "run", "a.txt", "--json", cwd=place).stdout.splitlines()
    assert [set(strictly(line)) for line in lines] == [{"source", "prediction", "probabilities"}] * 2


def test_a_replay_as_json_has_no_nan(tmp_path: Path) -> None:
    term = "terms.faulty={term: tests.helpers.nonfinite_term.Faulty, at: [1], how: loss}"
    run = forked_process.train(tmp_path / "run", "optimisation.max_steps=3", term)
    assert run.wait() == 0, run.text()
    found = strictly(
        seqreg("replay", tmp_path / "run" / "crash" / "step-2", "--json", "--trust-remote-code", cwd=tmp_path).stdout
    )
    assert {"micro_batch", "part", "value", "finite"} == set(found["parts"][0])
    assert any(one["value"] is None and not one["finite"] for one in found["parts"])


def test_json_of_what_is_not_there_yet_is_refused(place: Path) -> None:
    words = ["compare", "quickstart", "-t", "r3f", "-o", "new", "--launcher", "print", "--json"]
    assert "there is no result yet" in seqreg(*words, cwd=place, code=2).stderr
    assert not (place / "new").exists()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_says_what_for_and_shows_how(name: str) -> None:
    text = COMMANDS[name].help
    aim = text.split("\n\n")[0]
    assert aim.endswith((".", "temperature.")), aim
    assert len(aim) < 140
    assert "\n" not in aim
    given = " [^ ]+" if name not in ("list", "fairseq-dir") else ""
    assert re.search(rf"seqreg {name}{given}", text), "an example with its arguments"


def test_the_version_and_python_m_seqreg(tmp_path: Path) -> None:
    for words in (["-m", "seqreg", "--version"], ["-m", "seqreg", "--version"]):
        found = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True)
        assert found.stdout == f"seqreg {__version__}\n"


def test_shells_complete_commands_recipes_and_terms() -> None:
    def completed(words: str, place: int) -> list[str]:
        asked = {"_SEQREG_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(place)}
        code = "from seqreg.cli import main as cli; cli.app(prog_name='seqreg')"
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **asked}, capture_output=True, text=True
        )
        return sorted(found.stdout.split())

    assert completed("seqreg ro", 1) == ["robustness", "rouge"]
    assert completed("seqreg train giga", 2) == ["gigaword"]
    assert completed("seqreg train gigaword --terms r", 4) == ["r3f", "r4f", "rdrop", "roast"]


WRONG = {
    "train nothing.yaml": "nothing.yaml: no such file",
    "train nothing": "unknown recipe 'nothing'",
    "train gigaword -t nothing.yaml": "nothing.yaml: no such file",
    "train gigaword -t r3f data.path=gone": "data.path=gone: no such file or folder",
    "train quickstart -t r3f model.architecture=null model.name=./gone": "model.name=./gone: no such folder",
    "train quickstart -t r3f output=a.txt": "output=a.txt: a.txt is a file and in the way",
    "quickstart nothing.yaml": "nothing.yaml: no such file",
    "check gigaword -t r3f data.path=gone": "data.path=gone: no such file or folder",
    "check nothing.yaml": "nothing.yaml: no such file",
    "evaluate gone": "gone: no such folder",
    "evaluate run --data gone.jsonl": "gone.jsonl: no such file",
    "evaluate run data.path=gone": "data.path=gone: no such file or folder",
    "predict gone a.txt": "gone: no such folder",
    "predict run gone.txt": "gone.txt: no such file",
    "serve run gone": "gone: no such folder",
    "serve run --host 0.0.0.0": "--host 0.0.0.0: other machines could reach the models there",
    "advise ./gone": "./gone: no such folder",
    "advise ./bert --data gone.csv": "'gone.csv' does not exist",
    "export gone -o x": "gone: no such folder",
    "launch gone": "gone: no command of seqreg",
    "rouge gone.txt a.txt": "gone.txt: cannot be read",
    "replay gone": "gone: no such folder",
    "new-task gone.csv": "gone.csv: ",
    "show gone": "'gone' is no term, task, recipe or folder",
    "compare gigaword -t r3f data.path=gone": "data.path=gone: no such file or folder",
    "compare nothing.yaml -t r3f": "nothing.yaml: no such file",
    "report gone": "gone: not a comparison of seqreg",
    "calibrate gone": "gone: no such folder",
    "calibrate run data.path=gone": "data.path=gone: no such file or folder",
    "robustness run gone": "gone: no such folder",
    "robustness run data.path=gone": "data.path=gone: no such file or folder",
    "probe gone": "gone: no such folder",
    "probe run --tasks gone.yaml": "gone.yaml",
    "chain gone.yaml": "gone.yaml",
    "chain broken.yaml": "gone: no such file or folder",
    "soup gone -o x": "gone: no such folder",
    "soup run --interpolate half -o x": "--interpolate half: expected a number from 0 to 1, or 'best'",
    "shift gone --to colour.yaml": "gone: no such folder",
    "shift run --to gone.yaml": "gone.yaml: no such file",
    "shift run --to colour.yaml data.path=gone": "data.path=gone: no such file or folder",
}
LIGHT = """
import sys
from seqreg.cli import main as cli
for words in sys.stdin.read().splitlines():
    sys.argv = ["seqreg", *words.split()]
    try:
        cli.main()
    except SystemExit as ended:
        heavy = [name for name in ("torch", "transformers", "datasets", "matplotlib") if name in sys.modules]
        print(ended.code, heavy, file=sys.stderr)
"""


def test_wrong_paths_are_told_before_anything_slow_is_imported(place: Path, tmp_path: Path) -> None:
    """Which takes seconds; without it a command takes a few tenths."""
    assert {words.split()[0] for words in WRONG} == set(COMMANDS) - {"list", "fairseq-dir"}
    for name in ("run", "colour", "colour.yaml", "broken.yaml", "a.txt"):
        copy = shutil.copytree if (place / name).is_dir() else shutil.copy
        copy(place / name, tmp_path / name)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    result = subprocess.run(
        [sys.executable, "-c", LIGHT], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        input="\n".join(WRONG), capture_output=True, check=False,
    )  # fmt: skip
    lines = result.stderr.splitlines()
    assert len(lines) == 2 * len(WRONG), result.stderr
    for (words, message), said, ended in zip(WRONG.items(), lines[::2], lines[1::2], strict=True):
        assert message in said, words
        assert ended == "2 []", words
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_warnings_are_one_line_without_source_paths_once_and_by_one_process(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("你好世界\n", encoding="utf-8")
    plain = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    for further, lines in (({}, 1), ({"RANK": "1", "WORLD_SIZE": "2"}, 0), ({"RANK": "1"}, 1)):
        result = subprocess.run(
            [sys.executable, "-m", "seqreg", "rouge", "a.txt", "a.txt"], cwd=tmp_path, capture_output=True, text=True,
            env={**plain, "PYTHONPATH": str(ROOT), **further}, check=True,
        )  # fmt: skip
        said = result.stderr.splitlines()
        assert len(said) == lines
        assert all(line.startswith("seqreg: warning: 1 of 1 examples") for line in said)
        assert all("--tokenizer unicode" in line and ".py" not in line for line in said)


def test_a_warning_is_said_once(tmp_path: Path) -> None:
    code = (
        "import warnings; from seqreg.workbench.text.terminal import show_warnings; show_warnings(); "
        "warnings.simplefilter('always'); [warnings.warn('two\\nlines') for _ in range(3)]"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stderr == "seqreg: warning: two\\nlines\n"
