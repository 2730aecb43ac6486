"""Launches the kernels of `divergence_kernels.py`: losses and gradients of all rows, and their scaling."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .divergence_kernels import _kl, _mixed, _scale, _topk


def divergence_rows(
    student: Tensor,
    teacher: Tensor | None,
    ids: Tensor | None,
    logprobs: Tensor | None,
    weight: Tensor,
    kind: str,
    beta: float,
    temperature: float,
    grad: Tensor | None,
) -> Tensor:
    """See `reference_divergence.divergence_rows`."""
    rows, vocab = student.shape
    losses = torch.empty(rows, device=student.device)
    if rows == 0:
        return losses
    student = student.detach()
    into = (None, 0, 0) if grad is None else (grad, *grad.stride())
    common: dict[str, Any] = {"WANT_GRAD": grad is not None, **tile(vocab)}
    ends = (*into, weight, losses, 1.0 / temperature)
    if teacher is None:
        assert ids is not None
        assert logprobs is not None
        ids, order = ids.sort(dim=1)
        logprobs = logprobs.to(torch.float32).gather(1, order)
        count = ids.shape[1]
        padded = max(2, triton.next_power_of_2(count))
        _topk[(rows,)](
            student, *student.stride(), ids, logprobs, *ends, beta, count, KIND=kind, KP=padded, **common
        )
    elif kind in ("fkl", "rkl"):
        _kl[(rows,)](
            student, *student.stride(), teacher, *teacher.stride(), *ends, REVERSE=kind == "rkl", **common
        )
    else:
        _mixed[(rows,)](
            student, *student.stride(), teacher, *teacher.stride(), *ends, beta, KIND=kind, **common
        )
    return losses


def scale_rows(grad: Tensor, upstream: Tensor) -> Tensor:
    """grad [N, V] times upstream [N], in place."""
    if grad.shape[0]:
        _scale[(grad.shape[0],)](grad, *grad.stride(), upstream, upstream.stride(0), **tile(grad.shape[1]))
    return grad


def tile(vocab: int) -> dict[str, Any]:
    """Block, warps, and how far loads run ahead: while a block is worked on, the next two are copied.

    A thread has eight entries and at most 64 registers, so that four blocks share a multiprocessor; where
    rows begin anywhere, and each entry is loaded on its own, it has 80, and three do.
    """
    block = min(2048, max(256, triton.next_power_of_2(vocab)))
    warps, stages = 8 if block > 1024 else 4, 3 if vocab > block else 1
    launch = {"num_warps": warps, "maxnreg": 80 if vocab % 16 else 64, "enable_fp_fusion": True}
    return {"V": vocab, "BLOCK": block, "STAGES": stages, **launch}
