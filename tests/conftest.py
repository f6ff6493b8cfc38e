from __future__ import annotations

import gc

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
gc.freeze()  # trainers collect garbage when they start: what was imported is none


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
