"""What a run depends on, kept in its run.json: settings, examples, model, tokenizer, and the files that it has made.

Whoever resumes a run, reads its model or collects its scores compares with this record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import json
import os
import platform
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import GENERATION_CONFIG_NAME

from seqreg.errors import BadInput
from seqreg.version import __version__
from seqreg.workbench.config.other_names import current_settings
from seqreg.workbench.config.run_config import Run
from seqreg.workbench.config.settings import flat, with_defaults
from seqreg.workbench.data import arrow_cache, models
from seqreg.workbench.data.encoding import tokenizer_digest
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.loading import HubExamples, Splits
from seqreg.workbench.data.stored_examples import StoredExamples
from seqreg.workbench.run import checkpoints
from seqreg.workbench.run.launch import processes
from seqreg.workbench.scores.results import METRICS, MadeWith, made_with_of, scores_of
from seqreg.workbench.text import stored_json
from seqreg.workbench.text.atomic_files import digest, inside, to_json, write_text
from seqreg.workbench.text.readers import UTF8
from seqreg.workbench.text.stored_json import Outline
from seqreg.workbench.text.terminal import warn

RECORD = "run.json"
ROWS, WORLD, WEIGHTS = "data.rows", "world_size", "model.weights"
_WITHOUT_EFFECT = (
    "checkpoints", "data.dataloader_num_workers", "data.path", "data.unlabelled", "engine",
    "evaluation.per_device_eval_batch_size", "logging", "model", "optimisation", "terms", WORLD, ROWS,
)  # fmt: skip
"""Settings that a trained model is scored without; the examples of `data.path` are compared themselves."""
_PRECISION = "optimisation.precision"
_READ_FIRST = ("adapter_config.json", "chat_template.jinja", "generation_config.json", "model.safetensors")
"""Files that `from_pretrained` reads where they are, so that one that was added makes another model."""
_BLOCKS = 256
"""Of a split, each with a hash of its own."""
_SAMPLE = 1000
"""Examples of a dataset on disk that its fingerprint is taken from."""


@dataclass(frozen=True)
class RunRecord:
    """Contents of run.json.

    Args:
        run: a name that no other run has
        settings: of the recipe and the card, the fingerprint of the data and the number of processes, by dotted key
        versions: of the libraries when it was started
        finished: whether the model and its scores are written
        start: the digest of the weights that it started from
        before: scores of the untrained model, if there are any
        retention: the same on every task of data.also
        files: of the model when it was finished, with tokenizer, configurations and adapters: size and SHA-256 of each
        outline: of every split of the data, to tell what has changed
        pretrained: SHA-256 of the pretrained weights that it started from, the same for all seeds; "" from scratch
        inputs: see `inputs_of`
    """

    run: str
    settings: dict[str, Any]
    versions: dict[str, str]
    finished: bool = False
    start: str = ""
    before: stored_json.Before = field(default_factory=stored_json.Before)
    retention: dict[str, stored_json.Before] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    outline: dict[str, stored_json.Outline] = field(default_factory=dict)
    pretrained: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> RunRecord:
        return cls(uuid.uuid4().hex, settings_of(run), versions())

    @classmethod
    def read(cls, folder: Path) -> RunRecord | None:
        """The record of a folder; None if it has none."""
        path = folder / RECORD
        if not path.is_file():
            return None
        record = stored_json.read(cls, path, "--overwrite the run, or choose another output")
        return replace(record, settings=current_settings(record.settings))

    def write(self, folder: Path) -> None:
        write_text(folder / RECORD, to_json(asdict(self), indent=1) + "\n")

    @property
    def facts(self) -> dict[str, Any]:
        """For the manifest of a checkpoint."""
        settings = {key: value for key, value in self.settings.items() if key not in (ROWS, WORLD)}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return {
            "run": self.run, "configuration": digest, "data": self.settings.get(ROWS),
            WORLD: self.settings.get(WORLD), "versions": versions(),
        }  # fmt: skip

    @property
    def everything(self) -> dict[str, Any]:
        """All that a run depends on, by dotted key."""
        weights = {WEIGHTS: self.pretrained} if self.pretrained else {}
        return {**self.settings, **self.inputs, **weights}


def versions() -> dict[str, str]:
    return {
        "seqreg": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def settings_of(run: Run) -> dict[str, Any]:
    """All settings of a run by dotted key, but for the names of its folder, its card and its cache."""
    cache = {"keep_in_memory", "cache_dir"}
    config = run.config.model_dump(mode="json", exclude={"output": True, "task": True, "data": cache})
    card = run.card.model_dump(mode="json", exclude_defaults=True)
    config["data"]["encoding"] = config["data"]["encoding"] or UTF8  # as versions wrote it that had no other default
    return {**flat(config), **flat(card, "task."), WORLD: processes()[1]}


def inputs_of(run: Run, tokenizer: Any, tokens: Mapping[str, str]) -> dict[str, Any]:
    """What a run depends on that its settings only name, by the dotted key that `--allow-change` takes.

    These are the configurations of the starting model, the tokenizer, the models in folders that terms name, and the
    code of terms that are not seqreg's.

    Args:
        tokens: SHA-256 of the token ids of the splits that are kept on disk
    """
    found, name = {"model.tokenizer.files": tokenizer_digest(tokenizer)}, run.config.model.name
    if name is not None:
        about = {"config": models.fetched(transformers.AutoConfig, name, "model", run.trust)}
        if os.path.isfile(os.path.join(name, GENERATION_CONFIG_NAME)):
            about["generation_config"] = models.fetched(transformers.GenerationConfig, name, "generation", run.trust)
        for kind, settings in about.items():
            values = json.loads(settings.to_json_string(use_diff=False))
            known = {key: value for key, value in values.items() if key != "transformers_version" and key[0] != "_"}
            found |= {f"model.{kind}.{key}": value for key, value in known.items()}
    for key, value in flat(run.config.model_dump(mode="json", include={"terms"})).items():
        if isinstance(value, str) and os.path.isfile(os.path.join(value, "config.json")):
            found[f"{key}.files"] = _digest_of_model(Path(value))
    for term in run.criterion.terms:
        if not type(term).__module__.startswith("seqreg."):
            found[f"terms.{term.name}.code"] = digest(Path(inspect.getfile(type(term))))
    return found | {f"{ROWS}.tokens.{name}": value for name, value in tokens.items()}


def _digest_of_model(folder: Path) -> str:
    """SHA-256 of the configuration and the weights in a folder."""
    paths = [folder / "config.json", *sorted(folder.glob("*.safetensors*"))]
    return hashlib.sha256(" ".join(f"{path.name} {digest(path)}" for path in paths).encode()).hexdigest()


def covers(key: str, name: str) -> bool:
    """Whether a dotted key stands for a setting: it is the same, or above it."""
    return name == key or name.startswith(f"{key}.")


def changed_settings(old: RunRecord, new: RunRecord) -> list[str]:
    """The keys of all that has changed between two records of a run; what only one version of seqreg writes is none."""
    missing, known = object(), with_defaults(old.settings)
    keys = [key for key in new.settings if known.get(key, missing) != new.settings[key]]
    keys += [key for key in old.settings if key not in new.settings and key != ROWS]
    before, after = old.everything, new.everything
    return keys + [key for key in after if key not in new.settings and before.get(key, after[key]) != after[key]]


def check_model(folder: Path, record: RunRecord | None, *, trusted: bool = False) -> list[str]:
    """Refuse a model that is not the one that its run has made; returns what has changed where that is `trusted`.

    Checked are all files that `from_pretrained` reads: weights, tokenizer, configurations, adapters.
    """
    files = {} if record is None else record.files
    for name in files:
        inside(folder, name)  # or it is refused, trusted or not
    found = [damage for name in files if (damage := checkpoints.damage(folder, {name: files[name]}))]
    found += [f"{name} was added" for name in _READ_FIRST if files and name not in files and (folder / name).exists()]
    for change in found:
        if not trusted:
            raise BadInput(
                f"{folder}: its model is not the one that was trained: {change}: bring the file back, or use the model "
                "as it is with --trust-changes"
            )
        warn(f"{folder}: its model is not the one that was trained: {change}")
    return found


def check_collected(folder: Path, record: RunRecord, *, trusted: bool = False) -> dict[str, Any]:
    """The contents of metrics.json of a finished run, for a comparison; refuses those of another model or settings."""
    if (folder / "config.json").is_file():  # where a comparison has kept the model
        check_model(folder, record, trusted=trusted)
    metrics = scores_of(folder)
    if differs := made_with_of(metrics).differs:
        raise BadInput(
            f"{folder / METRICS}: scores that were made with {', '.join(differs)} changed: seqreg evaluate "
            f"{folder} brings those of the run back"
        )
    return metrics


def made_with(
    record: RunRecord | None, run: Run, started: Run, splits: Splits, *, file: Path | None, changes: Sequence[str]
) -> MadeWith:
    """How the model of a run is scored, and what of it is not as in the run.

    Args:
        run, started: as it is to be scored, and as its folder has it
        file: that it is scored on, in place of `splits`
        changes: of the files of the model
    """
    before = settings_of(started) if record is None else with_defaults(record.settings)
    now = {key: value for key, value in settings_of(run).items() if _counts(key)}
    keys = dict.fromkeys([*now, *(key for key in before if covers("task", key))])
    differs = {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}
    if file is not None:
        differs["data"] = "of the run", file.stem
    else:
        known = {**splits.sets, **splits.corpora}
        outline = {} if record is None else {name: old for name, old in record.outline.items() if name in known}
        if how := difference(outline, splits):
            differs[ROWS] = "of the run", how
    differs |= {change.partition(" ")[0]: ("as it was trained", change) for change in changes}
    return MadeWith(run="" if record is None else record.run, settings=now, differs=differs)


def _counts(key: str) -> bool:
    """Whether the scores of a trained model depend on a setting."""
    return key == _PRECISION or not any(covers(name, key) for name in _WITHOUT_EFFECT)


def fingerprint(splits: Splits) -> tuple[str, dict[str, Outline]]:
    """SHA-256 of all examples of all splits, of a sample where they are from the hub, and the outlines of the splits.

    Of large files it is computed once, and kept beside their examples. A stream has a digest of its own.
    """
    if splits.stream is not None:
        digest, outlines = fingerprint(dataclasses.replace(splits, stream=None))
        return hashlib.sha256(f"{digest} {splits.stream.digest}".encode()).hexdigest(), outlines
    splits = Splits({**splits.sets, **splits.corpora})
    stored = [examples for examples in splits.sets.values() if isinstance(examples, StoredExamples)]
    if not stored:
        return _fingerprint(splits)
    keys = [
        [name, examples.key if isinstance(examples, StoredExamples) else _fingerprint(Splits({name: examples}))[0]]
        for name, examples in splits.sets.items()
    ]
    key = arrow_cache.key_of("fingerprint", keys, code=(sys.modules[__name__],))
    digest, outlines = arrow_cache.value(stored[0].folder, key, lambda: _fingerprint(splits))
    return digest, outlines


def _fingerprint(splits: Splits) -> tuple[str, dict[str, Outline]]:
    digest, outlines = hashlib.sha256(), dict[str, Outline]()
    for name, examples in splits.sets.items():
        count = len(examples)
        digest.update(f"{name} {count}\n".encode())
        size, blocks = -(-count // _BLOCKS), list[str]()
        if isinstance(examples, HubExamples):
            for index in range(0, count, max(1, count // _SAMPLE)):
                digest.update(_bytes(examples[index]))
        else:
            rest = iter(examples)
            while texts := [_bytes(example) for example in itertools.islice(rest, size)]:
                blocks.append(_digest(texts))
                digest.update(b"".join(texts))
        outlines[name] = {"count": count, "size": size, "blocks": blocks}
    return digest.hexdigest(), outlines


def _bytes(example: Example) -> bytes:
    values = [example.source, example.second, example.target, example.label, *example.references, *example.chat]
    return json.dumps(values if example.tags is None else [*values, *example.tags]).encode()


def _digest(texts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"\n".join(texts)).hexdigest()[:8]


def difference(old: Mapping[str, Outline], splits: Splits) -> str:
    """How the data differ from those of an outline, as far as it tells; "" if it does not."""
    if not old:  # a run of a version without outlines
        return ""
    sets = {**splits.sets, **splits.corpora}
    changes = [f"the split {name} is gone" for name in old if name not in sets]
    for name, examples in sets.items():
        if name not in old:
            changes.append(f"the split {name} is new")
            continue
        count, size = old[name]["count"], max(old[name]["size"], 1)
        if count != len(examples):
            changes.append(f"{name} had {count} examples and has {len(examples)}")
        for number, block in enumerate(old[name]["blocks"]):
            first, last = number * size, min((number + 1) * size, count)
            if _digest([_bytes(examples[index]) for index in range(first, min(last, len(examples)))]) != block:
                where = f"example {last}" if last - first == 1 else f"one of the examples {first + 1} to {last}"
                text = f", now {examples[first].source[:40]!r}" if last - first == 1 and first < len(examples) else ""
                changes.append(f"the first difference in {name} is {where}{text}")
                break
    return "; ".join(changes)
