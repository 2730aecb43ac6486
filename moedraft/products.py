"""Matrix products with few rows on a CPU, where the layout of the weight decides the speed.

Decoding multiplies one row, verification a handful, and each weight is read once and then falls out of the
cache: what counts is how fast it streams. For one or two rows a weight stored input-major streams two to
three times as fast as PyTorch's usual layout; for more, oneDNN's own blocked layout takes hardly longer than
one row. Both copies are kept, for small models only. Float32 everywhere: no precision is given up.

oneDNN generates code for each pair of shape and number of rows, half a megabyte, and keeps it. A server
sees any number of rows: it is rounded, many rows go the usual way, and what oneDNN keeps is bounded.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch.nn.functional import linear

SMALL = 50_000_000  # weights of a model up to which the memory for second copies is well spent
FEW = 2  # rows up to which the input-major copy is faster
TYPICAL = 5  # rows that the blocked copy is laid out for
MANY = 128  # rows from which on arithmetic decides, not reading, and PyTorch's usual product is as fast
# Entries of oneDNN's cache, and of PyTorch's own in front of it, which saves no time. The shipped pair has
# nine shapes, and what is generated again takes about half a millisecond.
KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "192", "LRU_CACHE_CAPACITY": "16"}


def pays(weight: torch.Tensor) -> bool:
    """Whether a second layout can help: float32 on a CPU whose PyTorch has oneDNN's blocked products."""
    known = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and weight.device.type == "cpu" and weight.dtype == torch.float32


class Product:
    """x → x Wᵀ + bias, for a weight [out, in] that does not change any more; `small`: its model is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, small: bool) -> None:
        bound_caches()
        self.weight, self.bias = weight, bias
        self.blocked: torch.Tensor | None = None
        if small and pays(weight):
            self.weight = weight.t().contiguous().t()
            self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]"""
        rows = x.numel() // x.shape[-1]
        if self.blocked is None or not FEW < rows <= MANY:
            return linear(x, self.weight, self.bias)
        padded = rounded(rows)
        if padded == rows:
            return self._blocked(x)
        flat = torch.nn.functional.pad(x.reshape(rows, -1), (0, 0, 0, padded - rows))
        return self._blocked(flat)[:rows].view(*x.shape[:-1], -1)

    def _blocked(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        return y


@cache
def bound_caches() -> None:
    """Let oneDNN keep less generated code than the 1024 entries of its two caches, unless the user says so.

    The router's embedder fills them too, which multiplies another number of tokens for nearly every prompt.
    oneDNN reads these variables once, when it is first used: this comes before the first weight is laid out.
    """
    for name, entries in KEPT.items():
        os.environ.setdefault(name, entries)


def rounded(rows: int) -> int:
    """Up to one of four counts in each octave: oneDNN keeps generated code for every count it has seen."""
    return rows + -rows % (1 << max(0, rows.bit_length() - 3))
