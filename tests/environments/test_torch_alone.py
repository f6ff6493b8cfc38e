"""`pip install seqreg`, torch alone: `bash tests/environments.sh torch`."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from seqreg.criterion import Criterion
from seqreg.terms.jachess import JacHess
from seqreg.terms.r3f import R3F
from seqreg.terms.smart import SMART

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_model.py"))


def _without(*modules: str) -> bool:
    return all(importlib.util.find_spec(name) is None for name in modules)


def test_nothing_but_torch_is_installed() -> None:
    assert _without("numpy", "transformers", "accelerate", "pydantic", "typer", "yaml")


@pytest.mark.parametrize("term", [R3F(scale=0.1), SMART(), JacHess()], ids=lambda term: term.name)
def test_a_loop_with_a_term_trains(term: R3F | SMART | JacHess, monkeypatch: pytest.MonkeyPatch) -> None:
    main = EXAMPLE["main"]
    monkeypatch.setitem(main.__globals__, "Criterion", lambda *_: Criterion(term))
    losses = main(20)
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize(
    ("words", "extra", "code"),
    [(["-m", "seqreg", "list"], "recipes", 2), (["-c", "import seqreg.integrations.hf"], "hf", 1),
     (["-c", "import seqreg; seqreg.attach"], "hf", 1), (["-c", "import seqreg.metrics"], "recipes", 1)],
    ids=["command", "hf", "attach", "metrics"],
)  # fmt: skip
def test_what_needs_an_extra_says_which(words: list[str], extra: str, code: int) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].endswith(f"not installed: pip install 'seqreg[{extra}]'")
    assert done.stderr.count("\n") == 1 or code == 1
