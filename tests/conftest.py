from __future__ import annotations

import gc
import os
import sys

import hypothesis
import pytest
import torch

from seqreg.errors import MissingExtraError

try:
    from seqreg.workbench.data import hardware
except MissingExtraError:  # torch alone, or the extra hf: what is tested there computes no products in bf16
    pass
else:
    hardware.settle()  # before the first product; workers of pytest-xdist inherit it
    hardware.prepare_cpu()  # as in every command: what one test sets would be there in the next
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start, so that their bits are the same
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("nightly", database=None, deadline=None)
hypothesis.settings.load_profile("fixed")  # the same draws in every run; --hypothesis-profile=nightly draws others


def pytest_collection_finish() -> None:
    """After all imports: no progress bars of transformers, and trainers need not collect what was imported."""
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before hypothesis looks at its options
def pytest_configure(config: pytest.Config) -> None:
    if config.option.hypothesis_profile == "nightly" and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(int.from_bytes(os.urandom(4)))


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.option.hypothesis_seed
    return "hypothesis: fixed draws" if seed is None else f"hypothesis: --hypothesis-seed={seed}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
