"""Data at size: examples and token ids in Arrow files are those that are held in memory, and never stale or damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from seqreg.errors import BadInput
from seqreg.workbench.config import cards
from seqreg.workbench.config.settings import Config, Data
from seqreg.workbench.data import arrow_cache, loading
from seqreg.workbench.data.encoding import Encoded, tokenizer_digest
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.data.stored_examples import StoredExamples
from seqreg.workbench.data.tokenizers import TwoTokenizers, train_tokenizer
from seqreg.workbench.run.record import fingerprint
from seqreg.workbench.text import readers
from tests.helpers import sample_files

NEWS = [
    {"document": f"the {n} ships of the harbour came home at {n % 7} " * (n % 5 + 1), "summary": f"{n % 40} ships home"}
    for n in range(60)
]
LABELLED = [{"sentence1": f"a {n}", "sentence2": f"b {n % 9}", "label": n % 3 % 2} for n in range(60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "news").mkdir()
    sample_files.write(tmp_path / "news/train.jsonl", NEWS)
    sample_files.write(tmp_path / "news/validation.jsonl", NEWS[:9])
    (tmp_path / "rte").mkdir()
    sample_files.write(tmp_path / "rte/train.jsonl", LABELLED)
    sample_files.write(tmp_path / "rte/dev.jsonl", LABELLED[:9])
    return tmp_path


def both(folder: Path, name: str, path: str, **settings: Any) -> tuple[Splits, Splits]:
    """The splits of a task, held in memory and on disk."""
    card, _ = cards.load(name)
    data = {"path": str(folder / path), "cache_dir": str(folder / "cache"), **settings}
    held, stored = (loading.load(card, Data(keep_in_memory=memory, **data)) for memory in (True, False))
    assert all(isinstance(split, StoredExamples) for split in stored.sets.values())
    assert not any(isinstance(split, StoredExamples) for split in held.sets.values())
    return held, stored


@pytest.mark.parametrize(
    ("name", "path", "settings"),
    [
        ("gigaword", "news", {}),
        ("gigaword", "news/train.jsonl", {}),  # one file, which is split by a shuffle
        ("gigaword", "news", {"limit": {"train": 7}, "train_fraction": 0.5}),
        ("glue/rte", "rte", {"unlabelled": "rte/dev.jsonl"}),  # a part is held out, stratified by label
    ],
)
def test_examples_on_disk_are_those_in_memory(folder: Path, name: str, path: str, settings: dict[str, Any]) -> None:
    if "unlabelled" in settings:
        settings = {"unlabelled": str(folder / settings["unlabelled"])}
    held, stored = both(folder, name, path, **settings)
    assert {name: list(split) for name, split in held.sets.items()} == {
        name: [split[index] for index in range(len(split))] for name, split in stored.sets.items()
    }
    assert {name: list(split) for name, split in stored.sets.items()} == {**held.sets}
    assert held.notes == stored.notes
    assert held.notes  # examples that repeat others, or are held out
    assert fingerprint(held) == tuple(fingerprint(stored)) == tuple(fingerprint(stored))  # computed, then read


def token_rows(splits: Splits, tokenizer: Any, prompt: str | None, **data: Any) -> dict[str, list[dict[str, Any]]]:
    config = Config.model_construct(data=Data(**data))
    sets = {name: Encoded(split, tokenizer, config, prompt, quiet=True) for name, split in splits.sets.items()}
    return {name: [encoded[index] for index in range(len(encoded))] for name, encoded in sets.items()}


@pytest.mark.parametrize(
    ("name", "path", "prompt"),
    [("gigaword", "news", None), ("gigaword", "news", "{source} TL;DR: "), ("glue/rte", "rte", None)],
)
def test_tokens_on_disk_are_those_of_single_examples(folder: Path, name: str, path: str, prompt: str | None) -> None:
    held, stored = both(folder, name, path)
    tokenizer = train_tokenizer([row["document"] for row in NEWS], 300)
    data = {"max_source_length": 40, "max_target_length": 3, "source_prefix": "say "}
    expected = token_rows(held, tokenizer, prompt, **data)
    found = token_rows(stored, tokenizer, prompt, **data)
    assert found == expected
    assert [list(row) for row in found["train"]] == [list(row) for row in expected["train"]]  # the order of a batch
    first = expected["train"][0]
    if prompt is None:  # against the tokenizer called for one example
        example = held.sets["train"][0]
        plain = tokenizer("say " + example.source, example.second, truncation=True, max_length=40)
        assert {key: first[key] for key in plain} == dict(plain)
    config = Config.model_construct(data=Data(**data))
    sizes = [Encoded(splits.sets["train"], tokenizer, config, prompt, quiet=True) for splits in (held, stored)]
    assert sizes[0].lengths() == sizes[1].lengths()
    assert len(set(sizes[0].lengths())) > 1


def wordpiece() -> Any:
    """A tokenizer in the manner of BERT: two texts have token types."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([row["document"] for row in NEWS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[UNK] $A", pair="[UNK] $A [UNK] $B:1", special_tokens=[("[UNK]", 0)]
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", model_input_names=names)


