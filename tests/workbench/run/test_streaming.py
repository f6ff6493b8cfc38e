"""Streams: the examples of a run that holds them, in another order; trained on, resumed and refused."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
import safetensors.torch
import torch
from torch.utils.data import SequentialSampler

from seqreg.cli.check import check
from seqreg.errors import BadInput
from seqreg.workbench.config import cards, run_config
from seqreg.workbench.config.cards import Card
from seqreg.workbench.config.settings import Config, Data
from seqreg.workbench.data import loading
from seqreg.workbench.data.encoding import INDEX, Encoded, EncodedStream
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.tokenizers import train_tokenizer
from seqreg.workbench.run import train
from seqreg.workbench.run.record import fingerprint
from tests.helpers import sample_files, torchrun

TRAIN = 40


@pytest.fixture(scope="module")
def news(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headlines in a folder, and a tokenizer beside it."""
    home = tmp_path_factory.mktemp("streams")
    card, _ = cards.load("gigaword")
    sample_files.folder(home / "data", card, train=TRAIN, held=6)
    texts = [row["document"] for row in sample_files.rows(card, TRAIN)]
    train_tokenizer(texts, 300).save_pretrained(str(home / "tokenizer"))
    return home


def rows(news: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (news / "data/train.jsonl").read_text().splitlines()]


def headlines(**further: Any) -> Card:
    return cards.load("gigaword")[0].model_copy(update=further)


def stored_as(ending: str, news: Path, folder: Path) -> Path:
    """The same training set in a file of another format, with an empty text that is left out."""
    table = pandas.DataFrame([*rows(news), {"document": " ", "summary": "x"}])
    folder.mkdir()
    if ending == ".jsonl":
        table.to_json(folder / "train.jsonl", orient="records", lines=True)
    elif ending == ".csv":
        table.to_csv(folder / "train.csv", index=False, sep=";", encoding="latin-1")
    else:
        table.to_parquet(folder / "train.parquet")
    if ending == ".csv":
        table[:3].to_csv(folder / "validation.csv", index=False, sep=";", encoding="latin-1")
    else:
        sample_files.write(folder / "validation.jsonl", rows(news)[:3])
    return folder


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("most", [{}, {"train": 7}])
def test_a_stream_has_the_examples_of_the_file(ending: str, most: dict[str, int], news: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"delimiter": ";", "encoding": "latin-1"} if ending == ".csv" else {}
    options |= {"path": str(stored_as(ending, news, tmp_path / "data")), "limit": most}
    held, streamed = (loading.load(headlines(), Data(streaming=way, **options)) for way in (False, True))
    assert "train" not in streamed.sets
    assert streamed.sets["validation"] == held.sets["validation"]
    stream, expected = streamed.stream, list(held.sets["train"])
    assert stream is not None
    assert len(expected) == most.get("train", TRAIN)
    assert list(stream.read()) == list(streamed.first) == expected
    passes = list(itertools.islice(stream.shuffled(1, 1), 2 * len(expected)))  # in order, and from the beginning again
    assert passes == 2 * list(enumerate(expected))
    mixed = list(itertools.islice(stream.shuffled(1, 10), 2 * len(expected)))
    assert list(itertools.islice(stream.shuffled(1, 10), 2 * len(expected))) == mixed
    for half in (mixed[: len(expected)], mixed[len(expected) :]):
        assert half != list(enumerate(expected))
        assert sorted(half, key=lambda pair: pair[0]) == list(enumerate(expected))
    assert mixed[: len(expected)] != mixed[len(expected) :]
    assert next(stream.shuffled(2, 10)) != mixed[0] or list(itertools.islice(stream.shuffled(2, 10), 40)) != mixed[:40]


def test_token_ids_of_a_stream_are_those_of_its_examples(news: Path) -> None:
    tokenizer = train_tokenizer([row["document"] for row in rows(news)], 300)
    data: dict[str, Any] = {"path": str(news / "data"), "max_source_length": 20, "max_target_length": 5}
    config = Config.model_construct(data=Data(streaming=True, buffer_size=8, **data), seed=3)
    stream = loading.load(headlines(), config.data).stream
    assert stream is not None
    encoded = Encoded(loading.load(headlines(), Data(**data)).sets["train"], tokenizer, config)
    drawn = list(itertools.islice(EncodedStream(stream, Encoded((), tokenizer, config)), TRAIN))
    assert sorted(row[INDEX] for row in drawn) == list(range(TRAIN))
    assert all(row == {**encoded[row[INDEX]], INDEX: row[INDEX]} for row in drawn)


