"""Commands of seqreg in several processes, on one node or several, by torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from seqreg.errors import BadInput
from seqreg.workbench.run.launch import TORCHRUN

UNSHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it ranks that are started again may read the addresses of those that are gone (pytorch issue 135712)."""


def launch(
    words: Sequence[str],
    *,
    nproc: int,
    nnodes: int = 1,
    endpoint: str | None = None,
    restarts: int = 0,
    shutdown_timeout: int = 30,
) -> int:
    """Run a command in `nproc` processes on each of `nnodes` nodes; returns the exit code of the first that failed.

    Args:
        endpoint: HOST:PORT where the nodes meet, the same on all; not needed for one
        restarts: how often all processes are started again when one of them has died
        shutdown_timeout: seconds that they have to save when they are told to stop
    """
    if stray := next((name for name in TORCHRUN if os.environ.get(name)), None):
        raise BadInput(f"{stray}={os.environ[stray]} is set: this is a process of torchrun already, or unset it")
    if nnodes > 1 and not endpoint:
        raise BadInput(f"--nnodes {nnodes}: needs --rdzv-endpoint HOST:PORT, one node that all others reach")
    if endpoint is not None:
        _check_endpoint(endpoint)
    from torch.distributed import run

    os.environ.setdefault(UNSHARED_STORE, "1")
    nodes = ["--standalone"]
    if nnodes > 1:
        nodes = [f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=seqreg"]
    options = [f"--nproc-per-node={nproc}", f"--max-restarts={restarts}", f"--shutdown-timeout={shutdown_timeout}"]
    chosen = run.parse_args([*nodes, *options, "-m", "seqreg"])  # type: ignore[no-untyped-call]
    chosen.training_script_args = list(words)  # not parsed: torchrun takes --nproc in them for an option of its own
    return exit_code(lambda: run.run(chosen))  # type: ignore[no-untyped-call]


def _check_endpoint(endpoint: str) -> None:
    """Refuse what torchrun would take for another address, or fail at when its processes are started."""
    host, _, port = endpoint.rpartition(":")
    named = host.startswith("[") and host.endswith("]") if ":" in host else bool(host) and host.split() == [host]
    if not named or not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535):
        raise BadInput(f"--rdzv-endpoint {endpoint!r}: expected HOST:PORT, such as node0:29500")


def exit_code(agent: Callable[[], object]) -> int:
    """Let torchrun's agent work, and return the exit code of the process that failed first; 128 + n for a signal."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        agent()
    except ChildFailedError as error:
        code: int = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
