from __future__ import annotations

import pytest
import torch

from seqreg import noise


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_distribution(kind: noise.Noise) -> None:
    drawn = noise.draw(kind, (200_000,))
    assert drawn.mean().item() == pytest.approx(0, abs=0.01)
    if kind == "normal":
        assert drawn.std().item() == pytest.approx(1, abs=0.01)
    else:
        assert drawn.abs().max() <= 1
        assert drawn.std().item() == pytest.approx(3**-0.5, abs=0.01)


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_padding_changes_neither_the_noise_nor_the_generator(kind: noise.Noise) -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    wide = torch.cat([mask, torch.zeros(2, 4, dtype=torch.bool)], 1)
    torch.manual_seed(5)
    narrow = noise.sample(kind, torch.zeros(2, 3, 16), 0.5, mask)
    after = torch.rand(1)
    torch.manual_seed(5)
    padded = noise.sample(kind, torch.zeros(2, 7, 16), 0.5, wide)
    assert torch.equal(narrow, padded[:, :3])
    assert torch.equal(after, torch.rand(1))
    assert (padded[~wide] == 0).all()
    assert (padded[wide] != 0).all()


def test_rms_counts_real_tokens_only() -> None:
    embeds = torch.tensor([[[3.0, 3.0], [100.0, 100.0]]])
    assert noise.rms(embeds, torch.tensor([[True, False]])).item() == 3.0


def test_resolution_tells_how_much_noise_survives() -> None:
    """Noise at the resolution moves about half of the entries; far below it, almost none."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = torch.randn(100_000).to(dtype)
        least = noise.resolution(dtype, 1.0)
        moved = ((values + noise.draw("uniform", (100_000,)) * least).to(dtype) != values).float().mean()
        lost = ((values + noise.draw("uniform", (100_000,)) * least / 100).to(dtype) != values).float().mean()
        assert moved > 0.25
        assert lost < 0.05


def test_arithmetic_dtype_sees_autocast() -> None:
    embeds = torch.zeros(1)
    assert noise.arithmetic_dtype(embeds) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert noise.arithmetic_dtype(embeds) == torch.bfloat16
