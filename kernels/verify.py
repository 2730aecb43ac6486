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
    results = out, num_accepted, status, scales = _results(batch, length, target.device)
    if batch == 0:
        return results
    if not isinstance(temperature, Tensor):
        temperature = torch.full((batch,), temperature, device=target.device)
    if length == 0:
        draft = draft_lse = None
    tokens, temperature, seed, position = (t.contiguous() for t in (tokens, temperature, seed, position))
    counts = None if num_draft is None else num_draft.contiguous()
    draft_lse = None if draft_lse is None else draft_lse.contiguous()
    rows = _Rows(target, draft, counts, temperature, batch, length)
    t_max, t_sum, t_arg = rows.sweep(target, rows.target_starts, 1, need_arguments=True, drafting=drafting)
    d_max, d_sum = None, None
    if draft is not None and draft_lse is None:
        d_max, d_sum, _ = rows.sweep(draft, rows.draft_starts, 0, need_arguments=False, drafting=drafting)
    per, programs, mass = rows.residual()
    modes, drafted, uniforms = _decisions(batch, target.device)
    found = (mass, modes, drafted, scales, uniforms, out, num_accepted, status, *rows.sizes)
    resolve[(batch, programs)](
        *rows.logits, tokens, counts, draft_lse, temperature, seed, position, t_max, t_sum, t_arg, d_max,
        d_sum, *found, PER=per, HAS_LSE=draft_lse is not None, HAS_COUNTS=counts is not None,
        PURPOSE=PROPOSE if drafting else RESAMPLE,
        KP=max(2, triton.next_power_of_2(length + 1)), **rows.constants,
    )  # fmt: skip
    draw[(batch,)](*rows.logits, temperature, t_max, t_sum, *found, **rows.constants)
    return results


def _results(batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for what `_run` returns."""
    out = torch.empty((batch, length + 1), dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=device)
    status = torch.empty(batch, dtype=torch.int32, device=device)
    return out, num_accepted, status, torch.empty((batch, 3), device=device)


def _decisions(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for what `resolve` tells `draw`: mode, rejected token and random number of each sequence."""
    modes = torch.empty(batch, dtype=torch.int32, device=device)
    drafted = torch.empty(batch, dtype=torch.int64, device=device)
    return modes, drafted, torch.empty(batch, dtype=torch.float64, device=device)


class _Rows:
    """The logits of one launch: where their rows begin, and the chunks into which they are divided."""

    def __init__(
        self,
        target: Tensor,
        draft: Tensor | None,
        counts: Tensor | None,
        temperature: Tensor,
        batch: int,
        length: int,
    ) -> None:
        self._batch, self._length, self._counts, self._temperature = batch, length, counts, temperature
        self._device, self._has_draft = target.device, draft is not None
        self._vocab = target.shape[-1]
        width = chunk_width(self._vocab)
        self._chunks = triton.cdiv(self._vocab, width)
        self._shared = {
            "PACKED": target.dim() == 2,
            "CHUNK": width,
            "num_warps": 8 if width == 4096 else 4,
            "enable_fp_fusion": True,
        }
        self.target_starts, self.draft_starts = _starts(target, counts)
        strides = (0, 0, 0) if draft is None else _strides(draft)
        self.logits = (target, *_strides(target), self.target_starts, draft, *strides, self.draft_starts)
        self.sizes = (self._vocab, self._chunks, length)
        padded = max(2, triton.next_power_of_2(self._chunks))
        self.constants = {"HAS_DRAFT": self._has_draft, "NCP": padded, **self._shared}

    def sweep(
        self, logits: Tensor, starts: Tensor | None, extra: int, *, need_arguments: bool, drafting: bool
    ) -> tuple[Any, ...]:
        """Maximum, sum and, if needed, argmax of every chunk [rows, chunks]."""
        rows = self._batch * (self._length + extra)
        per = chunks_per_program(rows, self._chunks)
        maxima, sums = torch.empty((2, rows, self._chunks), device=self._device)
        arguments = None
        if need_arguments:
            arguments = torch.empty((rows, self._chunks), dtype=torch.int32, device=self._device)
        sweep[(rows, triton.cdiv(self._chunks, per))](
            logits, *_strides(logits), starts, self._counts, self._temperature, maxima, sums, arguments,
            self._vocab, self._chunks, self._length + extra, PER=per, EXTRA=extra,
            HAS_COUNTS=self._counts is not None, NEED_ARGUMENTS=need_arguments,
            SKIP_GREEDY_SUM=not drafting, **self._shared,
        )  # fmt: skip
        return maxima, sums, arguments

    def residual(self) -> tuple[int, int, Tensor | None]:
        """For the residual at a rejection: chunks per program, programs per row, room for its mass."""
        if not self._has_draft:
            return 1, 1, None
        per = chunks_per_program(self._batch, self._chunks)
        mass = torch.empty((self._batch, self._chunks), device=self._device)
        return per, triton.cdiv(self._chunks, per), mass


def _strides(logits: Tensor) -> tuple[int, ...]:
    """Strides from sequence to sequence (0 where rows are packed), row to row, and entry to entry."""
    return (0, *logits.stride()) if logits.dim() == 2 else logits.stride()


def _starts(target: Tensor, counts: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Where rows are packed: each sequence's first row in the target's and in the draft's logits."""
    if target.dim() == 3 or counts is None:
        return None, None
    draft = counts.cumsum(0) - counts
    return draft + torch.arange(counts.shape[0], device=counts.device), draft
