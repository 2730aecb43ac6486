"""Verification and the drawing of draft tokens in Triton: three kernels, and no waiting for the host.

    sweep    reads the logits once: maximum and sum of every chunk (in greedy rows the argmax)
    resolve  per sequence: log-sum-exps, which tokens are accepted, where the row ends; if it ends with a
             rejection, the residual's mass in each chunk of that one position
    draw     per sequence: one random number chooses a chunk by its mass and then, after the chunk was read
             again, the token in it

No probabilities and no float32 copy of the logits are written to memory. Drawing a draft token is verifying a
chain of length 0. `reference.py` is the specification, and the results must be the same.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .philox import PROPOSE, RESAMPLE
from .verify_kernels import draw, resolve, sweep


def verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `moedraft.kernels.verify_chain`; target_logits [B, K+1, V] or packed [rows, V]."""
    chain = (draft_tokens, draft_logits, draft_lse, num_draft, temperature, seed, position)
    with torch.cuda.device_of(target_logits):  # type: ignore[no-untyped-call]
        return _run(target_logits, *chain, drafting=False)[:3]


def sample_draft(
    logits: Tensor, temperature: Tensor | float, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """See `moedraft.kernels.sample_draft`. A chain of length 0, with the random numbers for proposals."""
    nothing = torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    chain = (nothing, None, None, None, temperature, seed, position)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        tokens, _, _, scales = _run(logits[:, None], *chain, drafting=True)
    return tokens[:, 0], scales[:, 1]


def chunk_width(vocab: int) -> int:
    """Entries in a chunk. It depends on the vocabulary alone, so that answers do not depend on the batch."""
    return 4096 if vocab > 32768 else 1024 if vocab > 1024 else 256


def chunks_per_program(rows: int, chunks: int) -> int:
    """One while there are few chunks, since a GPU runs some thousand programs at once; then more."""
    total = rows * chunks
    return 1 if total <= 4096 else 2 if total <= 16384 else 4


def _run(
    target: Tensor,
    tokens: Tensor,
    draft: Tensor | None,
    draft_lse: Tensor | None,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    *,
    drafting: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels. Returns tokens, num_accepted, status, scales [B, 3] (maximum, lse, draft's lse)."""
    batch, length = tokens.shape
    vocab, device = target.shape[-1], target.device
    new: dict[str, Any] = {"device": device}
    out = torch.empty((batch, length + 1), dtype=torch.int64, **new)
    num_accepted = torch.empty(batch, dtype=torch.int64, **new)
    status = torch.empty(batch, dtype=torch.int32, **new)
    scales = torch.empty((batch, 3), **new)
    if batch == 0:
        return out, num_accepted, status, scales
    if not isinstance(temperature, Tensor):
        temperature = torch.full((batch,), temperature, **new)
    if length == 0:
        draft = draft_lse = None
    tokens, temperature, seed, position = (t.contiguous() for t in (tokens, temperature, seed, position))
    counts = None if num_draft is None else num_draft.contiguous()
    draft_lse = None if draft_lse is None else draft_lse.contiguous()
    packed, (target_starts, draft_starts) = target.dim() == 2, _starts(target, counts)
    width = chunk_width(vocab)
    chunks = triton.cdiv(vocab, width)
    shared = {
        "PACKED": packed,
        "CHUNK": width,
        "num_warps": 8 if width == 4096 else 4,
        "enable_fp_fusion": True,
    }

    def statistics(
        logits: Tensor, starts: Tensor | None, extra: int, need_arguments: bool
    ) -> tuple[Any, ...]:
        rows = batch * (length + extra)
        per = chunks_per_program(rows, chunks)
        maxima, sums = torch.empty((2, rows, chunks), **new)
        arguments = torch.empty((rows, chunks), dtype=torch.int32, **new) if need_arguments else None
        sweep[(rows, triton.cdiv(chunks, per))](
            logits, *_strides(logits), starts, counts, temperature, maxima, sums, arguments, vocab, chunks,
            length + extra, PER=per, EXTRA=extra, HAS_COUNTS=counts is not None,
            NEED_ARGUMENTS=need_arguments, SKIP_GREEDY_SUM=not drafting, **shared,
        )  # fmt: skip
        return maxima, sums, arguments

    t_max, t_sum, t_arg = statistics(target, target_starts, 1, True)
    d_max, d_sum, mass, per = None, None, None, 1
    d_strides: tuple[int, ...] = (0, 0, 0)
    if draft is not None:
        d_strides = _strides(draft)
        per = chunks_per_program(batch, chunks)
        mass = torch.empty((batch, chunks), **new)
        if draft_lse is None:
            d_max, d_sum, _ = statistics(draft, draft_starts, 0, False)
    modes = torch.empty(batch, dtype=torch.int32, **new)
    drafted = torch.empty(batch, dtype=torch.int64, **new)
    uniforms = torch.empty(batch, dtype=torch.float64, **new)
    rows_of = (target, *_strides(target), target_starts, draft, *d_strides, draft_starts)
    found = (mass, modes, drafted, scales, uniforms, out, num_accepted, status, vocab, chunks, length)
    many = {"HAS_DRAFT": draft is not None, "NCP": max(2, triton.next_power_of_2(chunks)), **shared}
    resolve[(batch, triton.cdiv(chunks, per) if draft is not None else 1)](
        *rows_of, tokens, counts, draft_lse, temperature, seed, position, t_max, t_sum, t_arg, d_max, d_sum,
        *found, PER=per, HAS_LSE=draft_lse is not None, HAS_COUNTS=counts is not None,
        PURPOSE=PROPOSE if drafting else RESAMPLE,
        KP=max(2, triton.next_power_of_2(length + 1)), **many,
    )  # fmt: skip
    draw[(batch,)](*rows_of, temperature, t_max, t_sum, *found, **many)
    return out, num_accepted, status, scales


def _strides(logits: Tensor) -> tuple[int, ...]:
    """Strides from sequence to sequence (0 where rows are packed), row to row, and entry to entry."""
    return (0, *logits.stride()) if logits.dim() == 2 else logits.stride()


def _starts(target: Tensor, counts: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Where rows are packed: each sequence's first row in the target's and in the draft's logits."""
    if target.dim() == 3 or counts is None:
        return None, None
    draft = counts.cumsum(0) - counts
    return draft + torch.arange(counts.shape[0], device=counts.device), draft
