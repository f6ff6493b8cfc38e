"""examples/slurm.sh, and so `seqreg launch`, on two "nodes" of this machine; what SLURM provides is made up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import RANK_SETTINGS
from tests.helpers.forked_process import TINY

ROOT = Path(__file__).parents[2]
STUBS = {
    "scontrol": "echo 127.0.0.1; echo 127.0.0.2",
    "srun": 'SLURM_NODEID=0 "$@" & first=$!; SLURM_NODEID=1 "$@"; second=$?; wait $first && exit $second',
    "seqreg": f'exec {sys.executable} -m seqreg "$@"',
}


def script(folder: Path, *words: str, **further: str) -> subprocess.CompletedProcess[str]:
    for name, text in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = {
        "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2", "NPROC": "1", "PORT": port, "OMP_NUM_THREADS": "1", **further,
    }  # fmt: skip
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "slurm.sh"), *words],
        env={**os.environ, **own}, capture_output=True, text=True, timeout=500, cwd=folder,
    )  # fmt: skip


@pytest.mark.slow
def test_two_nodes_train_one_run(tmp_path: Path) -> None:
    output, words = tmp_path / "run", ["train", "quickstart", *TINY, *RANK_SETTINGS, "engine.name=fsdp2"]
    done = script(tmp_path, *words, f"output={output}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("Everything is in") == 1
    assert json.loads((output / "run.json").read_text())["settings"]["world_size"] == 2
    assert (output / "model.safetensors").exists()
    assert len(list((output / "checkpoint-6" / "sharded" / "model").iterdir())) == 2
