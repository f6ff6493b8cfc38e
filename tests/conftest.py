from __future__ import annotations

import gc
import os

import pytest
import torch
import transformers

from seqreg.workbench.data import hardware

hardware.settle()  # before the first product; workers of pytest-xdist inherit it
hardware.prepare_cpu()  # as in every command: what one test sets would be there in the next
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start, so that their bits are the same
transformers.utils.logging.disable_progress_bar()
gc.freeze()  # trainers collect garbage when they start: what was imported is none


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