@pytest.mark.parametrize("columns", [{}, {"files": None}])
def test_a_dataset_of_the_hub_is_streamed(columns: dict[str, Any], news: Path, tmp_path: Path) -> None:
    """By datasets itself, which takes a folder of Parquet files for a dataset of the hub."""
    home = tmp_path / "hub"
    home.mkdir()
    for name in ("train", "validation", "test"):
        pandas.read_json(news / f"data/{name}.jsonl", lines=True).to_parquet(home / f"{name}-00000.parquet")
    given = {"files": str(home / "{split}-*.parquet")} if "files" not in columns else {}
    hub = cards.Hub(repo=str(home), **given)
    card = headlines(hub=hub, splits={"train": "train", "validation": "validation", "test": "test"})
    held, streamed = (loading.load(card, Data(streaming=way, limit={"test": 2})) for way in (False, True))
    assert streamed.stream is not None
    assert list(streamed.stream.read()) == list(held.sets["train"])
    assert {name: list(split) for name, split in streamed.sets.items()} == {
        name: list(held.sets[name]) for name in ("validation", "test")
    }
    assert len(streamed.sets["test"]) == 2
    again = loading.load(card, Data(streaming=True, limit={"test": 2}))
    assert fingerprint(again) == fingerprint(streamed)
    assert loading.load(card, Data(streaming=True), needs_train=False).stream is None
    with pytest.raises(BadInput, match=r"train of .* is train\[:80%\] on the hub, and a stream has no slices"):
        loading.load(card.model_copy(update={"splits": {"train": "train[:80%]"}}), Data(streaming=True))


