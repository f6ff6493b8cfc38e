"""What reading and tokenizing a large corpus takes: the first time, and when it is in the cache."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.rouge_speed import spoken_word
from seqreg.errors import BadInput, Stopped
from seqreg.workbench.config import cards
from seqreg.workbench.config.settings import Config, Data
from seqreg.workbench.data import loading
from seqreg.workbench.data.batches import GroupedOrder
from seqreg.workbench.data.encoding import Encoded
from seqreg.workbench.data.tokenizers import train_tokenizer
from seqreg.workbench.run.record import fingerprint

EXAMPLES = 287_113
"""Training examples of CNN/DailyMail."""
_WORDS = (570, 46)
"""Median words of an article and of a summary: about those of a sample of 950 articles of CNN/DailyMail."""
_BYTES = 20_000
"""Of the disk, an example: its text, twice, and its token ids."""
_TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Reading:
    """What one process took to have a corpus ready for training.

    Args:
        seconds, cpu_seconds: on the clock, and of all its threads
        serial_seconds: CPU seconds of its main thread; those of all other threads are shared by the cores
        own_memory: peak bytes that are this process's alone; None where the system does not tell
        memory: peak bytes with pages of files that are mapped, which processes share and the system may take back
        tokens: of the sources of training examples
    """

    seconds: float
    cpu_seconds: float
    serial_seconds: float
    own_memory: int | None
    memory: int
    examples: int
    tokens: int
    digest: str


def measure(examples: int = EXAMPLES, tell: Callable[[str], None] = lambda _: None) -> dict[str, Reading]:
    """A generated corpus is made ready by a process, and again by another: by the names `first` and `second`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if shutil.disk_usage(folder).free < examples * _BYTES:
            raise BadInput(
                f"--examples {examples}: {folder} needs {examples * _BYTES / 1e9:.1f} GB of free disk: give fewer, or "
                "another folder by TMPDIR"
            )
        tell(f"writing {examples:,} articles")
        write_corpus(folder / "data", examples)
        readings = {}
        for turn in ("first", "second"):
            tell(f"reading and tokenizing them, the {turn} time")
            readings[turn] = _in_a_process(folder)
        return readings


def write_corpus(folder: Path, examples: int, seed: int = 0) -> None:
    """Training examples of about the lengths of CNN/DailyMail, a few for validation, and a tokenizer of their words."""
    folder.mkdir()
    for name, count in (("train", examples), ("validation", max(1, examples // 100))):
        with (folder / f"{name}.jsonl").open("w") as file:
            for article, summary in _pairs(count, seed + (name == "validation")):
                file.write(json.dumps({"article": article, "highlights": summary}) + "\n")
    texts = (article for article, _ in _pairs(min(examples, 2000), seed))
    train_tokenizer(texts, 50_265).save_pretrained(str(folder / _TOKENIZER))


def _pairs(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Articles with summaries: words by Zipf's law."""
    random, rng = Random(0), np.random.default_rng(seed)
    vocabulary = np.array([spoken_word(random, rank) for rank in range(60_000)], dtype=object)
    shares = np.cumsum(1 / (np.arange(len(vocabulary)) + 2.7))
    for _ in range(count):
        sizes = np.maximum(10, _WORDS * np.exp(rng.normal(0, [0.55, 0.23]))).astype(int)
        places = np.searchsorted(shares, rng.random(int(sizes.sum())) * shares[-1])
        article, summary = np.split(vocabulary[places], [sizes[0]])
        yield " ".join(article), " ".join(summary)


def _in_a_process(folder: Path) -> Reading:
    processes = multiprocessing.get_context("spawn")
    pipe, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_work, args=(theirs, str(folder)), daemon=True)
    process.start()
    theirs.close()
    try:
        return Reading(**pipe.recv())
    except EOFError:
        process.join()
        raise Stopped(f"the process ended with code {process.exitcode}; -9: too little memory") from None
    finally:
        process.join()


def _work(pipe: Connection, folder: str) -> None:
    """Do what a run does before its first step, and tell what it took."""
    begin, cpu, serial, watch = time.perf_counter(), time.process_time(), time.thread_time(), _MemoryWatch()
    ready = prepare(Path(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    pipe.send({
        **ready, "seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu,
        "serial_seconds": time.thread_time() - serial, "own_memory": watch.end(), "memory": peak,
    })  # fmt: skip


def prepare(folder: Path) -> dict[str, Any]:
    """Examples, their fingerprint, token ids, lengths and order, and the first batch of it."""
    card, _ = cards.load("cnn_dailymail")
    lengths: Any = {"max_source_length": card.lengths.source, "max_target_length": card.lengths.target}
    data = Data(path=str(folder / "data"), cache_dir=str(folder / "cache"), keep_in_memory=False, **lengths)
    splits = loading.load(card, data)
    digest, _ = fingerprint(splits)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder / "data" / _TOKENIZER))
    encoded = Encoded(splits.sets["train"], tokenizer, Config.model_construct(data=data))
    sizes = encoded.lengths()
    order = GroupedOrder(sizes, 8)
    for index in itertools.islice(order, 8):
        encoded[index]
    return {"examples": len(encoded), "tokens": sum(source for source, _ in sizes), "digest": digest}


class _MemoryWatch:
    """Looks at the memory of this process every few milliseconds, and keeps the most of it."""

    def __init__(self) -> None:
        self.most, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.known = os.path.exists("/proc/self/status")
        self.thread.start()

    def _look(self) -> None:
        while self.known and not self.ended.wait(0.02):
            status = Path("/proc/self/status").read_text()
            self.most = max(self.most, 1024 * int(status.partition("RssAnon:")[2].split()[0]))

    def end(self) -> int | None:
        self.ended.set()
        self.thread.join()
        return self.most or None
