"""Matrix products with few rows on a CPU, where the layout of the weight decides the speed.

Decoding multiplies one row, verification a handful, and each weight is read once and then falls out of the
cache: what counts is how fast it streams. For one or two rows a weight stored input-major streams two to
three times as fast as PyTorch's usual layout; for more, oneDNN's own blocked layout takes hardly longer than
one row. Both copies are kept, for small models only. A product keeps its weight's precision.

oneDNN generates code for each pair of shape and number of rows, half a megabyte in a millisecond or two, and
keeps it. A server sees any number of rows: it is rounded, many rows go the usual way, what oneDNN keeps is
bounded, and what a model needs can be generated before it serves.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import nn
from torch.nn.functional import linear, pad

FEW = 2  # rows up to which the input-major copy is faster
TYPICAL = 5  # rows that the blocked copy is laid out for
MANY = 128  # rows from which on arithmetic decides, not reading, and PyTorch's usual product is as fast
# Entries of oneDNN's cache, and of PyTorch's own in front of it, which saves no time. A product takes two.
# The shipped pair has nine shapes of sixteen row counts each, the embedder three of ten, and 32 of its
# activation: all fit, or what was generated ahead would be thrown away before it is used.
KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512", "LRU_CACHE_CAPACITY": "16"}
SHAPES: dict[tuple[int, int, bool], bool] = {}  # out, in, biased: is the code for it generated?


def pays(weight: torch.Tensor) -> bool:
    """Whether a second layout can help: float32 on a CPU whose PyTorch has oneDNN's blocked products."""
    return packs(weight) and weight.dtype == torch.float32


def packs(weight: torch.Tensor) -> bool:
    """Whether oneDNN can lay `weight` out: on a CPU, in a precision that the CPU multiplies."""
    known = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    precise = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16())
    return known and weight.device.type == "cpu" and precise


def multiplies_bfloat16() -> bool:
    """Whether the CPU does so itself; others only imitate it, slowly."""
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return known is not None and bool(known())


class Product:
    """x → x Wᵀ + bias, for a weight [out, in] that does not change any more; `small`: its model is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, small: bool) -> None:
        bound_caches()
        self.weight, self.bias = weight, bias
        self.blocked: torch.Tensor | None = None
        if small and pays(weight):
            self.weight = weight.t().contiguous().t()
            self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL)
            expect(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]"""
        rows = x.numel() // x.shape[-1]
        if self.blocked is None or not FEW < rows <= MANY:
            return linear(x, self.weight, self.bias)
        return rounded_product(x, self.blocked, self.bias)


class PackedLinear(nn.Module):
    """An nn.Linear on a CPU whose weight is laid out once, not again for every product. It only multiplies.

    Any number of rows goes this way, rounded, so that few kernels are ever generated.
    """

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        super().__init__()
        bound_caches()
        self.bias = layer.bias
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().contiguous(), rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]"""
        return rounded_product(x, self.blocked, self.bias)


def pack_layers(model: nn.Module, rows: int) -> None:
    """Turn every nn.Linear inside `model` into a PackedLinear, laid out for about `rows` rows, where it can.

    For models on a CPU in float32 or bfloat16 that are not trained and not saved any more.
    """
    for name, layer in model.named_children():
        if type(layer) is nn.Linear and packs(layer.weight):
            setattr(model, name, PackedLinear(layer, rows))
        else:
            pack_layers(layer, rows)


def rounded_product(x: torch.Tensor, blocked: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] by a weight in oneDNN's layout → [..., out]; rows are padded up to `rounded`."""
    rows = x.numel() // x.shape[-1]
    padded = rounded(rows)
    if padded == rows:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, blocked, bias, "none", [], "")
        return y
    flat = pad(x.reshape(rows, -1), (0, 0, 0, padded - rows))
    y = torch.ops.mkldnn._linear_pointwise(flat, blocked, bias, "none", [], "")
    return y[:rows].view(*x.shape[:-1], -1)


@cache
def bound_caches() -> None:
    """Let oneDNN keep less generated code than the 1024 entries of its two caches, unless the user says so.

    The router's embedder fills them too, which multiplies another number of tokens for nearly every prompt.
    oneDNN reads these variables once, when it is first used: this comes before the first weight is laid out.
    """
    for name, entries in KEPT.items():
        os.environ.setdefault(name, entries)


def expect(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Products of this shape, a small model's, are made or will be."""
    if pays(weight):
        SHAPES.setdefault((weight.shape[0], weight.shape[1], bias is not None), False)


@torch.inference_mode()
def generate_ahead() -> int:
    """Have oneDNN generate all that the expected products need; returns for how many shapes that was new.

    To be called by the thread that multiplies.
    """
    torch.get_num_threads()  # a thread takes over what was set when it is first asked; code depends on it
    new = [shape for shape, generated in SHAPES.items() if not generated]
    for out, inner, biased in new:
        weight, bias = torch.zeros(out, inner), torch.zeros(out) if biased else None
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL)
        for rows in sorted({rounded(rows) for rows in range(FEW + 1, MANY + 1)}):
            rounded_product(torch.zeros(rows, inner), blocked, bias)
        SHAPES[out, inner, biased] = True
    return len(new)


def rounded(rows: int) -> int:
    """Up to one of four counts in each octave, of two above sixteen: each has generated code of its own."""
    return rows + -rows % (1 << max(0, rows.bit_length() - (3 if rows <= 16 else 2)))
