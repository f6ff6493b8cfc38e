from __future__ import annotations

import pytest
import transformers


@pytest.fixture(autouse=True)
def _as_transformers_5(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what transformers 4 does: it rounds logged losses, and leaves the precision in the environment."""
    if transformers.__version__.startswith("4."):
        monkeypatch.setattr("transformers.trainer.round", lambda number, digits: number, raising=False)
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
