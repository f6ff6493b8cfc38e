"""Input without an end, and paths that nothing can be read from or written to: one line, at once, nothing written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from seqreg.errors import BadInput
from seqreg.metrics.rouge.score import rouge
from seqreg.workbench.config import cards
from seqreg.workbench.data.examples import Example, example
from seqreg.workbench.text import readers
from tests.bad_input.table import refused, run, tiny
from tests.helpers import sample_files

PAIR = ["gigaword", "task=text_pairs", "model.name=x"]


@pytest.mark.parametrize(
    "setting",
    [
        "data.dataloader_num_workers=2000000000", "data.max_source_length=2000000000", "model.vocab_size=2000000000",
        "evaluation.resamples=2000000000", "evaluation.per_device_eval_batch_size=2000000000",
        "optimisation.per_device_train_batch_size=2000000000",
        "optimisation.gradient_accumulation_steps=2000000000", "generation.max_length=2000000000",
        "logging.samples=2000000000",
    ],
)  # fmt: skip
def test_numbers_in_settings_are_bounded(setting: str, tmp_path: Path) -> None:
    key = setting.partition("=")[0]
    refused(tmp_path, rf"command line: {key}=2000000000: expected less than or equal to", *tiny(tmp_path, setting))


def test_numbers_in_terms_are_bounded(tmp_path: Path) -> None:
    for term, key in (("smart", "steps"), ("freelb", "steps"), ("uegr", "passes")):
        words = tiny(tmp_path, "-t", term, f"terms.{term}.{key}=1000000000")
        refused(tmp_path, rf"terms.{term}.{key}=1000000000: .*at most 1000", *words)


def test_numbers_in_options_are_bounded(tmp_path: Path) -> None:
    for words, option in (
        (["compare", "quickstart", "-t", "r3f", "--jobs", "1000000000"], "--jobs"),
        (["compare", "quickstart", "-t", "r3f", "--seeds", "1000000000"], "--seeds"),
        (["compare", "quickstart", "-t", "r3f", "--seeds", "1,99999999999999"], "--seeds"),
        (["calibrate", "run", "--bins", "1000000000"], "--bins"),
        (["robustness", "run", "--draws", "1000000000"], "--draws"),
        (["robustness", "run", "--rates", ",".join(str(n / 1000) for n in range(1, 500))], "--rates"),
        (["chain", "plan.yaml", "--cycles", "1000000000"], "--cycles"),
    ):
        refused(tmp_path, option, *words)


def test_files_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("a b\n")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name in ("/dev/zero", "pipe.jsonl", "zero.jsonl"):
        refused(tmp_path, "a pipe, a socket or a device: expected a file", "rouge", name, "good.txt")
        refused(tmp_path, "a pipe, a socket or a device: expected a file", "rouge", "good.txt", name)
    for name in ("pipe.jsonl", "zero.jsonl"):
        refused(tmp_path, "no such file", "train", *PAIR, f"data.path={name}")
    refused(tmp_path, "a folder: expected a file", "rouge", ".", "good.txt")
    with (tmp_path / "sparse.jsonl").open("wb") as file:
        file.truncate(1 << 38)
    refused(tmp_path, "more than the memory of this machine", "train", *PAIR, "data.path=sparse.jsonl")


def test_lines_and_columns_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"source": "' + b"a b " * (readers.LINE // 4) + b'", "target": "b"}\n')
    refused(tmp_path, r"x.jsonl:1: a line of more than 10,000,000 bytes", "train", *PAIR, "data.path=x.jsonl")
    (tmp_path / "x.csv").write_text(",".join(f"c{n}" for n in range(readers.COLUMNS + 1)) + "\n")
    refused(tmp_path, r"x.csv:1: 10,001 columns: at most 10,000", "train", *PAIR, "data.path=x.csv")
    refused(tmp_path, r"x.csv:2: a line of more than", "rouge", _second(tmp_path / "x.csv"), "x.jsonl")
    (tmp_path / "x.yaml").write_text("task: gigaword\ndrop: [" + "1," * 60_000 + "]\n")
    refused(tmp_path, r"x.yaml:2: more than 50,000 values", "train", "x.yaml")


def _second(path: Path) -> str:
    path.write_bytes(b"a\n" + b"x" * (readers.LINE + 1))
    return path.name


def test_words_and_texts_without_end_are_refused(tmp_path: Path) -> None:
    word, text = "ab" * 100_000, "word " * 2_000_000
    for long, message in (
        (word, "a word of 200,000 characters"),
        (text, r"10,000,000 characters"),
        ("a " * 41_000, "41,000 words"),
    ):
        with pytest.raises(BadInput, match=rf"predictions\[1\] has {message}"):
            rouge(["fine", long], ["fine", "fine"])
        with pytest.raises(BadInput, match=rf"references\[0\] has {message}"):
            rouge(["fine"], [long])
    good = [{"source": f"text {n}", "target": f"title {n}"} for n in range(4)]
    for column, long, message in (
        ("source", word, "a word of"),
        ("target", word, "a word of"),
        ("target", "a " * 41_000, "41,000 words"),
    ):
        sample_files.write(tmp_path / "x.jsonl", [*good, {**good[0], column: long}])
        refused(tmp_path, rf"x.jsonl:5: the column '{column}' has {message}", "train", *PAIR, "data.path=x.jsonl")


def test_words_of_tasks_are_letters_and_digits() -> None:
    card, _ = cards.load("text_pairs")
    for text in ("ab-" * 50_000, "a" * 50_000 + " b"):
        assert example(card, {"source": text, "target": "b"}, "x:1") == Example(text, target="b")
    with pytest.raises(BadInput, match=r"x:1: the column 'source' has a word of 50,001 characters"):
        example(card, {"source": "ab-" * 50_000 + "c" * 50_001 + "!", "target": "b"}, "x:1")


def test_a_card_cannot_make_texts_without_end(tmp_path: Path) -> None:
    sample_files.write(tmp_path / "x.jsonl", [{"s": "a b", "t": "c d"}] * 4)
    rule = "{column: source, pattern: '.', by: '\\g<0>\\g<0>'}"
    (tmp_path / "card.yaml").write_text(
        f"title: x\nkind: generation\ncolumns: {{source: s, target: t}}\nclean: [{', '.join([rule] * 40)}]\n"
        "lengths: {source: 9}\nrule: x\nmetric: [rouge]\n"
    )
    words = ["train", "gigaword", "task=card.yaml", "model.name=x", "data.path=x.jsonl"]
    refused(tmp_path, r"x.jsonl:1: the column 's' has (a word of )?[\d,]+ characters", *words)


def test_messages_about_long_input_are_short(tmp_path: Path) -> None:
    said = run(tmp_path, "train", "x" * 100_000)
    assert (said.code, len(said.err) < 3000) == (2, True)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("variants: {a: hello}", "variants.a='hello': expected a mapping"),
        ("variants: hello", "variants='hello': expected a mapping"),
        ("variants: [a]", r"variants=\['a'\]: expected a mapping"),
        ("variants: {a: [1]}", r"variants.a=\[1\]: expected a mapping"),
        ("model: hello", "model='hello': expected"),
        ("terms: hello", "terms='hello': expected"),
        ("terms: {r3f: hello}", "terms.r3f='hello': expected"),
        ("task: {a: 1}", "expected a name"),
    ],
)
def test_parts_of_a_recipe_of_the_wrong_type_are_refused(recipe: str, message: str, tmp_path: Path) -> None:
    others = {"optimisation": "{steps: 3}", "task": "gigaword", "model": "{name: x}"}
    lines = [recipe, *(f"{key}: {value}" for key, value in others.items() if not recipe.startswith(key))]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    refused(tmp_path, f"mine.yaml: .*{message}", "train", "mine.yaml")
    for name, text in (("r.yaml", "regression: hello"), ("t.yaml", "terms: hello"), ("m.yaml", "model: [1]")):
        (tmp_path / name).write_text(text)
        refused(tmp_path, rf"{name}: .*expected", "train", "quickstart", "-t", name)


MODULES = {
    "abstract": ("from seqreg import Term\nclass Mine(Term): pass\n", "Mine is abstract: it lacks __call__, cost"),
    "divides": ("1 / 0\n", "cannot be imported: ZeroDivisionError: division by zero"),
    "spells": ("def\n", "cannot be imported: SyntaxError"),
    "leaves": ("raise SystemExit(0)\n", "cannot be imported: SystemExit"),
    "lacks": ("import not_there_at_all\n", "cannot be imported: ModuleNotFoundError: No module named 'not_there"),
    "other": ("class Mine: pass\n", "is not a Term"),
    "number": ("Mine = 3\n", "is not a Term"),
    "nothing": ("", "cannot be imported: AttributeError"),
    "needy": (
        "from dataclasses import dataclass\nfrom seqreg import Term\n@dataclass(frozen=True, kw_only=True)\n"
        "class Mine(Term):\n    much: float\n    cost = None\n    def loss(self, ctx, passes): return 0\n",
        "the setting 'much' is missing",
    ),
    "raises": (
        "from seqreg import Term\nclass Mine(Term):\n    cost = None\n    def loss(self, ctx, passes): return 0\n"
        "    def __post_init__(self): raise KeyError('a')\n",
        "Mine cannot be made: KeyError: 'a'",
    ),
    "costs": (
        "from seqreg import Term\nclass Mine(Term):\n    cost = None\n    def loss(self, ctx, passes): return 0\n",
        "Mine.cost is None: expected a seqreg.Cost",
    ),
    "costly": (
        "from seqreg import Term\nclass Mine(Term):\n    @property\n    def cost(self): raise OSError('x')\n"
        "    def loss(self, ctx, passes): return 0\n",
        "Mine cannot be made: OSError: x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_errors_in_a_users_term_are_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, message = MODULES[name]
    (tmp_path / f"own_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    refused(tmp_path, message, *tiny(tmp_path, f"terms.mine={{term: own_{name}.Mine}}"))


def test_terms_with_odd_names_are_refused(tmp_path: Path) -> None:
    for name in ("a..b", ".a", "a.", "..", "a b.c", "os.path"):
        refused(tmp_path, "term", *tiny(tmp_path, f'terms.mine={{term: "{name}"}}'))


def test_output_paths_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (tmp_path / "gone").symlink_to("nothing")
    words = tiny(tmp_path)
    for output, message in (
        ("x" * 300, "File name too long"), ("a/" + "x" * 300 + "/b", "File name too long"),
        ("ab/" * 1500, "File name too long"),
        ("loop", "Too many levels of symbolic links"), ("loop/a", "Too many levels"), ("gone", "leads nowhere"),
        ("gone/a", "leads nowhere"),
    ):  # fmt: skip
        refused(tmp_path, message, *words, f"output={output}")
        refused(tmp_path, message, "compare", *words[1:-1], "-t", "r3f", "--output", output)
        for study in ("calibrate", "robustness", "probe", "evaluate") if output == "loop" else ():
            refused(tmp_path, f"{message}|run: no such folder", study, "run", "--output", output)
        refused(tmp_path, f"{message}|run: not a comparison", "report", "run", "--output", output)
    for name in ("x" * 300 + ".yaml", "loop.yaml"):
        refused(tmp_path, "no such file", "train", name)
        refused(tmp_path, "no such file", "train", "quickstart", f"task={name}")
        refused(tmp_path, "no such file|--terms", "train", "quickstart", "-t", name)
        refused(tmp_path, "no such file|too long|too many", "chain", name)
    for name in ("x" * 300, "loop"):
        refused(tmp_path, "no such file or folder", "train", *PAIR, f"data.path={name}")
        refused(tmp_path, "cannot be read", "rouge", name, name)
        for command in ("evaluate", "calibrate", "robustness", "probe", "replay", "show", "report"):
            refused(tmp_path, "seqreg: ", command, name)
        refused(tmp_path, "seqreg: ", "predict", name, name)


def test_allowed_changes_are_settings_also_of_a_new_run(tmp_path: Path) -> None:
    refused(
        tmp_path,
        "--allow-change sed: there is no such setting; did you mean 'seed'",
        *tiny(tmp_path, "--allow-change", "sed"),
    )


def test_a_folder_that_is_missing_is_named_with_what_was_to_be_in_it(tmp_path: Path) -> None:
    for name in ("../x", "a/b/c"):
        words = tiny(tmp_path, f"model.tokenizer={name}")
        refused(tmp_path, f"seqreg: {name}: no such folder, for the tokenizer", *words)
