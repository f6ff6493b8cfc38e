"""The `seqreg` command in processes that are cheap to start and to kill: forked from one that has imported everything.

Importing torch and transformers takes seconds; a fork of a process that has, and has computed nothing yet, takes none.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nltk as _nltk  # noqa: F401 - what a training run would import when it needs it
import torch
import torch.utils.tensorboard as _board  # noqa: F401

from seqreg.cli import main as cli

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
gc.freeze()

TINY = [
    "model.settings={d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_attention_heads: 2, "
    "decoder_attention_heads: 2, encoder_ffn_dim: 16, decoder_ffn_dim: 16}",
    "model.vocab_size=320", "data.limit={train: 24, validation: 4, test: 4}", "data.max_source_length=24",
    "data.max_target_length=8",
    "generation.max_length=8", "generation.min_length=0", "generation.num_beams=1", "optimisation.warmup_steps=2",
    "optimisation.per_device_train_batch_size=2", "evaluation.eval_before_training=false", "evaluation.eval_steps=0",
    "evaluation.per_device_eval_batch_size=4",
    "evaluation.resamples=10", "logging.logging_steps=2", "logging.diagnostics_steps=0", "logging.tensorboard=false",
]  # fmt: skip
"""Settings that make the quickstart a matter of moments."""


class Command:
    """One `seqreg` command, started at once; what it prints goes to a file."""

    def __init__(self, *words: str | Path, log: Path, file_size: int | None = None, **around: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.forked_process"])
        self.log = log
        arguments = ([str(word) for word in words], str(log), file_size)
        self.process = context.Process(target=_main, args=arguments, kwargs=around)
        self.process.start()

    def wait(self, seconds: float = 120) -> int:
        """The exit code; negative for a signal that killed it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"still running after {seconds} s: {self.text()}")
        return self.process.exitcode

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

    def until(self, seen: Callable[[], Any], seconds: float = 60) -> bool:
        """Wait until something can be seen; False if the command ended before."""
        end = time.monotonic() + seconds
        while self.process.is_alive() and time.monotonic() < end:
            if seen():
                return True
            time.sleep(0.0005)
        return bool(seen())

    def kill(self) -> int:
        self.send(signal.SIGKILL)
        return self.wait()

    def text(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split()) if self.log.exists() else ""


def _main(
    words: list[str], log: str, file_size: int | None, folder: str = ".", memory: int = 0, names: Any = None
) -> None:
    """The command in this process: in a folder, with no more than so many further bytes, and environment variables."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    multiprocessing.set_start_method("fork", force=True)  # for workers, as in a command of its own
    if file_size is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    if memory:
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))  # a case that does not end, however busy the machine is
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    os.chdir(folder)
    os.environ.update(names or {})
    sys.argv = ["seqreg", *words]
    cli.main()


def train(output: Path, *words: str, terms: tuple[str, ...] = (), **options: Any) -> Command:
    """`seqreg train quickstart` with a tiny model."""
    return command(output, "quickstart", *TINY, *words, terms=terms, **options)


def command(output: Path, *words: str, terms: tuple[str, ...] = (), **options: Any) -> Command:
    """`seqreg train`; its log is beside its output."""
    chosen = [word for name in terms for word in ("--terms", name)]
    log = options.pop("log", output.with_suffix(".log"))
    return Command("train", *words, *chosen, f"output={output}", log=log, **options)


def weights(output: Path) -> str:
    """A hash of the final weights."""
    return hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()
