"""Sizes of the blocks of logits that the fused loss works on: they depend on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

ROWS = 1024
"""Rows of logits that are held at a time; a token has one for every pass."""
MOST_CELLS = 2**25
_BYTES_PER_CELL = 256
"""A block has about eight float32 temporaries, which may take an eighth of the free memory."""


@dataclass(frozen=True)
class BlockSizes:
    """How much the fused loss computes with one operation.

    Args:
        cells: logits of a block of elementwise work
        classes: classes of a block of a product with the head
    """

    cells: int
    classes: int


CPU = BlockSizes(2**18, 1024)
"""Blocks that stay in the cache of a CPU."""


def block_sizes(device: torch.device) -> BlockSizes:
    """Return small blocks for a CPU's cache; large ones for a GPU, where every operation costs a launch."""
    return CPU if device.type == "cpu" else _accelerator_sizes(device)


@cache
def _accelerator_sizes(device: torch.device) -> BlockSizes:
    """Sizes for one GPU, chosen once per process, so that a step does not depend on what else is in memory."""
    return sizes_for_memory(_free_bytes(device) if device.type == "cuda" else None)


def sizes_for_memory(free: int | None) -> BlockSizes:
    """Return the largest power of two of cells that fits into the free bytes; None: the memory is not known."""
    cells = MOST_CELLS
    while free is not None and cells > CPU.cells and cells * _BYTES_PER_CELL > free:
        cells //= 2
    return BlockSizes(cells, max(CPU.classes, cells // ROWS))


def _free_bytes(device: torch.device) -> int:
    """Bytes that torch can still allocate: free ones of the driver, and those that its cache holds unused."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
