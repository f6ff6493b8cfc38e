from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers import tiny_fairseq

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def binarized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_fairseq.binarize(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def pairs(binarized: tuple[Path, Path]) -> Path:
    """Binarized pairs of sentences."""
    return binarized[0]


@pytest.fixture(scope="session")
def classes(binarized: tuple[Path, Path]) -> Path:
    """Binarized sentences with a label."""
    return binarized[1]
