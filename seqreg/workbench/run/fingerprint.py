"""Fingerprint of the data of a run, and what differs when it has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from seqreg.workbench.data.examples import Example
from seqreg.workbench.data.loading import Splits
from seqreg.workbench.text.stored_json import Outline

_BLOCKS = 256
"""Of a split, each with a hash of its own."""
_SAMPLE = 1000
"""Examples of a dataset on disk that its fingerprint is taken from."""


def fingerprint(splits: Splits) -> tuple[str, dict[str, Outline]]:
    """SHA-256 of all examples of all splits, of a sample where they stay on disk, and the outlines of the splits."""
    digest, outlines = hashlib.sha256(), dict[str, Outline]()
    for name, examples in splits.sets.items():
        count, in_memory = len(examples), isinstance(examples, list)
        digest.update(f"{name} {count}\n".encode())
        size, blocks = -(-count // _BLOCKS), list[str]()
        for index in range(0, count, 1 if in_memory else max(1, count // _SAMPLE)):
            if in_memory and index % size == 0:
                blocks.append(_block(examples[index : index + size]))
            digest.update(_bytes(examples[index]))
        outlines[name] = {"count": count, "size": size, "blocks": blocks}
    return digest.hexdigest(), outlines


def _bytes(example: Example) -> bytes:
    values = [example.source, example.second, example.target, example.label, *example.references]
    return json.dumps(values if example.tags is None else [*values, *example.tags]).encode()


def _block(examples: Sequence[Example]) -> str:
    return hashlib.sha256(b"\n".join(map(_bytes, examples))).hexdigest()[:8]


def difference(old: Mapping[str, Outline], splits: Splits) -> str:
    """How the data differ from those of an outline, as far as it tells; "" if it does not."""
    if not old:  # a run of a version without outlines
        return ""
    changes = [f"the split {name} is gone" for name in old if name not in splits.sets]
    for name, examples in splits.sets.items():
        if name not in old:
            changes.append(f"the split {name} is new")
            continue
        count, size = old[name]["count"], max(old[name]["size"], 1)
        if count != len(examples):
            changes.append(f"{name} had {count} examples and has {len(examples)}")
        for number, block in enumerate(old[name]["blocks"]):
            first, last = number * size, min((number + 1) * size, count)
            if _block([examples[index] for index in range(first, min(last, len(examples)))]) != block:
                where = f"example {last}" if last - first == 1 else f"one of the examples {first + 1} to {last}"
                text = f", now {examples[first].source[:40]!r}" if last - first == 1 and first < len(examples) else ""
                changes.append(f"the first difference in {name} is {where}{text}")
                break
    return "; ".join(changes)
