"""Rows of files: every format, every fault with its place; splits by the rule of the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from seqreg.errors import BadInput
from seqreg.workbench.config import cards
from seqreg.workbench.config.settings import Data
from seqreg.workbench.data import examples, loading, synthetic_news
from seqreg.workbench.text import readers
from tests.helpers import sample_files

PAIRS, _ = cards.load("text_pairs")
MNLI, _ = cards.load("glue/mnli")
FOUND = [{"source": 'a, "b"', "target": "c"}, {"source": "é\ttab", "target": "d"}]


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def as_bytes(ending: str) -> bytes | str:
    lines = [json.dumps(row, ensure_ascii=False) for row in FOUND]
    return {
        "jsonl": "\n".join(lines) + "\n",
        "jsonl ": "\ufeff" + "\r\n\r\n".join(lines),  # a byte-order mark, DOS lines, blank lines
        "json": json.dumps(FOUND, indent=1),
        "csv": 'source,target\n"a, ""b""",c\n"é\ttab",d\n',
    }[ending]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl ", "json", "csv"])
def test_formats(ending: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"x.{ending.strip()}", as_bytes(ending))
    assert [row for _, row in readers.read(path)] == FOUND


def test_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(FOUND), tmp_path / "x.parquet")
    assert [row for _, row in readers.read(tmp_path / "x.parquet")] == FOUND


def test_tsv_has_no_quotes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", 'source\ttarget\n"a said "b"\tc\n')
    assert [row for _, row in readers.read(path)] == [{"source": '"a said "b"', "target": "c"}]


