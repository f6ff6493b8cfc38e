"""How many operations a step launches with the block sizes of a CPU and of a GPU, counted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seqreg import Criterion
from seqreg.fused import block_sizes
from seqreg.fused.block_sizes import BlockSizes, sizes_for_memory
from seqreg.fused.head import release_buffers
from seqreg.integrations.hf import context
from seqreg.terms.rdrop import RDrop

GIGABYTE = 2**30


class OperationCounter(TorchDispatchMode):
    """Count ATen operations that are not views: on a GPU each is a kernel to launch, or several."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def bart_large() -> tuple[Any, dict[str, torch.Tensor]]:
    """BART-large's layers, vocabulary and batch, with narrow layers: the count does not depend on the width."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        d_model=16, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16
    )
    labels = torch.randint(5, 50265, (8, 128))
    return BartForConditionalGeneration(config), {"input_ids": labels[:, :16], "labels": labels}


def llama() -> tuple[Any, dict[str, torch.Tensor]]:
    """Llama's 32 layers, vocabulary and a row of 2,048 tokens, with narrow layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=32, num_attention_heads=2)
    tokens = torch.randint(5, 32000, (1, 2048))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def operations(net: Any, loss: Any) -> int:
    net.zero_grad(set_to_none=True)
    with OperationCounter() as counter:
        with torch.autocast("cpu", torch.bfloat16):
            total = loss()
        total.backward()
    return counter.count


@pytest.mark.parametrize("make", [bart_large, llama])
def test_the_fused_step_of_a_gpu_launches_few_operations(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-Drop makes two passes in one batch: 1.6 times what transformers' label-smoothed step launches is enough."""
    from transformers.trainer_pt_utils import LabelSmoother

    net, batch = make()
    net.train()
    smoother, causal = LabelSmoother(0.1), make is llama
    stock = operations(net, lambda: smoother(net(**batch), batch["labels"], shift_labels=causal))
    found = {}
    for device, sizes in (("cpu", block_sizes.CPU), ("gpu", sizes_for_memory(40 * GIGABYTE))):
        monkeypatch.setattr(block_sizes, "CPU", sizes)
        for name, terms in (("plain", ()), ("rdrop", (RDrop(),))):
            criterion = Criterion(*terms, label_smoothing=0.1)
            found[device, name] = operations(net, lambda c=criterion: c(context(net, batch, step=0)).total)
            release_buffers()
    print("operations: transformers", stock, *(f"{device} {name} {n}" for (device, name), n in found.items()))
    assert found["gpu", "plain"] < 1.5 * stock
    assert found["gpu", "rdrop"] < 1.6 * stock
    assert found["cpu", "rdrop"] > 4 * found["gpu", "rdrop"]  # the counter sees blocks


@pytest.mark.parametrize(
    ("free", "cells"), [(None, 2**25), (80 * GIGABYTE, 2**25), (5 * GIGABYTE, 2**24), (2 * GIGABYTE, 2**23), (0, 2**18)]
)
def test_blocks_shrink_with_the_memory_that_is_left(free: int | None, cells: int) -> None:
    assert sizes_for_memory(free) == BlockSizes(cells, max(1024, cells // 1024))


@pytest.mark.parametrize("sizes", [BlockSizes(2**25, 2**15), BlockSizes(1000, 64)])
def test_losses_and_gradients_do_not_depend_on_block_sizes(sizes: BlockSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqreg.terms.jachess import JacHess
    from tests.helpers import tiny_models

    net, batch = tiny_models.make("bart").double(), tiny_models.batch("bart")
    found = []
    for chosen in (block_sizes.CPU, sizes):
        monkeypatch.setattr(block_sizes, "CPU", chosen)
        torch.manual_seed(0)
        net.zero_grad()
        total = Criterion(RDrop(), JacHess(), label_smoothing=0.1)(context(net, batch, step=0)).total
        total.backward()
        found.append((total.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
