"""Fingerprint of the data of a run, and what differs when it has changed."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
from collections.abc import Mapping, Sequence

from seqreg.workbench.data import arrow_cache
from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.loading import HubExamples, Splits
from seqreg.workbench.data.stored_examples import StoredExamples
from seqreg.workbench.text.stored_json import Outline

_BLOCKS = 256
"""Of a split, each with a hash of its own."""
_SAMPLE = 1000
"""Examples of a dataset on disk that its fingerprint is taken from."""


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
