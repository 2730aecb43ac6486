"""The output layer and a divergence in one: the logits of a few rows at a time, never of all rows.

Each block of rows gets its logits, its loss and its gradient, and hands that on to the hidden states and to
the layer's parameters before the next block is begun; the logits' memory is used again. The products are
PyTorch's own (cuBLAS on a GPU), the divergence of a block is the one of `divergence`, fused on a GPU. Knows
nothing of models or training loops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .autograd import Problem, block_rows, enlargement

BYTES = {"cpu": 2**25, "cuda": 2**29}  # of the logits of one block, were they float32


class Layer(NamedTuple):
    """An output layer: weight [V, H], bias [V], and an adapter lora_b [V, r] · lora_a [r, H]."""

    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None


class Sums(NamedTuple):
    """The gradients, in float32 (float64 for float64 input); None for what needs none."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None


def evaluate_linear(hidden: Tensor, layer: Layer, problem: Problem, backend: str, rows: int | None) -> Tensor:
    """The loss of hidden [N, H] through the layer, scalar or [N], taking part in autograd.

    `problem` is all of a divergence; its student has the logits' shape and no content. `rows`: of a block.
    """
    per_block = rows or rows_per_block(hidden, layer.weight.shape[0])
    result: Tensor = _Linear.apply(problem, backend, per_block, hidden, *layer)  # type: ignore[no-untyped-call]
    return result


