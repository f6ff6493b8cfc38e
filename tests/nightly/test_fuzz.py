"""A short run of the fuzzer, what it has found before, and text that tries to get out of its place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import markdown
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqreg.workbench.config import run_config
from seqreg.workbench.run import preflight, train
from seqreg.workbench.run.tensorboard import samples as shown
from seqreg.workbench.scores import results
from seqreg.workbench.scores.evaluate import Scored
from seqreg.workbench.text import escape
from tests.bad_input.table import refused, run, tiny
from tests.fuzz import SHARES, WHOLE, fuzz
from tests.helpers import forked_process

EVIL = "\x1b[31m`|<script>alert(1)</script>\r\n\r\n# big [/red] ![x](http://x) \u202e\ud800"


@pytest.mark.parametrize("kind", SHARES)
def test_no_traceback_no_file_no_hang(kind: str, tmp_path: Path) -> None:
    cases = 4 if kind in WHOLE else 20 if kind in ("model", "own term") else 100
    (tmp_path / "here").mkdir()
    seen = fuzz(kind, cases, seed=7, folder=tmp_path / "here")
    assert seen["refused"] > 0
    assert seen.total() >= cases


FOUND: dict[str, tuple[list[str], str]] = {
    "a model that cannot attend": (
        ["model.settings.encoder_attention_heads=5"],
        "embed_dim must be divisible by num_heads",
    ),
    "dropout below 0": (["model.settings.dropout=-1"], "cannot generate: dropout probability"),
    "a first token that there is not": (
        ["model.settings.decoder_start_token_id=9999"],
        "cannot generate: index out of",
    ),
    "no width": (["model.settings.d_model=0"], "model.architecture=bart cannot be built"),
    "a control character": (["output=a\x07b"], "output: unacceptable character"),
    "a seed that is too large": (["seed=99999999999999999999"], "seed:1: a whole number of more than 63 bits"),
    "a path that is too long": (["data.path=" + "x" * 5000], "no such file or folder"),
    "a name that is too long": (["task=" + "x" * 5000 + ".yaml"], "no such file"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str, tmp_path: Path) -> None:
    words, message = FOUND[name]
    small = ["model.vocab_size=320", "data.limit={train: 4}", "generation.max_length=8"]
    refused(tmp_path, message, "check", "quickstart", *small, *words)


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("generation_config.json", "decoder_start_token_id", "x", "cannot generate: .*invalid data type 'str'"),
        ("generation_config.json", "bad_words_ids", [[]], "cannot generate: .*: look at its config.json and"),
        ("config.json", "dropout", 1e12, "cannot generate: dropout probability"),
    ],
)  # fmt: skip
def test_what_was_found_in_models(file: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    """Also by whoever only opens a run."""
    folder = tmp_path / "run"
    command = forked_process.train(folder, "optimisation.warmup_steps=0", "optimisation.max_steps=1")
    assert command.wait() == 0, command.text()
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, key: value}))
    again = [word for word in forked_process.TINY if not word.startswith("model.")]
    words = ["model.architecture=null", f"model.name={folder}", "model.settings={}", f"output={tmp_path / 'out'}"]
    refused(tmp_path, message, "train", "quickstart", *again, *words)
    refused(tmp_path, message, "calibrate", folder, "--limit", "4")


def test_usage_errors_are_one_line(tmp_path: Path) -> None:
    for words, message in (
        (["train"], "(?i)missing argument 'recipe'; see seqreg train --help"),
        (["trian", "x"], "No such command 'trian'.*; see seqreg --help"),
        (["train", "quickstart", "--nope"], "No such option: --nope.*; see seqreg train --help"),
        (["advise", ".", "--precision", "huge"], "Invalid value for '--precision'"),
    ):
        refused(tmp_path, message, *words)
    assert "Usage" in run(tmp_path).out + run(tmp_path).err


def test_what_is_shown_stays_in_its_place(tmp_path: Path) -> None:
    class Found:
        last = Scored(predictions=[{"prediction": EVIL, "reference": "fine"}])

    page = markdown.markdown(shown(Found(), 1), extensions=["markdown.extensions.tables"])  # type: ignore[arg-type]
    assert "<script>" not in page
    assert "<h1>" not in page
    assert "<img" not in page
    assert page.count("<tr>") == 2
    assert "\x1b" not in escape.plain(EVIL)
    assert "\n" not in escape.plain(EVIL)
    assert escape.one_line("a\r\nb\u2028c") == "a<n>b<n>c"
    assert escape.fenced("a\n```\nb", "yaml").startswith("````yaml\n")


@given(st.text("ab1 .-+=#[](){}!|~*_`\\\\<>&:'\"/^$", max_size=30))
def test_prose_is_not_markup(text: str) -> None:
    """In a list, in a cell and in a heading: what comes out has our tags alone."""
    said = escape.prose(text)
    page = f"- {said}\n\n| a |\n|---|\n| {said} |\n\n## x {said}\n"
    tags = re.findall(r"</?(\w+)", markdown.markdown(page, extensions=["markdown.extensions.tables"]))
    assert set(tags) <= {"ul", "li", "table", "thead", "tbody", "tr", "th", "td", "h2"}
    assert (tags.count("li"), tags.count("tr")) == (2, 4)


def test_a_model_card_has_no_markup_of_others(tmp_path: Path) -> None:
    made = run_config.resolve("quickstart")
    evil = made.card.model_copy(update={"title": "x\n\n<img src=x> # [a](b)"})
    numbers: dict[str, Any] = {"scores": {"te|st": {"rouge1": 1.0, "intervals": {"rouge1": [0, 2]}, "signature": ""}}}
    results.write_card(tmp_path, run_config.Run(made.config, evil, made.origins), numbers)
    text = (tmp_path / "README.md").read_text()
    assert "<img" not in text
    assert "te\\|st" in text
    assert "# x\\\\n\\\\n&lt;img" in text


def test_the_console_reads_no_markup() -> None:
    """A file called [red] is a file called [red]; what is to be dim is printed with style="dim"."""
    for path in (Path(__file__).parents[2] / "seqreg").rglob("*.py"):
        found = re.findall(r"\[/\]|\[(?:dim|red|yellow|green|bold)\]", path.read_text(encoding="utf-8"))
        assert not found, f"{path}: the consoles have markup=False: print with style="


def test_the_preflight_loss_changes_nothing(tmp_path: Path) -> None:
    """The generator, the weights, the state of a normalised head and the mode are as they were."""
    words = tiny(tmp_path, "--terms", "r4f", recipe="glue", variant="rte")
    made = run_config.resolve("glue", variants=["rte"], terms=["r4f"], overrides=words[4:-2])
    shop = train.prepare(made)
    model = shop.model.eval()
    kept, drawn = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    preflight.check_loss(made, model, shop.tokenizer, shop.splits.sets["train"])
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    assert not model.training
