"""`pip install seqreg[hf]`, without what the commands need: `bash tests/environments.sh hf` and `hf-4.57`."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import seqreg
from seqreg.integrations.hf import context
from seqreg.terms.r3f import R3F
from seqreg.terms.rdrop import RDrop
from tests.helpers import tiny_models


def test_no_library_of_the_commands_is_installed() -> None:
    assert all(importlib.util.find_spec(name) is None for name in ("datasets", "pydantic", "typer", "rich", "scipy"))


@pytest.mark.parametrize("name", ["bart", "t5", "bart_classifier", "t5_classifier", "roberta", "llama"])
def test_a_term_adds_to_the_gradient(name: str) -> None:
    model, batch = tiny_models.make(name), tiny_models.batch(name)
    model.train()
    report = seqreg.Criterion(R3F(scale=0.1))(context(model, batch, step=0))
    report.total.backward()
    assert float(report.parts["r3f"]) > 0
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad and p.ndim > 1)


def test_terms_are_advised() -> None:
    found = seqreg.advise(tiny_models.make("roberta"), tiny_models.batch("roberta"), [R3F(), RDrop()])
    assert [term.term for term in found.terms] == ["r3f", "rdrop"]


def test_the_command_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-m", "seqreg", "list"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "seqreg: typer, rich not installed: pip install 'seqreg[recipes]'\n"