def rows_per_block(hidden: Tensor, vocab: int) -> int:
    """As many rows as fit into `BYTES`; at least 16, for which a product still pays."""
    return max(16, BYTES.get(hidden.device.type, BYTES["cuda"]) // (4 * vocab))


class _Linear(torch.autograd.Function):
    """A scalar loss has its gradients from the forward pass; rows' losses get theirs in the backward."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, backend: str, rows: int, hidden: Tensor, *layer: Any) -> Tensor:
        needs = ctx.needs_input_grad[3:]
        whole, dtype = Layer(*layer), computed_type(hidden)
        # saved by PyTorch, which notices when one of them has been changed before it is read again
        ctx.save_for_backward(hidden, *layer, problem.teacher, problem.ids, problem.logprobs)
        ctx.arguments = problem._replace(teacher=None, ids=None, logprobs=None), backend, rows, dtype
        ctx.types = [None if part is None else part.dtype for part in (hidden, *layer)]
        ctx.sums = _sums(hidden, whole, needs) if problem.reduce and any(needs) else None
        return _blocks(problem, backend, rows, hidden, whole, dtype, ctx.sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        sums, factor = ctx.sums, upstream
        if sums is None:  # rows' losses, or a second backward
            sums, factor = _summed_again(ctx, upstream)
        ctx.sums = None  # what it holds is changed now
        found = (
            None if total is None else total.mul_(factor).to(dtype)
            for total, dtype in zip(sums, ctx.types, strict=True)
        )
        return (None, None, None, *found)


def _summed_again(ctx: Any, upstream: Tensor) -> tuple[Sums, Tensor]:
    """The gradients for what comes from above, from logits that are computed once more; and a factor of all.

    float16 could not hold a gradient times a loss scaler's 65 536: there the largest of them is the factor.
    """
    problem, backend, rows, dtype = ctx.arguments
    hidden, *layer, teacher, ids, logprobs = ctx.saved_tensors
    sums = _sums(hidden, Layer(*layer), ctx.needs_input_grad[3:])
    factor = torch.ones((), dtype=upstream.dtype, device=upstream.device)
    if dtype == torch.float16 and upstream.numel():
        factor = upstream.abs().amax().clamp(min=torch.finfo(upstream.dtype).tiny)
    weight = problem.weight * (upstream / factor).to(problem.weight.dtype)
    weighed = problem._replace(teacher=teacher, ids=ids, logprobs=logprobs, weight=weight)
    _blocks(weighed, backend, rows, hidden, Layer(*layer), dtype, sums)
    return sums, factor


def _sums(hidden: Tensor, layer: Layer, needs: tuple[bool, ...]) -> Sums:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32

    def zeros(part: Tensor | None, need: bool) -> Tensor | None:
        return None if part is None or not need else torch.zeros_like(part, dtype=dtype)

    return Sums(*(zeros(part, need) for part, need in zip((hidden, *layer), needs, strict=True)))


def computed_type(hidden: Tensor) -> torch.dtype:
    """Autocast's type where it is on."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _blocks(
    problem: Problem,
    backend: str,
    rows: int,
    hidden: Tensor,
    layer: Layer,
    dtype: torch.dtype,
    sums: Sums | None,
) -> Tensor:
    """The loss of all blocks, with products in `dtype`; adds their gradients to `sums`."""
    hidden = hidden.to(dtype)
    layer = Layer(layer.weight.to(dtype), *(None if part is None else part.to(dtype) for part in layer[1:]))
    losses = torch.zeros(hidden.shape[0], dtype=problem.weight.dtype, device=hidden.device)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        buffer = hidden.new_empty(min(rows, hidden.shape[0]), layer.weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            block = slice(start, start + rows)
            states = hidden[block]
            low = None if layer.lora_a is None else states @ layer.lora_a.T
            logits = _logits(states, low, layer, buffer[: states.shape[0]])
            part, grad = _part(problem, logits, block), None if sums is None else logits
            larger = enlargement(part, backend, grad)
            if larger is not None:
                larger = larger.amin()  # one number, since some products add up the rows
                part = part._replace(weight=part.weight * larger)
            losses[block] = block_rows(part, backend, grad)
            if sums is not None:  # the gradient lies now where the logits were
                _add(sums, block, logits, None if larger is None else 1 / larger, states, low, layer)
    return losses.mul_(problem.weight).sum() if problem.reduce else losses


def _logits(states: Tensor, low: Tensor | None, layer: Layer, out: Tensor) -> Tensor:
    """states [n, H] → logits [n, V], written into `out`; low: states through lora_a."""
    torch.mm(states, layer.weight.T, out=out)
    if low is not None and layer.lora_b is not None:
        out.addmm_(low, layer.lora_b.T)
    return out if layer.bias is None else out.add_(layer.bias)


def _part(problem: Problem, logits: Tensor, block: slice) -> Problem:
    """The rows of a block, with their logits as the student."""
    return problem._replace(
        student=logits,
        teacher=None if problem.teacher is None else problem.teacher[block],
        ids=None if problem.ids is None else problem.ids[block],
        logprobs=None if problem.logprobs is None else problem.logprobs[block],
        weight=problem.weight[block],
    )


def _add(
    sums: Sums,
    block: slice,
    grad: Tensor,
    factor: Tensor | None,
    states: Tensor,
    low: Tensor | None,
    layer: Layer,
) -> None:
    """What the gradient [n, V] of a block's logits adds to the gradients of everything that made them.

    factor: what it is still to be multiplied by; None: by nothing.
    """
    back = None if layer.lora_b is None else _product(grad, layer.lora_b, factor)  # [n, r]
    if sums.hidden is not None:
        sums.hidden[block] = _product(grad, layer.weight, factor)
        if back is not None and layer.lora_a is not None:
            sums.hidden[block] += _product(back, layer.lora_a)
    if sums.weight is not None:
        _add_product(sums.weight, grad.T, states, factor)
    if sums.bias is not None:
        added = grad.sum(0, dtype=sums.bias.dtype)
        sums.bias.add_(added if factor is None else added * factor)
    if sums.lora_a is not None and back is not None:
        _add_product(sums.lora_a, back.T, states)
    if sums.lora_b is not None and low is not None:
        _add_product(sums.lora_b, grad.T, low, factor)


def _add_product(total: Tensor, a: Tensor, b: Tensor, factor: Tensor | None = None) -> None:
    if factor is None and total.dtype == a.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        total += _product(a, b, factor)


def _product(a: Tensor, b: Tensor, factor: Tensor | None = None) -> Tensor:
    """a @ b; in float32 where one of them is float16, which cannot hold all sums of an enlarged gradient."""
    if torch.float16 not in (a.dtype, b.dtype):
        product = a @ b
    elif a.dtype == b.dtype and a.device.type == "cuda":
        product = torch.mm(a, b, out_dtype=torch.float32)
    else:
        product = a.float() @ b.float()
    return product if factor is None else product.mul_(factor)
