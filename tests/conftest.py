from __future__ import annotations

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
