"""What a divergence is given: checked, and flattened to rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .autograd import Problem
from .backends import check_devices


def problem_of(
    student: Tensor,
    teacher: Tensor | None,
    topk: tuple[Tensor, Tensor] | None,
    kind: str,
    beta: float,
    temperature: float,
    mask: Tensor | None,
    reduction: str,
    divisor: float = 1.0,
) -> Problem:
    """Checked arguments, flattened to rows."""
    check_choices(kind, beta, temperature, reduction)
    check_divisor(divisor, reduction)
    check_tensors(student, teacher, topk, mask)
    flat = student.reshape(-1, student.shape[-1])
    rows = flat.shape[0]
    counted = torch.ones(rows, dtype=torch.bool, device=student.device)
    if mask is not None:
        counted = mask.detach().reshape(rows) != 0
    ids = logprobs = None
    if topk is not None:
        ids, logprobs = (part.detach().reshape(rows, topk[0].shape[-1]) for part in topk)
        ids = bounded_ids(ids, flat.shape[1])
        counted = counted & (ids >= 0).any(dim=1)
    weight = counted.to(torch.float64 if student.dtype == torch.float64 else torch.float32)
    if reduction == "mean":
        weight = weight / weight.sum().clamp(min=1)
    elif divisor != 1:
        weight = weight / divisor
    teacher = None if teacher is None else teacher.detach().reshape(flat.shape)
    return Problem(
        flat, teacher, ids, logprobs, weight, kind, float(beta), float(temperature), reduction != "none"
    )


def bounded_ids(ids: Tensor, vocab: int) -> Tensor:
    """ids, none outside the vocabulary: refused on a CPU, padding elsewhere, where reading them waits."""
    outside = ids >= vocab
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return ids.masked_fill(outside, -1)
    if bool(outside.any()):
        raise ValueError(f"teacher_topk holds token {int(ids.max())}; the student's vocabulary has {vocab}.")
    return ids


def check_choices(kind: str, beta: float, temperature: float, reduction: str) -> None:
    if kind not in ("fkl", "rkl", "jsd", "tvd") or reduction not in ("mean", "sum", "none"):
        raise ValueError(f"Unknown kind {kind!r} or reduction {reduction!r}.")
    if not 0 < beta < 1:
        raise ValueError(f"beta must lie strictly between 0 and 1, not {beta}; for the ends take fkl or rkl.")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}.")


def check_divisor(divisor: float, reduction: str) -> None:
    if not divisor > 0:
        raise ValueError(f"divisor must be positive, not {divisor}.")
    if divisor != 1 and reduction != "sum":
        raise ValueError(f'divisor belongs to reduction "sum", not to {reduction!r}.')


def check_overwritable(student: Tensor) -> None:
    """Check that a gradient can be written where the student's logits [..., V] are."""
    reach = 0  # entries from the first one to the last one that the dimensions so far lead to
    for stride, size in sorted(zip(student.stride(), student.shape, strict=True)):
        if size > 1 and stride <= reach and student.numel():
            raise ValueError(
                "inplace_grad needs logits whose entries each have their own place in memory, "
                "not expanded or overlapping ones; give it a copy, student_logits.contiguous()."
            )
        reach += stride * (size - 1)


def check_tensors(
    student: Tensor, teacher: Tensor | None, topk: tuple[Tensor, Tensor] | None, mask: Tensor | None
) -> None:
    """Check shapes and types of a divergence's tensors."""
    if (teacher is None) == (topk is None):
        raise ValueError("Give either teacher_logits or teacher_topk.")
    if student.dim() < 1 or not student.is_floating_point() or student.shape[-1] == 0:
        raise ValueError(
            f"student_logits must be floating [..., V], not {student.dtype} {list(student.shape)}."
        )
    lead = student.shape[:-1]
    if teacher is not None and teacher.shape != student.shape:
        raise ValueError(f"teacher_logits {list(teacher.shape)} must be shaped as {list(student.shape)}.")
    if topk is not None and (
        topk[0].shape != topk[1].shape or topk[0].shape[:-1] != lead or topk[0].shape[-1] == 0
    ):
        raise ValueError(f"teacher_topk must be two tensors [{', '.join(map(str, lead))}, k] with k > 0.")
    if topk is not None and (topk[0].dtype != torch.int64 or not topk[1].is_floating_point()):
        types = f"{topk[0].dtype} and {topk[1].dtype}"
        raise ValueError(f"teacher_topk must be int64 ids and floating log-probabilities, not {types}.")
    if teacher is not None and not teacher.is_floating_point():
        raise ValueError(f"teacher_logits must be floating, not {teacher.dtype}.")
    if mask is not None and mask.shape != lead:
        raise ValueError(f"mask {list(mask.shape)} must be shaped as the rows, {list(lead)}.")
    ids, logprobs = topk or (None, None)
    check_devices(student, teacher_logits=teacher, teacher_ids=ids, teacher_logprobs=logprobs, mask=mask)


def check_layer(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora: tuple[Tensor, Tensor] | None,
    block_rows: int | None,
) -> None:
    """Check shapes and types of an output layer and what it is given."""
    if block_rows is not None and block_rows < 1:
        raise ValueError(f"block_rows must be at least 1, not {block_rows}.")
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [..., H] and [V, H]."
        )
    vocab, width = weight.shape
    if bias is not None and bias.shape != (vocab,):
        raise ValueError(f"bias {list(bias.shape)} must be [{vocab}].")
    if lora is not None and (
        lora[0].dim() != 2 or lora[0].shape[1] != width or lora[1].shape != (vocab, lora[0].shape[0])
    ):
        shapes = [list(part.shape) for part in lora]
        raise ValueError(f"lora {shapes} must be two tensors [r, {width}] and [{vocab}, r].")
    a, b = lora or (None, None)
    check_devices(hidden, weight=weight, bias=bias, lora_a=a, lora_b=b)
    types = {part.dtype for part in (hidden, weight, bias, *(lora or ())) if part is not None}
    mixed = len(types) > 1 and not torch.is_autocast_enabled(hidden.device.type)
    if mixed or not all(dtype.is_floating_point for dtype in types):
        raise ValueError(f"hidden, weight, bias and lora must be of one floating type, not {types}.")
