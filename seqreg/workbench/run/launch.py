"""Environment variables of torchrun and accelerate; those that contradict each other or the recipe are refused."""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Sequence

from seqreg.errors import BadInput

FILES = 64
"""Files that a process must be able to open: with fewer, workers that load data wait for ever."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for every process."""
_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_ENGINES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_USE_SAGEMAKER",
)
"""What would change a run without a word in its recipe."""
_FLAGS = ("ACCELERATE_USE_CPU", "ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY", "FORK_LAUNCHED")
"""What accelerate reads as true or false, and fails at anything else."""
_ON = ("1", "yes", "true", "on", "y", "t")
_OFF = ("", "0", "no", "false", "off", "n", "f")


def processes() -> tuple[int, int]:
    """The rank of this process and the number of all, as torchrun says; (0, 1) without it.

    A variable that was left behind in a shell is refused: whoever believes that another process is the first one looks
    neither at the lock nor at what is in the output folder.
    """
    _unset_empty(*TORCHRUN, *_MPI)
    values = {name: value for name in TORCHRUN if (value := os.environ.get(name, "")) not in ("", "-1")}
    numbers = {name: _integer(name, values[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in values}
    for name in _MPI:
        if _integer(name, os.environ.get(name) or "1") > 1:
            raise BadInput(f"{name}={os.environ[name]} in the environment: several processes are started with torchrun")
    rank, world = numbers.get("RANK", 0), numbers.get("WORLD_SIZE", 1)
    if len(values) == len(TORCHRUN):
        if rank >= world:
            raise BadInput(f"RANK={rank} and WORLD_SIZE={world} in the environment contradict each other: unset both")
        return rank, world
    stray = next((name for name in numbers if numbers[name] > (name == "WORLD_SIZE") or name == "LOCAL_RANK"), None)
    if stray is not None:
        lacks = ", ".join(name for name in TORCHRUN if name not in values)
        raise BadInput(
            f"{stray}={numbers[stray]} is set in the environment, but not {lacks}: unset it, or start several "
            "processes with torchrun"
        )
    return 0, 1


def _unset_empty(*names: str) -> None:
    """Remove variables without a value: accelerate would read a number, or true or false, and fail."""
    for name in names:
        if os.environ.get(name) == "":
            del os.environ[name]


def _integer(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise BadInput(f"{name}={text[:40]!r} in the environment: expected a whole number: unset it, or use torchrun")
    return int(text)


def check_environment(precision: str) -> None:
    """Refuse variables that contradict each other, or by which accelerate would train otherwise than the recipe."""
    processes()
    if (files := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < FILES:
        raise BadInput(f"ulimit -n {files}: at least {FILES} files must be open at a time: ulimit -n 1024")
    _unset_empty("ACCELERATE_MIXED_PRECISION", *_ENGINES, *_FLAGS)
    mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    if mixed not in (*_OFF, precision):
        raise BadInput(
            f"ACCELERATE_MIXED_PRECISION={mixed} in the environment, but optimisation.precision={precision}: unset the "
            "one, or change the other"
        )
    for name in _ENGINES:
        if os.environ.get(name, "").lower() not in _OFF:
            raise BadInput(f"{name}={os.environ[name]} in the environment: it is in no recipe: unset it")
    if (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    ):
        raise BadInput(
            "torchrun --max-restarts without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment: ranks that are "
            "started again may look for those that are gone: set it, or use seqreg launch"
        )
    for name in _FLAGS:
        if (value := os.environ.get(name, "")).lower() not in (*_ON, *_OFF):
            raise BadInput(f"{name}={value[:40]} in the environment: expected true or false: unset it")


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker of `logging.report_to` whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise BadInput(f"logging.report_to: the package {name} is not installed: install it, or leave it out")