def unigram() -> Any:
    """A tokenizer in the manner of T5, which cuts texts on the left."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([row["document"] for row in NEWS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", truncation_side="left")


def byte_level() -> Any:
    return train_tokenizer([row["document"] for row in NEWS], 300)


@pytest.mark.parametrize("make", [byte_level, wordpiece, unigram, lambda: TwoTokenizers(byte_level(), unigram())])
@pytest.mark.parametrize("path", ["news", "rte"])
def test_tokens_are_those_of_the_tokenizer_alone(folder: Path, make: Callable[[], Any], path: str) -> None:
    strange = {"document": "Ärger \u0130  <s>\ud55c\uae00 e\u0301 \ufb01 \t\n" * 9, "summary": "\u2581 ships <unk>"}
    sample_files.write(folder / "news/train.jsonl", [*NEWS, strange])
    _, stored = both(folder, {"news": "gigaword", "rte": "glue/rte"}[path], path)
    tokenizer, train = make(), stored.sets["train"]
    found = token_rows(stored, tokenizer, None, max_source_length=5, max_target_length=3)["train"]
    expected = []
    for example in train:
        row = dict(tokenizer(example.source, example.second, truncation=True, max_length=5))
        target = example.target and tokenizer(text_target=example.target, truncation=True, max_length=3)["input_ids"]
        expected.append({**row, "labels": target or example.label})
    assert found == expected
    assert max(len(row["input_ids"]) for row in found) == 5  # some are cut
    assert tokenizer("two words", return_offsets_mapping=True)["offset_mapping"][-2:] != [(0, 0), (0, 0)]  # as before


def test_a_file_is_read_and_tokenized_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = both(folder, "gigaword", "news")
    tokenizer = train_tokenizer([row["document"] for row in NEWS], 300)
    expected = token_rows(first, tokenizer, None)

    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("it is read again")

    monkeypatch.setattr(readers, "read", forbidden)
    monkeypatch.setattr(Encoded, "_columns", forbidden)
    card, _ = cards.load("gigaword")
    again = loading.load(card, Data(path=str(folder / "news"), cache_dir=str(folder / "cache"), keep_in_memory=False))
    assert token_rows(again, tokenizer, None) == expected
    tokenizer("other", truncation=True, max_length=3, padding="max_length")  # leaves its mark in the tokenizer
    assert token_rows(again, tokenizer, None) == expected


def test_another_tokenizer_or_limit_is_tokenized_again(folder: Path) -> None:
    _, stored = both(folder, "gigaword", "news")
    small, large = (train_tokenizer([row["document"] for row in NEWS], size) for size in (280, 300))
    assert tokenizer_digest(small) != tokenizer_digest(large)
    rows = [token_rows(stored, small, None), token_rows(stored, large, None)]
    rows.append(token_rows(stored, large, None, max_source_length=4))
    assert rows[0] != rows[1] != rows[2]
    assert max(len(row["input_ids"]) for row in rows[2]["train"]) == 4


def test_a_changed_file_of_the_same_size_and_time_is_read_again(folder: Path) -> None:
    path = folder / "news/train.jsonl"
    _, before = both(folder, "gigaword", "news")
    times = path.stat()
    path.write_text(path.read_text().replace("harbour", "harbors"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size
    held, after = both(folder, "gigaword", "news")
    assert list(after.sets["train"]) == held.sets["train"]
    assert "harbors" in after.sets["train"][0].source
    assert "harbour" in before.sets["train"][0].source  # that of a run that goes on


@pytest.mark.parametrize("where", ["arrow", "json", "facts", "depth"])
def test_damage_is_found_told_and_mended(folder: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    held, _ = both(folder, "gigaword", "news")
    capsys.readouterr()
    for path in (folder / "cache").glob("*.arrow" if where == "arrow" else "*.json"):
        content = bytearray(path.read_bytes())
        if where == "facts":
            seal = json.loads(content)
            seal["facts"]["notes"] = ["an invention"]
            path.write_text(json.dumps(seal))
        elif where == "depth":
            path.write_text("[" * 100_000)
        elif where == "json":
            path.write_bytes(content[: len(content) // 2])
        elif content:
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    again, stored = both(folder, "gigaword", "news")
    assert "damaged, and made again" in capsys.readouterr().err
    assert {name: list(split) for name, split in stored.sets.items()} == {**held.sets}
    assert again.notes == stored.notes
    assert not list((folder / "cache").glob("*.part"))


def test_a_fault_in_a_file_leaves_nothing(folder: Path) -> None:
    path = folder / "news/train.jsonl"
    path.write_text(path.read_text() + '{"document": "a", "summary": 3}\n')
    with pytest.raises(BadInput, match=r"train.jsonl:61: the column 'summary' is 3: expected text"):
        _on_disk(folder)
    assert not [name for name in os.listdir(folder / "cache") if not name.endswith(".lock")]


def test_a_file_that_changes_while_it_is_read_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its examples would be those of the file as it was before, whenever that is used again."""
    path, records = folder / "news/train.jsonl", loading.records

    def appended(card: Any, file: Path, *rest: Any) -> Any:
        yield from list(records(card, file, *rest))
        if file == path:
            path.write_text(path.read_text().replace("harbour", "harbors"))

    before = path.read_text()
    with monkeypatch.context() as patch:
        patch.setattr(loading, "records", appended)
        with pytest.raises(BadInput, match=r"train\.jsonl: changed while it was read: run the command again"):
            _on_disk(folder)
    path.write_text(before)
    assert "harbour" in _on_disk(folder).sets["train"][0].source


