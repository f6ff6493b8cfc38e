"""The linear head of a vocabulary: lazy logits, and products with it in blocks of classes.

What is tuned for the CPU or for low precision is in this file: buffers that are kept, strides, blocks, scales.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from seqreg.fused.block_sizes import block_sizes


@dataclass(frozen=True)
class Projection:
    """Logits that have not been computed: states @ weight.T + bias.

    Args:
        states: what the head is given                              # [B, T, D]
        weight: of the head                                         # [V, D]
        bias: of the head, and what the model adds afterwards       # [V]
        dtype: of the product; lower than that of the weight under autocast
        requires_grad: whether gradients may flow; False for a pass without them
        gather: makes the weight whole again, where an engine frees it between passes
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    requires_grad: bool = True
    gather: Callable[[], object] | None = None

    def whole(self) -> Projection:
        """The same, with a weight that can be read now."""
        if self.gather is not None:
            self.gather()
        return self

    def same_head(self, other: Projection) -> bool:
        """Whether the logits of both come from the same product; a pass with other weights has another head."""
        return self.weight is other.weight and self.dtype == other.dtype

    def logits(self) -> Tensor:
        """All of them, [B, T, V], by way of autograd."""
        self.whole()
        with torch.set_grad_enabled(self.requires_grad):  # the result is cached for all callers
            product = functional.linear(self.states.to(self.dtype), self.weight.to(self.dtype))
            return product if self.bias is None else product + self.bias

    def logits_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of some positions, [n, V], without a graph, and the row of every position in them, [P]."""
        index = positions.new_zeros(self.states.shape[:-1].numel())
        index[positions] = torch.arange(len(positions), device=positions.device)
        with torch.no_grad():
            head = LinearHead(self.whole().weight, self.bias, self.dtype)
            logits = head.logits_buffer(len(positions), reuse=False)
            head.project(self.states.detach().flatten(0, -2)[positions].to(self.dtype), logits)
        return logits, index


class LinearHead:
    """logits = states @ weight.T + bias for chunks of states, and the gradients that chunk after chunk adds up.

    Args:
        weight, bias: of the head                                   # [V, D], [V]
        dtype: of the products; sums have at least float32
        needs_grad: whether the weight, the bias, and any states need a gradient
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        needs_grad: Sequence[bool] = (False,) * 3,
    ) -> None:
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        self.weight, self.dtype, self.sum_dtype = (
            weight.to(dtype),
            dtype,
            torch.promote_types(weight.dtype, torch.float32),
        )
        zeros = bias is not None and bias.device.type == "cpu" and not bias.any()  # BART's; a GPU is not waited for
        self.bias = None if zeros and not needs_grad[1] else bias
        self.weight_grad = torch.zeros_like(weight, dtype=self.sum_dtype) if needs_grad[0] else None
        self.bias_grad = weight.new_zeros(len(weight), dtype=self.sum_dtype) if needs_grad[1] else None
        self.needs_states_grad = needs_grad[2]
        self.blocks = block_sizes(weight.device)

    def project(self, states: Tensor, logits: Tensor) -> None:
        """Write the logits of states [n, D] to [n, V], in blocks of classes: as fast as the machine multiplies."""
        size = self.blocks.classes
        for start in range(0, len(self.weight), size):
            block, out = self.weight[start : start + size], logits[:, start : start + size]
            if out.dtype == self.dtype:
                torch.mm(states, block.t(), out=out)
            else:
                out.copy_(states @ block.t())
        if self.bias is not None:
            logits += self.bias

    def accumulate_grads(self, logits_grad: Tensor, states: Tensor) -> Tensor | None:
        """Add what the gradient of some logits, [n, V], gives weight and bias; return that of their states, [n, D]."""
        if self.bias_grad is not None:
            self.bias_grad += logits_grad.sum(0)
        if self.dtype != logits_grad.dtype:
            return self._accumulate_low_precision(logits_grad, states)
        if self.weight_grad is not None:  # not addmm_, which counters of operations overlook
            torch.addmm(self.weight_grad, logits_grad.t(), states, out=self.weight_grad)
        return logits_grad @ self.weight if self.needs_states_grad else None

    def _accumulate_low_precision(self, logits_grad: Tensor, states: Tensor) -> Tensor | None:
        """Products in lower precision, their sums in float32.

        Gradients are brought to a sixteenth at most for the product: a loss scale comes too late for those that float16
        would lose, and the sums must not overflow it.
        """
        states_grad = logits_grad.new_zeros(len(logits_grad), states.shape[1]) if self.needs_states_grad else None
        scale = 2.0 ** (-4 - torch.ceil(torch.log2(logits_grad.abs().amax().clamp_min(1e-30))))
        size = self.blocks.classes
        for start in range(0, len(self.weight), size):
            block = (logits_grad[:, start : start + size] * scale).to(self.dtype)
            if self.weight_grad is not None:
                self.weight_grad[start : start + size] += (block.t() @ states).to(self.sum_dtype) / scale
            if states_grad is not None:
                states_grad += (block @ self.weight[start : start + size]).to(states_grad.dtype) / scale
        return states_grad

    def logits_buffer(self, rows: int, *, reuse: bool = True) -> Tensor:
        """A buffer for [rows, V] logits; rows start at multiples of 16 numbers: products are a third faster.

        On the CPU the buffer is kept from call to call: the system takes as long to give new pages as a product does.
        """
        width, device = len(self.weight), self.weight.device
        stride = -(-width // 16) * 16
        if not reuse or device.type != "cpu":
            return torch.empty(rows, stride, dtype=self.sum_dtype, device=device)[:, :width]
        buffer: Tensor | None = getattr(_buffers, str(self.sum_dtype), None)
        if buffer is None or buffer.numel() < rows * stride:
            with torch.inference_mode(False):  # what an evaluation leaves here, training writes to
                buffer = torch.empty(rows * stride, dtype=self.sum_dtype)
            setattr(_buffers, str(self.sum_dtype), buffer)
        return buffer[: rows * stride].view(rows, stride)[:, :width]


_buffers = threading.local()


def release_buffers() -> None:
    """Free the buffers that are kept from call to call."""
    vars(_buffers).clear()


def refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # that is what create_graph=True does
        raise RuntimeError("the fused loss cannot be differentiated twice: use Criterion(..., fused=False)")