FAULTS: dict[str, tuple[bytes, str]] = {
    "no column": (b'{"source": "a", "target": "b"}\n{"source": "a"}\n', r"x.jsonl:2: no column 'target' or .*'source'"),
    "null": (b'{"source": null, "target": "b"}\n', r"x.jsonl:1: the column 'source' is empty"),
    "not text": (b'{"source": 3, "target": "b"}\n', r"x.jsonl:1: the column 'source' is 3: expected text"),
    "not utf-8": (b'{"source": "a", "target": "b"}\n{"source": "\xff"}\n', r"x.jsonl:2: not UTF-8"),
    "torn": (b'{"source": "a", "target": "b"}\n{"source": "a", "tar', r"x.jsonl:2: not a JSON object"),
    "twice": (b'{"source": "a", "source": "b", "target": "c"}\n', r"x.jsonl:1: .*a key is there twice"),
    "list": (b'{"source": "a", "target": "b"}\n[1]\n', r"x.jsonl:2: expected a JSON object, not list"),
    "empty": (b"", r"x.jsonl: 0 examples"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_file_and_line(name: str, tmp_path: Path) -> None:
    content, message = FAULTS[name]
    with pytest.raises(BadInput, match=message) as caught:
        loading.read_file(PAIRS, write(tmp_path / "x.jsonl", content))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("label", "expected"),
    [("neutral", 1), (2, 2), ("0", 0), ("-", None), ("nope", "label"), (3, "label"), (1.5, "label")],
)
def test_labels(label: Any, expected: Any, tmp_path: Path) -> None:
    row = {"premise": "a", "hypothesis": "b", "label": label}
    if expected == "label":
        with pytest.raises(
            BadInput, match=f"here: the column 'label' is {label!r}: expected 0 to 2, or one of entailment, neutral"
        ):
            examples.example(MNLI, row, "here")
    else:
        found = examples.example(MNLI, row, "here")
        assert (found.label if found else None) == expected


def test_cleaning() -> None:
    gigaword, _ = cards.load("gigaword")
    found = examples.example(gigaword, {"document": "the UNK of UNKLE", "summary": " UNK "}, "here")
    assert found == examples.Example("the <unk> of UNKLE", None, "<unk>")
    cnn, _ = cards.load("cnn_dailymail")
    found = examples.example(cnn, {"article": "a", "highlights": "one .<n>two ."}, "here")
    assert found is not None
    assert found.target == "one .\ntwo ."


def test_a_folder_is_splits(tmp_path: Path) -> None:
    sample_files.folder(tmp_path, MNLI)
    (tmp_path / "validation.jsonl").rename(tmp_path / "dev.jsonl")
    splits = loading.load(MNLI, Data(path=str(tmp_path)))
    sizes = {"train": 11, "validation": 1, "test": 4, "mismatched": 4}
    assert {name: len(found) for name, found in splits.sets.items()} == sizes
    assert splits.evaluations(MNLI) == ["test", "mismatched"]
    (tmp_path / "dev.jsonl").unlink()
    (tmp_path / "mismatched.jsonl").unlink()
    splits = loading.load(MNLI, Data(path=str(tmp_path)))
    assert [len(splits.sets[name]) for name in ("train", "validation", "test")] == [10, 1, 1]
    assert any("mismatched" in note for note in splits.notes)
    assert any("held out" in note for note in splits.notes)


def test_a_split_that_is_not_scored_is_named(tmp_path: Path) -> None:
    sample_files.folder(tmp_path, MNLI)
    (tmp_path / "test.jsonl").write_text((tmp_path / "mismatched.jsonl").read_text())
    notes = loading.load(MNLI, Data(path=str(tmp_path))).notes
    assert "test.jsonl is there and not scored: this task is judged by validation, mismatched" in notes


def test_the_reason_of_the_hub_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(BadInput, match=r"hub \(OSError: no route to host\): give a local copy") as caught:
        loading.load(MNLI, Data())
    assert "\n" not in str(caught.value)


def test_a_file_is_split_the_same_way_every_time(tmp_path: Path) -> None:
    path = sample_files.write(tmp_path / "x.jsonl", sample_files.rows(PAIRS, 50))
    first, second = (loading.load(PAIRS, Data(path=str(path))).sets for _ in range(2))
    assert first == second
    assert {name: len(found) for name, found in first.items()} == {"train": 40, "validation": 5, "test": 5}
    assert not {one.source for one in first["train"]} & {one.source for one in first["test"]}
    limited = loading.load(PAIRS, Data(path=str(path), limit={"train": 7})).sets
    assert len(limited["train"]) == 7
    with pytest.raises(BadInput, match="no split of this name"):
        loading.load(PAIRS, Data(path=str(path), limit={"trian": 7}))


def test_empty_texts_and_overlap_are_counted(tmp_path: Path) -> None:
    found = sample_files.rows(PAIRS, 6)
    sample_files.write(
        tmp_path / "train.jsonl", [*found, {"source": "", "target": "x"}, {"source": "x", "target": " "}]
    )
    sample_files.write(tmp_path / "validation.jsonl", [*found[:2], {"source": "new", "target": ""}])
    with pytest.raises(
        BadInput, match=r"train.jsonl: 2 of 8 examples have an empty text, more than data.max_empty_fraction=0.1"
    ):
        loading.load(PAIRS, Data(path=str(tmp_path)))
    splits = loading.load(PAIRS, Data(path=str(tmp_path), max_empty_fraction=0.25))
    assert len(splits.sets["train"]) == 6
    assert len(splits.sets["validation"]) == 3
    assert any("2 examples left out: an empty text" in note for note in splits.notes)
    assert any("2 of 3 validation examples are in the training set" in note for note in splits.notes)


def test_what_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="no such file or folder"):
        loading.load(PAIRS, Data(path=str(tmp_path / "nothing")))
    with pytest.raises(BadInput, match=r"expected a file train.jsonl"):
        loading.load(PAIRS, Data(path=str(tmp_path)))
    with pytest.raises(BadInput, match=r"data.path=FILE_OR_FOLDER"):
        loading.load(PAIRS, Data())
    with pytest.raises(BadInput, match="cannot tell its format"):
        loading.read_file(PAIRS, write(tmp_path / "x.txt", "a"))


