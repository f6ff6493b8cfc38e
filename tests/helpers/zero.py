"""DeepSpeed on gloo ranks of tests: engines of every stage, their gradients, and what torchrun would tell a rank."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def as_under_torchrun(rank: int, world: int) -> None:
    """Tell this process, which is a rank of a test, what torchrun would; no operator is compiled: gloo's are used."""
    import deepspeed

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in {**names, "LOCAL_SIZE": world}.items()})
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp()  # a killed start leaves a lock in the user's
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def config(*, stage: int, dtype: torch.dtype | None = None, **settings: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **settings.pop("zero", {})},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 where nothing is said
        "bf16": {"enabled": dtype is torch.bfloat16},
        **settings,
    }


def initialize(model: Any, *, stage: int, adam: bool = False, **settings: Any) -> Any:
    """The engine of a model, with gradient descent or AdamW."""
    import deepspeed

    as_under_torchrun(torch.distributed.get_rank(), torch.distributed.get_world_size())
    parameters = model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-3) if adam else torch.optim.SGD(parameters, lr=0.5)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(stage=stage, **settings), dist_init_required=False
    )
    assert engine.zero_optimization_stage() == stage
    engine.train()
    return engine


def gradients(engine: Any) -> dict[str, Tensor]:
    """All of the gradients, whole and averaged, before the engine's step."""
    from deepspeed.utils import safe_get_full_grad

    found = {name: safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def to_universal(checkpoint: Path, output: Path) -> None:
    """DeepSpeed's own change of a checkpoint into one for any number of ranks."""
    words = ["--input_folder", str(checkpoint), "--output_folder", str(output), "--num_extract_workers", "1"]
    subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words, "--num_merge_workers", "1"], check=True
    )
