"""How far a sum in floating point may be from the exact one: by the number and the size of what is added up.

Kernels of other processors, and other numbers of threads, add up in another order. The bound holds for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rounding(number: int, size: float, dtype: torch.dtype) -> float:
    """The largest error of a sum, to first order, in any order of summation.

    Args:
        number: of roundings that a summand goes through: those of the products and sums that lead to the result
        size: the sum of the absolute values of the summands
        dtype: what is added up in
    """
    return number * torch.finfo(dtype).eps / 2 * size


def assert_within_rounding(found: Tensor, exact: Tensor, *, number: int, size: float) -> None:
    """Refuse a result that rounding does not explain; `exact` is the same in float64, from the same inputs.

    The error of a tensor is the norm of its difference, held against the norm of the summands in `size`.
    """
    assert exact.dtype == torch.float64
    apart = float((found.detach().double() - exact.detach()).norm())
    bound = rounding(number, size, found.dtype)
    assert apart <= bound, f"off by {apart:.3g}: rounding explains {bound:.3g} ({number} roundings of {size:.3g})"
