"""Matrix products with few rows on a CPU, where the layout of the weight decides the speed.

Decoding multiplies one row, verification a handful. Each weight is read once and has left the processor's
cache when it is needed again, so what counts is how fast it is read. In float32, for one or two rows, a
weight stored input-major is read two to three times as fast as in PyTorch's usual layout; for more rows, and
for any number in bfloat16, oneDNN's own blocked layout takes hardly longer than one row does. A small model
keeps a copy in each layout that it needs. The plain twin is `torch.nn.functional.linear`, which `Product`
falls back to as well.

A product keeps its weight's precision, unless `half` is asked for: FBGEMM then keeps a float32 weight in half
precision and multiplies it in float32, in half of the time for one row and four fifths for many on a
processor with AVX2 (docs/experiments.md, "Weights in half precision").

oneDNN generates code for each pair of shape and number of rows. That takes a millisecond or two, and half a
megabyte that it keeps. A server sees any number of rows. So the number is rounded up, products of many rows
go through `linear`, oneDNN may keep a limited number of entries only, and the code that a model needs can be
generated before the server takes requests.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

FEW = 2  # rows up to which the input-major copy is faster
TYPICAL = 5  # rows that the blocked copy is laid out for
MANY = 128  # rows from which on arithmetic decides, not reading, and PyTorch's usual product is as fast
# Entries of oneDNN's cache of generated code, and of PyTorch's own cache in front of it, which saves no time.
# A product takes two entries. The shipped pair multiplies nine shapes with sixteen numbers of rows each, the
# embedder three shapes with ten, and its activation takes 32 entries more. All of them must fit, or code that
# was generated ahead would be dropped before it is used.
KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512", "LRU_CACHE_CAPACITY": "16"}
Shape = tuple[int, int, bool, torch.dtype]  # out, in, whether there is a bias, precision
SHAPES: dict[Shape, bool] = {}  # whether its code was generated


def pays(weight: torch.Tensor) -> bool:
    """Whether copies in other layouts make products faster: float32, on a CPU, with oneDNN in PyTorch."""
    return packs(weight) and weight.dtype == torch.float32


def packs(weight: torch.Tensor) -> bool:
    """Whether oneDNN can store `weight` in its own layout: on a CPU, in a precision it multiplies."""
    known = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    precise = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16())
    return known and weight.device.type == "cpu" and precise


def halves(weight: torch.Tensor) -> bool:
    """Whether FBGEMM can keep this float32 weight in half precision: on a CPU, no number out of range."""
    known = torch.backends.quantized.engine in ("x86", "fbgemm")  # the one that is in use
    fits = known and weight.device.type == "cpu" and weight.dtype == torch.float32
    return fits and bool(weight.abs().amax() <= torch.finfo(torch.float16).max)


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16; without them such products are slow."""
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return known is not None and bool(known())


class Product:
    """x → x Wᵀ + bias, for a weight [out, in] that does not change any more.

    `small`: whether the model is one that the fast paths suit; only then are copies made. `half`: whether a
    copy in half precision may take the weight's place, where that is faster.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, small: bool, half: bool = False
    ) -> None:
        bound_caches()
        self.weight, self.bias, self.out = weight, bias, weight.shape[0]
        self.blocked: torch.Tensor | None = None
        self.half: Any = None
        self.few = 0
        if small and half and halves(weight):
            self.half = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
            self.weight = weight.new_empty(0)  # the copy serves any number of rows
            return
        if small and packs(weight):
            self.blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL)
            expect(weight, bias)
        if small and pays(weight):
            self.weight, self.few = weight.t().contiguous().t(), FEW

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]"""
        if self.half is not None:
            y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.half)
            return y
        rows = x.numel() // x.shape[-1]
        if self.blocked is None or not self.few < rows <= MANY:
            return linear(x, self.weight, self.bias)
        return rounded_product(x, self.blocked, self.bias)


class PackedLinear(nn.Module):
    """Replaces an nn.Linear on a CPU and can do nothing but multiply. Its plain twin is that nn.Linear.

    The weight is brought into oneDNN's layout once, where nn.Linear does so for every product. The number of
    rows is rounded up, so that oneDNN generates code for few of them.
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
    """Replace each nn.Linear in `model` that oneDNN can store by a PackedLinear for about `rows` rows.

    For models on a CPU in float32 or bfloat16 that will be neither trained nor saved.
    """
    for name, layer in model.named_children():
        if type(layer) is nn.Linear and packs(layer.weight):
            setattr(model, name, PackedLinear(layer, rows))
        else:
            pack_layers(layer, rows)


def rounded_product(x: torch.Tensor, blocked: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] times a weight in oneDNN's layout → [..., out]; rows are padded to a `rounded` number."""
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
    """Limit the generated code that oneDNN keeps, where the user has not set a limit.

    Its two caches take 1024 entries by themselves. The router's embedder fills them too, because nearly every
    prompt has another number of tokens. oneDNN reads these variables when it is first used, so call this
    before the first weight is laid out.
    """
    for name, entries in KEPT.items():
        os.environ.setdefault(name, entries)


def expect(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Register this weight's shape, so that `generate_ahead` generates the code for it."""
    if packs(weight):
        SHAPES.setdefault((weight.shape[0], weight.shape[1], bias is not None, weight.dtype), False)


@torch.inference_mode()
def generate_ahead() -> int:
    """Have oneDNN generate the code for all registered shapes; returns for how many this was not done yet.

    Call it in the thread that will multiply.
    """
    # The code depends on the number of threads, which a new thread learns only when it asks for it.
    torch.get_num_threads()
    new = [shape for shape, generated in SHAPES.items() if not generated]
    for out, inner, biased, dtype in new:
        weight = torch.zeros(out, inner, dtype=dtype)
        bias = torch.zeros(out, dtype=dtype) if biased else None
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL)
        few = FEW if pays(weight) else 0
        for rows in sorted({rounded(rows) for rows in range(few + 1, MANY + 1)}):
            rounded_product(torch.zeros(rows, inner, dtype=dtype), blocked, bias)
        SHAPES[out, inner, biased, dtype] = True
    return len(new)


def rounded(rows: int) -> int:
    """`rows` rounded up to one of four numbers between two powers of two, above sixteen to one of two.

    oneDNN generates code for each number of rows, so few numbers should occur.
    """
    return rows + -rows % (1 << max(0, rows.bit_length() - (3 if rows <= 16 else 2)))
