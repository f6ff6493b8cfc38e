"""The splits of a task: from local files, the hub or a generator, by the rules of its card."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqreg.errors import BadInput
from seqreg.workbench.config import cards
from seqreg.workbench.config.cards import Card, HubSplit
from seqreg.workbench.config.settings import Data, Replay
from seqreg.workbench.data import arrow_cache, stored_examples, synthetic_news
from seqreg.workbench.data import examples as examples_of_cards
from seqreg.workbench.data.examples import Example, column_of, example, examples, names_of, text_of
from seqreg.workbench.data.stored_examples import OnDisk, StoredExamples, identity
from seqreg.workbench.data.streaming import StreamedExamples
from seqreg.workbench.text import readers
from seqreg.workbench.text.atomic_files import check_file, regular
from seqreg.workbench.text.readers import Record

ALIASES = {
    "validation": ("dev", "valid", "val", "validation_matched", "dev_matched"),
    "mismatched": ("validation_mismatched", "dev_mismatched"),
}
UNLABELLED, REPLAY = "unlabelled", "replay"
"""Texts without labels, and old examples, that training sees in addition to the training set."""


PLAIN = Data()
"""Files as they are by default: UTF-8, with commas."""


@dataclass
class Splits:
    """The examples of every split, and what a user should know about them.

    Args:
        also: names of those that come from other tasks
        corpora: plain texts, by name: examples that have a source alone
        stream: training examples that are read while the model trains; there is no set `train` then
    """

    sets: dict[str, Sequence[Example]]
    notes: list[str] = field(default_factory=list)
    also: list[str] = field(default_factory=list)
    corpora: dict[str, Sequence[Example]] = field(default_factory=dict)
    stream: StreamedExamples | None = None

    @property
    def first(self) -> Sequence[Example]:
        """The training examples, or the first ones of a stream; none where there are none."""
        return self.sets.get("train", ()) if self.stream is None else self.stream.first

    def evaluations(self, card: Card) -> list[str]:
        """The splits that a model is judged by in the end: those of the card that are there."""
        names = ["test" if card.holdout and name == "validation" else name for name in card.evaluations]
        present = [name for name in names if name in self.sets]
        return [*(present or ["validation"]), *self.also]


def load(card: Card, data: Data, *, needs_train: bool = True) -> Splits:
    """All splits of a task, from where `data` says, and what every other task in `data.also` is judged by."""
    splits = _splits(card, data, needs_train)
    for name, path in data.also.items():
        _add_other(splits, card, name, path, data)
    for name, path in data.corpora.items():
        if name in splits.sets:
            raise BadInput(f"data.corpora.{name}: there is a split of this name: call it something else")
        splits.corpora[name] = _corpus(name, Path(path), data)[: data.limit.get(name)]
    _warn_of_overlap(splits)
    _warn_of_one_class(card, splits)
    return splits


def _add_other(splits: Splits, card: Card, name: str, path: str | None, data: Data) -> None:
    """Add the sets that another task of the same kind and classes is judged by."""
    other, _ = cards.load(name)
    if (other.kind, other.labels) != (card.kind, card.labels):
        raise BadInput(f"data.also.{name}: {other.title} has another kind or other classes than {card.title}")
    same = ("limit", "max_empty_fraction", "keep_in_memory", "cache_dir")
    settings = Data(path=path, **{key: getattr(data, key) for key in same})
    try:
        others = _splits(other, settings, False)
    except BadInput as error:
        rest = str(error).removeprefix("data.path")  # which is not what was set
        raise BadInput(f"data.also.{name}{rest if rest != str(error) else f': {error}'}") from None
    short = Path(name).stem if name.endswith((".yaml", ".yml")) else name.replace("/", "-")
    if path is not None and other == card:  # the card's name would say that it is the task itself
        short = f"{short}-{Path(path).stem}"
    for split in others.evaluations(other):
        title = short if split in ("test", "validation") else f"{short}-{split}"
        if title in splits.sets:
            raise BadInput(f"data.also.{name}: there is a split of the name {title} already")
        splits.sets[title] = others.sets[split]
        splits.also.append(title)
    splits.notes += [f"{name}: {note}" for note in others.notes]


def _corpus(name: str, path: Path, data: Data) -> list[Example]:
    """The texts of a file: those between empty lines of a .txt file, else those of the column `text`."""
    check_file(path, f"data.corpora.{name}=")
    if path.suffix == ".txt":
        lines = (line.rstrip() for _, line in readers.lines(regular(path), encoding=data.encoding or readers.UTF8))
        blocks = itertools.groupby(lines, key=bool)
        texts = ["\n".join(block) for filled, block in blocks if filled]
    else:
        delimiter = data.delimiter if path.suffix == ".csv" else None
        encoding = data.encoding or readers.UTF8
        records = readers.read(path, delimiter=delimiter, encoding=encoding, options="data.")
        texts = [text_of(record, "text", where) for where, record in records]
    if not any(texts):
        raise BadInput(f"data.corpora.{name}={path}: no text in it")
    return [Example(text) for text in texts if text]


def _splits(card: Card, data: Data, needs_train: bool) -> Splits:
    _check_used(card, data)
    if data.path is not None:
        splits = _local(card, data, needs_train)
    elif card.generated is not None:
        if data.streaming:
            raise BadInput(f"data.streaming=true: {card.title} is generated, in memory: leave it out")
        splits = _generated(card)
    elif card.hub is not None:
        splits = Splits({name: _hub(card, name, data) for name in card.splits if name != "train" or not data.streaming})
        if data.streaming and needs_train:
            splits.stream = _hub_stream(card, data)
    else:
        raise BadInput(f"{card.title}: give the file or folder of your data with data.path=FILE_OR_FOLDER")
    _carve(card, data, splits)
    if data.unlabelled is not None and needs_train:
        check_file(data.unlabelled, "data.unlabelled=")
        splits.sets[UNLABELLED] = _texts(card, data, data.unlabelled)
    if data.replay is not None and needs_train:
        splits.sets[REPLAY] = _old_examples(card, data, data.replay)
    for name, most in data.limit.items():
        if name == "train" and data.streaming:
            continue  # which stops there
        if name in splits.sets:
            splits.sets[name] = splits.sets[name][:most]
        elif name not in ("train", "validation", "test", *card.splits, *data.corpora):
            raise BadInput(f"data.limit.{name}: there is no split of this name, only {', '.join(splits.sets)}")
    if data.train_fraction < 1 and "train" in splits.sets:
        train = splits.sets["train"]
        splits.sets["train"] = _chosen(train, _drawn(len(train), round(data.train_fraction * len(train))))
    return splits


def _texts(card: Card, data: Data, file: str) -> Sequence[Example]:
    """The texts of data.unlabelled, with targets for a decoder where a column of the file has them."""
    column = data.unlabelled_targets
    if column in ("start", "none"):
        return _without_labels(read_file(card, Path(file), data, labelled=False))
    if card.kind != "generation":
        raise BadInput(f"data.unlabelled_targets={column}: a task of kind {card.kind} has no decoder: leave it out")
    named = card.model_copy(update={"columns": card.columns.model_copy(update={"target": column})})
    return read_file(named, Path(file), data)


def _old_examples(card: Card, data: Data, replay: Replay) -> Sequence[Example]:
    """The training examples of the task of data.replay."""
    other = card if replay.task is None else cards.load(replay.task)[0]
    if (other.kind, other.labels) != (card.kind, card.labels):
        raise BadInput(
            f"data.replay.task={replay.task}: {other.title} has another kind or other classes than {card.title}"
        )
    if replay.path is not None and os.path.isfile(replay.path):
        return read_file(other, Path(replay.path), labelled=replay.targets == "labels")
    same = ("max_empty_fraction", "keep_in_memory", "cache_dir")
    settings = Data(path=replay.path, **{key: getattr(data, key) for key in same})
    try:
        return _splits(other, settings, True).sets["train"]
    except BadInput as error:
        rest = str(error).removeprefix("data.path")
        raise BadInput(f"data.replay.path{rest if rest != str(error) else f': {error}'}") from None


def _check_used(card: Card, data: Data) -> None:
    """Refuse settings of files where the data is from elsewhere, and settings of the hub where it is not from there."""
    local = data.path is not None
    for key in ("subset", "revision"):
        if getattr(data, key) is not None and (local or card.hub is None):
            raise BadInput(f"data.{key}={getattr(data, key)}: the data of this run are not from the hub: leave it out")
    for key in ("delimiter", "encoding"):
        if not local and getattr(data, key) is not None:
            raise BadInput(f"data.{key}={getattr(data, key)}: for local files, and data.path names none: leave it out")


def _read(
    card: Card, path: Path, data: Data, name: str = "", *, training: bool = False, labelled: bool = True
) -> tuple[Sequence[Example], list[str]]:
    """The examples of a file, and notes on them: in memory, or in an Arrow file of the cache where it is large."""
    options: Any = {"training": training, "labelled": labelled, "empty": data.max_empty_fraction if training else 1.0}
    large = path.is_file() and path.stat().st_size > stored_examples.IN_MEMORY
    if data.keep_in_memory or (data.keep_in_memory is None and not large):
        return examples(card, records(card, path, data, name), **options)

    def read(into: Any) -> list[str]:
        return examples(card, records(card, path, data, name), into=into, **options)[1]

    settings = {"split": name, "delimiter": data.delimiter, "encoding": data.encoding, **options}
    return stored_examples.store(card, path, arrow_cache.folder_of(data), settings, read)


def read_file(card: Card, path: Path, data: Data = PLAIN, *, labelled: bool = True) -> Sequence[Example]:
    """All examples of one file."""
    made, notes = _read(card, path, data, labelled=labelled)
    if not made:
        raise BadInput(f"{path}: 0 examples{'; ' + notes[0] if notes else ''}")
    return made


def _stream(card: Card, path: Path, data: Data) -> StreamedExamples:
    """The training examples of a file, as a stream."""

    def read() -> Iterator[Example]:
        return examples_of_cards.stream(card, records(card, path, data, "train"), empty=data.max_empty_fraction)

    return StreamedExamples.of(read, str(path), data.limit.get("train"), arrow_cache.file_digest(regular(path)))


def _local(card: Card, data: Data, needs_train: bool) -> Splits:
    path = Path(data.path or "")
    if data.streaming and not os.path.isdir(path):
        raise BadInput(
            f"data.path={path}: data.streaming=true cannot split one file: give a folder that has train and validation"
        )
    if os.path.exists(path) and not os.path.isdir(path):
        return _one_file(card, regular(path), data)
    if not os.path.isdir(path):
        raise BadInput(f"data.path={path}: no such file or folder")
    for pattern in card.files.names:
        if "{" not in pattern and (path / pattern).is_file():  # a file of all examples, whatever the split
            if data.streaming:
                raise BadInput(f"data.streaming=true: {path / pattern} has all splits, and is not read as a stream")
            return _one_file(card, path / pattern, data)
    splits = Splits({})
    for name in dict.fromkeys(["train", "validation", "test", *card.splits]):
        file = _file_of(path, name, card)
        if file is None:
            continue
        others = [
            other.name for ending in readers.ENDINGS if (other := file.with_suffix(ending)) != file and other.is_file()
        ]
        if others:
            splits.notes.append(f"{file.name} is read, and not {', '.join(others)}: data.path=FILE names one alone")
        if name not in ("train", "validation", *card.evaluations):
            splits.notes.append(
                f"{file.name} is there and not scored: this task is judged by {', '.join(card.evaluations)}"
            )
            continue
        if name == "train" and data.streaming:
            splits.stream = _stream(card, file, data) if needs_train else None
            continue
        made, notes = _read(card, file, data, name, training=name == "train")
        if not made and card.files.only is not None and not notes:  # the file has other configurations
            continue
        if not made:
            raise BadInput(f"{file}: 0 examples{'; ' + notes[0] if notes else ''}")
        splits.sets[name] = made
        splits.notes += [f"{file.name}: {note}" for note in notes]
    if "train" not in splits.sets and splits.stream is None and needs_train:
        raise BadInput(f"data.path={path}: expected a file train{'|'.join(readers.ENDINGS)} in it{_other(path, card)}")
    if "validation" not in splits.sets and splits.stream is not None:
        raise BadInput(
            f"data.path={path}: data.streaming=true: nothing can be held out of a stream: add a file validation"
            f"{'|'.join(readers.ENDINGS)}"
        )
    if not splits.sets:
        raise BadInput(f"data.path={path}: no file for {', '.join(['validation', *card.evaluations])} in it")
    if "validation" not in splits.sets and "train" in splits.sets:
        _hold_out(splits, path)
    missing = [name for name in card.evaluations if name not in splits.sets]
    if missing and "validation" in splits.sets:
        splits.notes.append(f"no file for {', '.join(missing)}: not evaluated on")
    return splits


def _hold_out(splits: Splits, path: Path) -> None:
    """Take a tenth of the training examples for validation."""
    shuffled = _shuffled(splits.sets["train"])
    if len(shuffled) < 2:
        raise BadInput(
            f"data.path={path}: one training example, and no file validation{'|'.join(readers.ENDINGS)}: add one"
        )
    held = max(1, len(shuffled) // 10)
    splits.sets["train"], splits.sets["validation"] = shuffled[held:], shuffled[:held]
    splits.notes.append(f"no validation file: {held} training examples, by a fixed shuffle, are held out for it")


def _carve(card: Card, data: Data, splits: Splits) -> None:
    """Make the validation set that is distributed the test set, and take another out of the training examples."""
    if not card.holdout:
        if data.holdout is not None:
            raise BadInput(f"data.holdout={data.holdout}: {card.title} has a validation set of its own: leave it out")
        return
    if "test" in splits.sets or "validation" not in splits.sets:
        return
    if splits.stream is not None:
        raise BadInput(
            f"data.streaming=true: the validation set of {card.title} is held out of its training examples, which a "
            "stream does not allow: leave it out, or give a folder that has train, validation and test by data.path"
        )
    splits.sets["test"] = splits.sets.pop("validation")
    if "train" not in splits.sets:
        return
    train = splits.sets["train"]
    if len(train) < 2:
        raise BadInput(f"{card.title}: {len(train)} training examples: at least 2 are needed, for one is held out")
    size = min(data.holdout or card.holdout, max(1, len(train) // 10))
    held = _stratified(train, size)
    splits.sets["validation"] = _chosen(train, sorted(held))
    splits.sets["train"] = _chosen(train, [index for index in range(len(train)) if index not in held])
    splits.notes.append(
        f"the validation set is {size} of the {len(train)} train examples, by a fixed draw and stratified by label; "
        f"the {len(splits.sets['test'])} examples that are distributed for validation are the test set"
    )


def _stratified(examples: Sequence[Example], size: int) -> set[int]:
    """Indices of so many examples whose labels are distributed as all are: evenly spaced in the order of labels."""
    rng, labels = random.Random(0), _labels(examples)
    order = sorted(range(len(examples)), key=lambda index: (labels[index] or 0, rng.random()))
    return {order[int((number + 0.5) * len(order) / size)] for number in range(size)}


def _chosen(examples: Sequence[Example], indices: Sequence[int]) -> Sequence[Example]:
    return examples.select(indices) if isinstance(examples, OnDisk) else [examples[index] for index in indices]


def _without_labels(examples: Sequence[Example]) -> Sequence[Example]:
    if isinstance(examples, StoredExamples):
        return examples.without_labels()
    return [Example(example.source, example.second) for example in examples]


def _labels(examples: Sequence[Example]) -> list[int | float | None]:
    if isinstance(examples, StoredExamples):
        return examples.column("label")
    return [example.label for example in examples]


def _file_of(folder: Path, name: str, card: Card) -> Path | None:
    """The file of a split: by its name, another of its names, or as the dataset is distributed."""
    split = card.splits.get(name, name)
    base, config = (split.split, split.config) if isinstance(split, HubSplit) else (name, None)
    spelt = [base, *ALIASES.get(base, ())]
    stems = [name, *ALIASES.get(name, ())]
    for pattern in card.files.names:
        stems += [pattern.format(split=spelling, config=_config(card, config)) for spelling in spelt]
    for stem in stems:
        for ending in ("", *readers.ENDINGS):
            if (ending or stem.endswith(".txt")) and (folder / f"{stem}{ending}").is_file():
                return folder / f"{stem}{ending}"
    return None


def _config(card: Card, config: str | None) -> str:
    return config or (card.hub.config if card.hub is not None else None) or ""


def records(card: Card, path: Path, data: Data, name: str = "") -> Iterator[tuple[str, Record]]:
    """The records of a file, as the dataset is distributed; where one file has all configurations, those of a split."""
    columns = card.columns.model_dump().values()
    known = {name for names in columns if names for name in names_of(names)}
    named = path.suffix == ".txt" and any(pattern.endswith(".txt") for pattern in card.files.names)
    ways: Any = {"header": card.files.header, "known": known, "mapping": card.files.mapping}
    delimiter = data.delimiter or (card.files.delimiter if path.suffix == ".csv" else None)
    encoding = data.encoding or card.files.encoding or readers.UTF8
    ways |= {"delimiter": delimiter, "encoding": encoding, "options": "data."}
    plain = readers.CONLL if card.kind == "token_classification" else ".tsv"
    every = readers.read(path, ending=plain if named else None, **ways)
    split, column = card.splits.get(name, name), card.files.only
    if column is None or not name:
        return every
    wanted = _config(card, split.config if isinstance(split, HubSplit) else None)
    return ((where, record) for where, record in every if record.get(column, wanted) == wanted)


def _other(folder: Path, card: Card) -> str:
    """What to do with a folder that has no training set, but another one."""
    for name in ("validation", *card.evaluations):
        file = _file_of(folder, name, card)
        if file is not None:
            return f"; it has {file.name}: data.path={file} splits that one 80%, 10%, 10%"
    return ""


def _one_file(card: Card, path: Path, data: Data) -> Splits:
    made, notes = _read(card, path, data, "train", training=True)
    if len(made) < 3:
        raise BadInput(f"{path}: {len(made)} examples; at least 3 are needed to split it, or give a folder")
    shuffled = _shuffled(made)
    held = max(1, len(shuffled) // 10)
    sets: dict[str, Sequence[Example]] = {
        "train": shuffled[2 * held :], "validation": shuffled[:held], "test": shuffled[held : 2 * held],
    }  # fmt: skip
    notes = [f"{path.name}: {note}" for note in notes]
    return Splits(sets, [*notes, f"{path.name} is split 80%, 10%, 10% by a fixed shuffle"])


def _shuffled(examples: Sequence[Example]) -> Sequence[Example]:
    return _chosen(examples, random.Random(0).sample(range(len(examples)), len(examples)))


def _drawn(count: int, most: int) -> list[int]:
    return sorted(random.Random(0).sample(range(count), count)[: max(1, most)])


def sample(examples: Sequence[Example], most: int) -> list[Example]:
    """At most so many examples, at least one, by a fixed shuffle; in their order, and within every larger sample."""
    return [examples[index] for index in _drawn(len(examples), most)]


def _generated(card: Card) -> Splits:
    assert card.generated is not None
    sizes = card.generated.rows
    stories = synthetic_news.stories(sum(sizes.values()), card.generated.seed, card.generated.kind)
    made, _ = examples(card, (("generated", story) for story in stories))
    sets: dict[str, Sequence[Example]] = {}
    for name, size in sizes.items():
        sets[name], made = made[:size], made[size:]
    return Splits(sets)


class HubExamples(OnDisk):
    """Examples of a dataset of the hub; they are cleaned when asked for."""

    def __init__(self, dataset: Any, card: Card, name: str, data: Data = PLAIN) -> None:
        files = [arrow_cache.file_digest(Path(file["filename"])) for file in dataset.cache_files]
        rules = ["hub", files, card.model_dump(mode="json"), name, len(dataset)]
        key = arrow_cache.key_of(*rules, code=(examples_of_cards,)) if files and not data.keep_in_memory else None
        super().__init__(dataset, key, arrow_cache.folder_of(data))
        self.card, self.name = card, name

    def example(self, record: Any, index: int) -> Example | None:
        return example(self.card, record, f"{self.name} row {index}")


def _hub(card: Card, name: str, data: Data) -> Sequence[Example]:
    """One split from the hub; held in memory where nothing is to be downloaded first."""
    loaded, place = _from_hub(card, name, data), f"{card.hub and card.hub.repo} {name}"
    used = loaded.filter(lambda record: _is_used(card, record, name == "train"))
    if not data.streaming:
        return HubExamples(used, card, place, data)
    rows = enumerate(used.take(data.limit[name]) if name in data.limit else used)
    read = (example(card, record, f"{place} row {index}") for index, record in rows)
    return [item for item in read if item is not None]


def _hub_stream(card: Card, data: Data) -> StreamedExamples:
    """The training examples of the hub, as a stream."""
    loaded, place = _from_hub(card, "train", data), f"{card.hub and card.hub.repo} train"

    def read() -> Iterator[Example]:
        rows = ((f"{place} row {index}", record) for index, record in enumerate(loaded))
        used = (row for row in rows if _is_used(card, row[1], True))
        return examples_of_cards.stream(card, used, empty=data.max_empty_fraction)

    return StreamedExamples.of(read, place, data.limit.get("train"))


def _from_hub(card: Card, name: str, data: Data) -> Any:
    """A split as datasets has it, or one line on how to provide it."""
    import datasets

    assert card.hub is not None
    wanted = card.splits[name]
    wanted = wanted if isinstance(wanted, HubSplit) else HubSplit(split=wanted)
    config = wanted.config or data.subset or card.hub.config
    if data.revision is not None and card.hub.files is not None:
        raise BadInput(f"data.revision={data.revision}: {card.title} is read from a copy on the hub that has no other")
    if data.streaming and "[" in wanted.split:
        raise BadInput(
            f"data.streaming=true: {name} of {card.title} is {wanted.split} on the hub, and a stream has no slices: "
            "leave it out"
        )
    streaming = {"streaming": True} if data.streaming else {}
    try:
        if card.hub.files is not None:
            base = wanted.split.partition("[")[0]
            files = card.hub.files.format(config=config, split=base)
            return datasets.load_dataset("parquet", data_files={base: files}, split=wanted.split, **streaming)
        return datasets.load_dataset(card.hub.repo, config, split=wanted.split, revision=data.revision, **streaming)
    except Exception as error:  # the hub's clients raise dozens of kinds; the answer to all is the same
        columns = ", ".join(names_of(names)[0] for names in card.columns.model_dump().values() if names)
        raise BadInput(
            f"{card.title}: {card.hub.repo} cannot be had from the hub ({_reason(error)}): give a local copy by "
            f"data.path=FOLDER that has {', '.join(card.splits)} as .jsonl, .csv or .parquet with {columns}"
        ) from None


def _reason(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:120]}" if first else type(error).__name__


def _is_used(card: Card, record: Record, training: bool) -> bool:
    """Whether an example of the hub is used: labelled, and for training not empty."""
    if any(str(record.get(key)) in ("-1", *card.drop) for key in names_of(card.columns.label)):
        return False
    if any(record.get(name) is not None for name in names_of(card.columns.messages)):
        return True  # whose contents are looked at when they are read
    texts = [names for names in (card.columns.source, card.columns.target) if names is not None]
    return not training or all(str(column_of(record, names, "hub")[1]).strip() for names in texts)


def _warn_of_overlap(splits: Splits) -> None:
    """Note examples that are there twice, or in the training set and another; not for data of the hub."""
    train = splits.sets.get("train")
    if train is None or isinstance(train, HubExamples):
        return
    seen = set(_identities(train))
    if len(seen) < len(train):
        splits.notes.append(f"{len(train) - len(seen)} of {len(train)} train examples repeat another")
    for name, split in splits.sets.items():
        if name != "train" and not isinstance(split, HubExamples):
            shared = sum(number in seen for number in _identities(split))
            if shared:
                splits.notes.append(f"{shared} of {len(split)} {name} examples are in the training set too")


def _identities(examples: Sequence[Example]) -> list[int]:
    if isinstance(examples, StoredExamples) and examples.labelled:
        return examples.column("identity")
    return [identity(example) for example in examples]


def _warn_of_one_class(card: Card, splits: Splits) -> None:
    """Note a split of one class, where nothing can be learnt or scored; not for data of the hub."""
    for name, split in splits.sets.items() if card.kind == "classification" else ():
        if name != UNLABELLED and not isinstance(split, HubExamples) and len(set(_labels(split))) == 1:
            label = (card.labels or [])[int(split[0].label or 0)]
            splits.notes.append(f"all {len(split)} {name} examples have the label {label!r}: a score there says little")