def _on_disk(folder: Path) -> Splits:
    card, _ = cards.load("gigaword")
    return loading.load(card, Data(path=str(folder / "news"), cache_dir=str(folder / "cache"), keep_in_memory=False))


def test_a_cache_that_cannot_be_written_is_one_line(folder: Path) -> None:
    (folder / "cache").write_text("a file")
    with pytest.raises(
        BadInput, match=r"data.cache_dir=.*: cannot be written \(File exists\): choose another"
    ) as error:
        _on_disk(folder)
    assert len(error.value.lines) == 1


def test_small_files_are_held_in_memory_and_large_ones_are_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, _ = cards.load("gigaword")
    data = Data(path=str(folder / "news"), cache_dir=str(folder / "cache"))
    assert isinstance(loading.load(card, data).sets["train"], list)
    assert not (folder / "cache").exists()
    monkeypatch.setattr(loading.stored_examples, "IN_MEMORY", (folder / "news/validation.jsonl").stat().st_size)
    splits = loading.load(card, data)
    assert isinstance(splits.sets["train"], StoredExamples)
    assert isinstance(splits.sets["validation"], list)  # which has less
    assert fingerprint(splits)[0] == fingerprint(_on_disk(folder))[0]


def test_a_value_is_computed_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> list[int]:
        calls.append(1)
        return [len(calls)]

    key = arrow_cache.key_of("x")
    assert [arrow_cache.value(tmp_path, key, compute) for _ in range(3)] == [[1]] * 3
    assert arrow_cache.value(tmp_path, arrow_cache.key_of("y"), compute) == [2]