def test_a_corpus_is_not_held_in_memory(tmp_path: Path) -> None:
    row = {"document": "a ship " * 1000, "summary": "a ship"}  # 7 kB each
    sample_files.write(tmp_path / "validation.jsonl", [row])
    with (tmp_path / "train.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for _ in range(2500))
    stream = loading.load(headlines(), Data(path=str(tmp_path), streaming=True)).stream
    assert stream is not None
    next(stream.shuffled(1, 1))  # imports datasets
    tracemalloc.start()
    drawn = sum(1 for _ in itertools.islice(stream.shuffled(1, 100), 3000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drawn == 3000
    assert peak < 3 * 100 * 7_000  # of 17.5 MB


def settings(news: Path, output: Path, *further: str) -> list[str]:
    tiny = sample_files.tiny("bart", news / "data")
    plain = ["logging.tensorboard=false", "optimisation.lr_scheduler_type=constant", "checkpoints.save_steps=2"]
    plain += ["optimisation.per_device_train_batch_size=8", "optimisation.gradient_accumulation_steps=1"]
    return [*tiny, *plain, f"model.tokenizer={news / 'tokenizer'}", f"output={output}", *further]


def run_of(news: Path, output: Path, *further: str) -> run_config.Run:
    return run_config.resolve("gigaword", terms=["r3f"], overrides=settings(news, output, *further))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


STREAM = ("data.streaming=true", "optimisation.max_steps=8")  # 64 examples of 40: into the second pass


def test_a_streamed_run_trains_the_model_of_one_that_holds_its_examples(
    news: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    five = "optimisation.max_steps=5"  # one pass
    train.train(run_of(news, tmp_path / "stream", "data.streaming=true", "data.buffer_size=1", five))
    monkeypatch.setattr(
        train.FaultTolerantTrainer, "_get_train_sampler", lambda self, *_: SequentialSampler(range(TRAIN))
    )
    train.train(run_of(news, tmp_path / "held", five))
    assert same(tmp_path / "stream", tmp_path / "held")
    record = json.loads((tmp_path / "stream/run.json").read_text())
    assert not any(key.startswith("data.rows.tokens") for key in record["inputs"])
    assert record["settings"]["data.streaming"] is True


def test_a_streamed_run_resumes_exactly(news: Path, tmp_path: Path) -> None:
    whole = run_of(news, tmp_path / "whole", *STREAM, "data.buffer_size=16")
    train.train(whole)
    half = [*STREAM[:1], "data.buffer_size=16"]
    train.train(run_of(news, tmp_path / "half", *half, "optimisation.max_steps=6"))
    rest = run_of(news, tmp_path / "half", *half, "optimisation.max_steps=8")
    train.train(rest, resume=True, allow_change=["optimisation.max_steps"])
    assert same(tmp_path / "whole", tmp_path / "half")
    ordered = run_of(news, tmp_path / "ordered", *STREAM, "data.buffer_size=1")
    train.train(ordered)
    assert not same(tmp_path / "whole", tmp_path / "ordered")  # the buffer does mix them
    with (news / "data/train.jsonl").open("a") as file:
        file.write(json.dumps({"document": "one more", "summary": "more"}) + "\n")
    try:
        with pytest.raises(BadInput, match="its run was started with other settings") as caught:
            train.train(rest)
        assert "data.rows" in str(caught.value)
    finally:
        sample_files.folder(news / "data", headlines(), train=TRAIN, held=6)


def test_two_ranks_share_a_stream(news: Path, tmp_path: Path) -> None:
    """Two ranks with batches of 4 see the examples, and make the steps, of one with batches of 8."""
    further = (*STREAM, "data.buffer_size=16", "model.settings.dropout=0.0", "evaluation.drift_examples=0")
    train.train(run_of(news, tmp_path / "one", *further, "terms={}"))
    words = settings(news, tmp_path / "two", *further, "optimisation.per_device_train_batch_size=4")
    agent = torchrun.Agent("train", "gigaword", *words, log=tmp_path / "log")
    assert agent.wait(200) == 0, agent.text()
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_check_tells_what_is_streamed(news: Path, tmp_path: Path) -> None:
    outline = check(run_of(news, tmp_path / "run", *STREAM))
    first = next(entry for entry in outline.data if entry["split"] == "train" and entry["text"] == "source")
    assert first["rows"] is None
    assert outline.summary["epochs"] is None
    from rich.console import Console

    console = Console(width=200, record=True, file=None)
    with console.capture() as shown:
        console.print(outline)
    assert "streamed" in shown.get()
    assert "8 steps of 8 examples per device; evaluated on" in shown.get()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data.group_by_length=true"], r"data\.group_by_length=true: lengths are not known before"),
        (["data.packing=true"], r"data\.packing=true: lengths are not known before"),
        (["data.train_fraction=0.5"], r"data\.train_fraction=0\.5: the number of examples is not known"),
        (["data.holdout=5"], r"data\.holdout=5: nothing can be held out of a stream"),
        (["data.keep_in_memory=true"], r"data\.keep_in_memory=true: a stream is neither"),
        (["data.dataloader_num_workers=2"], r"data\.dataloader_num_workers=2: .*: at most 1"),
        (["optimisation.max_steps=null", "optimisation.num_train_epochs=1"], r"set optimisation\.max_steps"),
        (["model.tokenizer=null"], r"made of all its text: set model\.tokenizer=NAME"),
        (["data.streaming=false", "data.buffer_size=5"], r"data\.buffer_size=5: of a stream: set data\.streaming=true"),
        (["optimisation.update={child_tuning_d: {}}"], r"optimisation\.update=.*: measures the training set before"),
        (["data.path={data}/train.jsonl"], r"data\.streaming=true cannot split one file: give a folder"),
        (["data.path={tokenizer}"], r"expected a file train\.jsonl"),
    ],
)
def test_what_a_stream_cannot_do_is_one_line(given: list[str], message: str, news: Path, tmp_path: Path) -> None:
    places = {"data": news / "data", "tokenizer": news / "tokenizer"}
    given = [word.format(**places) if word.startswith("data.path") else word for word in given]
    with pytest.raises(BadInput, match=message) as caught:
        train.train(run_of(news, tmp_path / "run", *STREAM, *given))
    assert len(caught.value.lines) == 1
    assert not (tmp_path / "run").exists()


def test_cards_that_need_all_examples_are_refused(tmp_path: Path) -> None:
    rte, _ = cards.load("glue/rte")
    with pytest.raises(BadInput, match=r"the validation set of .* is held out of its training examples"):
        loading.load(rte, Data(path=str(sample_files.folder(tmp_path / "rte", rte)), streaming=True))
    generated, _ = cards.load("synthetic_news")
    with pytest.raises(BadInput, match="is generated, in memory: leave it out"):
        loading.load(generated, Data(streaming=True))
    (tmp_path / "rte/validation.jsonl").unlink()
    (tmp_path / "news").mkdir()
    sample_files.write(tmp_path / "news/train.jsonl", sample_files.rows(headlines(), 5))
    with pytest.raises(BadInput, match=r"nothing can be held out of a stream: add a file validation\.jsonl"):
        loading.load(headlines(), Data(path=str(tmp_path / "news"), streaming=True))


def test_bad_records_are_named_when_they_are_reached(tmp_path: Path) -> None:
    good = sample_files.rows(headlines(), 1200)
    sample_files.write(tmp_path / "validation.jsonl", good[:2])
    path = sample_files.write(tmp_path / "train.jsonl", [*good[:1100], {"document": 5, "summary": "x"}])
    stream = loading.load(headlines(), Data(path=str(tmp_path), streaming=True)).stream

    def read() -> Iterator[Example]:
        assert stream is not None
        return (example for _, example in stream.shuffled(1, 1))

    assert len(list(itertools.islice(read(), 1090))) == 1090  # datasets reads a little ahead
    with pytest.raises(BadInput, match=r"train\.jsonl:1101: the column 'document' is 5"):
        list(itertools.islice(read(), 1101))
    sample_files.write(path, [{"document": 5, "summary": "x"}, *good])  # at once, where it is among the first
    with pytest.raises(BadInput, match=r"train\.jsonl:1: the column 'document' is 5"):
        loading.load(headlines(), Data(path=str(tmp_path), streaming=True))
    empty = {"document": "", "summary": "x"}
    sample_files.write(path, [*good[:900], *[empty] * 101])
    with pytest.raises(BadInput, match=r"101 of 1001 examples have an empty text, more than data\.max_empty_fraction"):
        loading.load(headlines(), Data(path=str(tmp_path), streaming=True))
    path.write_text("")
    with pytest.raises(BadInput, match=r"train\.jsonl: 0 examples"):
        loading.load(headlines(), Data(path=str(tmp_path), streaming=True))