@pytest.mark.parametrize("name", ["cnn_dailymail", "gigaword", "glue/mnli", "xnli"])
def test_the_hub_is_asked_for_parquet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be asked of `datasets`, and what is done with what it gives."""
    import datasets

    card, _ = cards.load(name)
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*names: Any, split: str, data_files: Any = None, revision: str | None = None) -> Any:
        asked.append((*names, split, data_files, revision))
        found = sample_files.rows(card, 4)
        if card.columns.label is not None:
            found[0]["label"] = -1  # a hidden label
        return datasets.Dataset.from_list(found)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    splits = loading.load(card, Data(limit={"train": 2}))
    assert len(asked) == len(card.splits)
    assert len(splits.sets["train"]) == 2
    held = "test" if card.holdout else "validation"
    assert splits.sets[held][0].source
    assert len(splits.sets[held]) == (4 if card.kind == "generation" else 3)
    if name == "gigaword":
        address = "hf://datasets/Harvard/gigaword@refs%2Fconvert%2Fparquet/default/train/*.parquet"
        assert asked[0] == ("parquet", "train", {"train": address}, None)
        with pytest.raises(BadInput, match=r"data\.revision=v1: Gigaword headlines is read from a copy"):
            loading.load(card, Data(revision="v1"))
    if name == "xnli":
        assert asked[-1][:3] == ("facebook/xnli", "ur", "test")
        loading.load(card, Data(subset="de", revision="v1"))
        assert asked[len(card.splits)] == ("facebook/xnli", "de", "train", None, "v1")
        assert asked[-1] == ("facebook/xnli", "ur", "test", None, "v1")  # splits that name theirs keep it


@pytest.mark.parametrize("kind", ["list", "hub"])
def test_glue_is_not_scored_on_what_one_tunes_on(kind: str, tmp_path: Path) -> None:
    card, _ = cards.load("glue/rte")
    rows = [{"sentence1": f"a {n}", "sentence2": "b", "label": int(n % 4 == 0)} for n in range(4000)]
    dev = [{"sentence1": f"c {n}", "sentence2": "b", "label": n % 2} for n in range(277)]
    if kind == "list":
        sample_files.write(tmp_path / "train.jsonl", rows)
        sample_files.write(tmp_path / "dev.jsonl", dev)
        splits = loading.load(card, Data(path=str(tmp_path)))
    else:
        import datasets

        lazy = {
            name: loading.HubExamples(datasets.Dataset.from_list(found), card, name)
            for name, found in (("train", rows), ("validation", dev))
        }
        splits = loading.Splits(dict(lazy))
        loading._carve(card, Data(), splits)
        assert isinstance(splits.sets["train"], loading.HubExamples)
    assert [one.source for one in splits.sets["test"]] == [row["sentence1"] for row in dev]
    train, held = ([one.source for one in splits.sets[name]] for name in ("train", "validation"))
    assert (len(train), len(held)) == (3760, 240)
    assert sorted(train + held) == sorted(str(row["sentence1"]) for row in rows)
    assert sum(one.label or 0 for one in splits.sets["validation"]) == 60  # a quarter, as in the training examples
    assert splits.evaluations(card) == ["test"]
    assert any("the validation set is 240 of the 4000 train examples" in note for note in splits.notes)
    if kind == "list":
        again = loading.load(card, Data(path=str(tmp_path), limit={"train": 5}, holdout=100))
        assert [len(again.sets[name]) for name in ("train", "validation", "test")] == [5, 100, 277]
        with pytest.raises(BadInput, match=r"data\.holdout=5: .* has a validation set of its own"):
            loading.load(cards.load("xnli")[0], Data(path=str(sample_files.folder(tmp_path / "x", MNLI)), holdout=5))


def test_numbers_are_held_out_over_their_whole_range(tmp_path: Path) -> None:
    card, _ = cards.load("glue/stsb")
    rows = [{"sentence1": f"a {n}", "sentence2": "b", "label": n / 200} for n in range(1000)]
    sample_files.write(tmp_path / "train.jsonl", rows)
    sample_files.write(tmp_path / "validation.jsonl", rows[:20])
    held = loading.load(card, Data(path=str(tmp_path))).sets["validation"]
    assert len(held) == 100
    assert abs(sum(float(one.label or 0) for one in held) / 100 - 2.5) < 0.05


@pytest.mark.parametrize("kind", ["city", "people"])
def test_stories_are_english_and_the_same_for_a_seed(kind: synthetic_news.Kind) -> None:
    found = synthetic_news.stories(300, 3, kind)
    assert found == synthetic_news.stories(300, 3, kind) != synthetic_news.stories(300, 4, kind)
    assert len({story["document"] for story in found}) == 300
    for story in found:
        assert "{" not in story["document"]
        name = " ".join(story["summary"].split()[:2])
        assert name in story["document"]
        assert story["document"].count(".") >= (3 if kind == "city" else 2)


DISTRIBUTED: dict[str, tuple[str, dict[str, str], dict[str, int]]] = {
    "cola": ("glue/cola", {
        "train.tsv": "gj04\t1\t\tA.\ngj04\t0\t*\tB.\n", "dev.tsv": "c\t1\t\tC.\n",
    }, {"validation": 1}),
    "cola with a header": ("glue/cola", {
        "train.tsv": "sentence\tlabel\nA.\t1\nB.\t0\n", "dev.tsv": "sentence\tlabel\nC.\t1\n",
    }, {}),
    "mrpc": ("glue/mrpc", {
        "msr_paraphrase_train.txt": '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n'
                                    '1\t1\t2\tA "a .\tB .\n0\t3\t4\tC .\tD .\n',
        "dev.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t5\t6\tE .\tF .\n",
    }, {"validation": 1}),
    "qnli": ("glue/qnli", {
        "train.tsv": "index\tquestion\tsentence\tlabel\n0\tA?\tB.\tentailment\n1\tC?\tD.\tnot_entailment\n",
        "dev.tsv": "index\tquestion\tsentence\tlabel\n0\tE?\tF.\tentailment\n",
    }, {"validation": 1}),
    "stsb": ("glue/stsb", {
        name: "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
              f"0\tg\tf\t2012\t1\tnone\tnone\t{name}.\tB.\t5.000\n1\tg\tf\t2012\t1\tnone\tnone\tC.\t{name}.\t0.200\n"
        for name in ("train.tsv", "dev.tsv")
    }, {"validation": 2}),
    "mnli": ("glue/mnli", {
        f"{name}.tsv": "index\tsentence1\tsentence2\tlabel1\tgold_label\n"
                       f"0\t{name}.\tB.\tneutral\tneutral\n1\tC.\t{name}.\tneutral\tentailment\n"
        for name in ("train", "dev_matched", "dev_mismatched")
    }, {"validation": 2, "mismatched": 2}),
    "multinli": ("glue/mnli", {
        f"multinli_1.0_{name}.jsonl": f'{{"sentence1": "{name}", "sentence2": "b", "gold_label": "neutral"}}\n'
                                      f'{{"sentence1": "c", "sentence2": "{name}", "gold_label": "-"}}\n' * 2
        for name in ("train", "dev_matched", "dev_mismatched")
    }, {"mismatched": 2}),
    "xnli in one file": ("xnli", {
        "multinli.train.en.tsv": "premise\thypo\tlabel\nA .\tB .\tcontradictory\nC .\tD .\tneutral\n",
        "xnli.dev.tsv": "language\tgold_label\tsentence1\tsentence2\nar\tneutral\tE.\tF.\nen\tentailment\tG.\tH.\n",
        "xnli.test.tsv": "language\tgold_label\tsentence1\tsentence2\nur\tneutral\tI.\tJ.\nen\tentailment\tK.\tL.\n",
    }, {"validation": 1, "test": 1, "test_ur": 1}),
    "xnli by language": ("xnli", {
        "multinli.train.en.tsv": "premise\thypo\tlabel\nA .\tB .\tcontradictory\nC .\tD .\tneutral\n",
        **{f"xnli.{name}.tsv": f"premise\thypothesis\tlabel\n{name}.\tF.\tneutral\n"
           for name in ("dev.en", "dev.sw", "test.en", "test.sw")},
    }, {"validation": 1, "test": 1, "test_sw": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_files_are_read_as_distributed(name: str, tmp_path: Path) -> None:
    task, files, expected = DISTRIBUTED[name]
    card, _ = cards.load(task)
    for file, text in files.items():
        write(tmp_path / file, text)
    sets = loading.load(card, Data(path=str(tmp_path))).sets
    if card.holdout:  # one training example is the validation set then, and the distributed one the test set
        expected = {"test" if split == "validation" else split: size for split, size in expected.items()}
        sets["train"] = [*sets["train"], *sets["validation"]]
    assert len(sets["train"]) == 2
    assert {split: len(sets[split]) for split in expected} == expected
    assert {split for split in sets if split.startswith("test_")} == {s for s in expected if s.startswith("test_")}
    if name == "xnli in one file":
        assert [sets["train"][0].label, sets["validation"][0].source, sets["test_ur"][0].source] == [2, "G.", "I."]


def test_a_folder_without_a_training_set_says_what_to_do(tmp_path: Path) -> None:
    card, _ = cards.load("glue/stsb")
    lines = "".join(f"s {index}\tt {index}\t{index % 5}\n" for index in range(10))
    file = write(tmp_path / "dev.tsv", f"sentence1\tsentence2\tscore\n{lines}")
    with pytest.raises(BadInput, match=rf"expected a file train.*; it has dev.tsv: data.path={file} splits that one"):
        loading.load(card, Data(path=str(tmp_path)))
    assert {key: len(rows) for key, rows in loading.load(card, Data(path=str(file))).sets.items()} == {
        "train": 8, "validation": 1, "test": 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["../{split}", "{split", "{lang}", "{split.x}"])
def test_names_of_data_files_cannot_be_paths(name: str) -> None:
    with pytest.raises(BadInput, match="expected the name of a file"):
        cards.parse({**PAIRS.model_dump(exclude_defaults=True), "files": {"names": [name]}}, "here")


def test_other_tasks_are_scored_too(tmp_path: Path) -> None:
    people, _ = cards.load("synthetic_news_people")
    splits = loading.load(people, Data(also={"synthetic_news": None}, limit={"test": 7}))
    assert splits.evaluations(people) == ["test", "synthetic_news"]
    assert {len(splits.sets[name]) for name in ("test", "synthetic_news")} == {7}
    city, _ = cards.load("synthetic_news")
    assert list(splits.sets["synthetic_news"]) == list(loading.load(city, Data()).sets["test"])[:7]
    mine = sample_files.folder(tmp_path, PAIRS)
    assert "text_pairs" in loading.load(people, Data(also={"text_pairs": str(mine)})).evaluations(people)
    for also, message in (
        ({"glue/rte": str(tmp_path)}, r"data.also.glue/rte: GLUE RTE, inference has another kind or other classes"),
        ({"nothing": None}, "unknown task 'nothing'"),
        ({"text_pairs": "gone"}, "^data.also.text_pairs=gone: no such file or folder"),
    ):
        with pytest.raises(BadInput, match=message):
            loading.load(people, Data(also=also))


def test_a_very_long_text_is_named(tmp_path: Path) -> None:
    found = [{"source": f"text {index}", "target": "t"} for index in range(6)]
    found[2]["source"] = "x " * 2_500_000
    found[4]["target"] = "y" * 9 + " yyyyyyyyy" * 29_999
    splits = loading.load(PAIRS, Data(path=str(sample_files.write(tmp_path / "x.jsonl", found))))
    (note,) = [note for note in splits.notes if "characters" in note]
    assert note.startswith("x.jsonl: line 3 has a text of 4,999,999 characters, and 1 more are over 200,000: ")
    assert len(note) < 250


def test_a_limit_of_a_split_that_is_not_there(tmp_path: Path) -> None:
    sample_files.write(tmp_path / "train.jsonl", sample_files.rows(PAIRS, 30))
    assert len(loading.load(PAIRS, Data(path=str(tmp_path), limit={"test": 3, "train": 5})).sets["train"]) == 5
