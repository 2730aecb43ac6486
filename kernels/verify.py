"""Verification and the drawing of draft tokens in Triton: two kernels, and no waiting for the host.

    sweep    reads the logits once: maximum and sum of every chunk (in greedy rows the argmax)
    resolve  per sequence: log-sum-exps, which tokens are accepted, where the row ends; if it ends with a
             rejection, the residual's mass in each chunk of that one position. The program that is the last
             to have stored its part of that mass draws: one random number chooses a chunk by its mass and
             then, after the chunk was read again, the token in it

Who is last differs from run to run, what comes out does not: every program of a sequence knows the same, each
chunk's mass has a place of its own, and they are added in one order. No probabilities and no float32 copy of
the logits are written to memory. Drawing a draft token is verifying a chain of length 0. `reference.py` is
the specification, and the results must be the same.

So much for rows that nothing filters. Where requests have limits, `fused_cut.py` finds what is left of the
rows first, which takes launches of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from .cuts import Cuts
from .philox import PROPOSE, RESAMPLE
from .verify_kernels import resolve, sweep

Drawn = tuple[Tensor, Tensor, Tensor]  # tokens, log-sum-exps, masses of the most likely tokens, each [B]


def verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    target_cuts: Cuts | None = None,
    draft_cuts: Cuts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `moedraft.kernels.verify_chain`; target_logits [B, K+1, V] or packed [rows, V]."""
    drafts = (draft_tokens, draft_logits, draft_lse, num_draft)
    with torch.cuda.device_of(target_logits):  # type: ignore[no-untyped-call]
        rows = VerifyRows(target_logits, *drafts, temperature, seed, position, target_cuts, draft_cuts)
        return _run(rows, None, None)


def sample_draft(
    logits: Tensor, temperature: Tensor | float, seed: Tensor, position: Tensor, cuts: Cuts | None = None
) -> Drawn:
    """See `moedraft.kernels.sample_draft`. A chain of length 0, with the random numbers for proposals."""
    nothing = torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    lse, top = (torch.empty(logits.shape[0], device=logits.device) for _ in range(2))
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        rows = VerifyRows(logits[:, None], nothing, None, None, None, temperature, seed, position, cuts, None)
        return _run(rows, lse, top)[0][:, 0], lse, top


def chunk_width(vocab: int) -> int:
    """Entries in a chunk. It depends on the vocabulary alone, so that answers do not depend on the batch."""
    return 4096 if vocab > 32768 else 1024 if vocab > 1024 else 256


def chunks_per_program(rows: int, chunks: int) -> int:
    """One while there are few chunks, since a GPU runs some thousand programs at once; then more."""
    total = rows * chunks
    return 1 if total <= 4096 else 2 if total <= 16384 else 4


class Swept(NamedTuple):
    """What `sweep` stores: for each chunk of the target's rows its maximum, sum and, greedy, argmax
    [rows, chunks], the same of the draft's rows, if they were swept, and the counters of arrivals [B]."""

    t_max: Tensor
    t_sum: Tensor
    t_arg: Tensor
    d_max: Tensor | None
    d_sum: Tensor | None
    arrivals: Tensor | None


class VerifyRows:
    """The arguments of one verification, where its rows begin, and the chunks into which they are divided."""

    def __init__(
        self,
        target: Tensor,
        tokens: Tensor,
        draft: Tensor | None,
        draft_lse: Tensor | None,
        num_draft: Tensor | None,
        temperature: Tensor | float,
        seed: Tensor,
        position: Tensor,
        target_cuts: Cuts | None,
        draft_cuts: Cuts | None,
    ) -> None:
        self.batch, self.length = tokens.shape
        self.device = target.device
        if not isinstance(temperature, Tensor):
            temperature = torch.full((self.batch,), temperature, device=target.device)
        if self.length == 0:
            draft = draft_lse = draft_cuts = None
        self.has_draft, self.has_lse = draft is not None, draft_lse is not None
        self._counts = None if num_draft is None else num_draft.contiguous()
        self._temperature = temperature.contiguous()
        lse = None if draft_lse is None else draft_lse.contiguous()
        self.inputs = (
            tokens.contiguous(), self._counts, lse, self._temperature, seed.contiguous(),
            position.contiguous(),
        )  # fmt: skip
        vocab = target.shape[-1]
        self.chunks = triton.cdiv(vocab, chunk_width(vocab))
        self.sizes = (vocab, self.chunks, self.length)
        target_starts, draft_starts = starts(target, self._counts)
        draft_strides = (0, 0, 0) if draft is None else strides(draft)
        self.logits = (target, *strides(target), target_starts, draft, *draft_strides, draft_starts)
        self.cuts = (*cut_arguments(target_cuts), *cut_arguments(draft_cuts))
        self._shared = shared_constants(vocab, target.dim() == 2, self._counts is not None)

    @property
    def constants(self) -> dict[str, int]:
        return {
            "HAS_DRAFT": self.has_draft,
            "HAS_LSE": self.has_lse,
            # with 2 a thread of `resolve` needs 175 registers (Triton 3.6), with 4 it needs 96
            "KP": max(4, triton.next_power_of_2(self.length + 1)),
            "NCP": max(2, triton.next_power_of_2(self.chunks)),
            **self._shared,
        }

    def sweep(self, *, drafting: bool) -> Swept:
        """One launch for the target's rows and, unless their log-sum-exps were given, the draft's."""
        both = self.has_draft and not self.has_lse
        rows, more = self.batch * (self.length + 1), self.batch * self.length if both else 0
        t_max, t_sum = self.new(rows), self.new(rows)
        d_max, d_sum = (self.new(more), self.new(more)) if both else (None, None)
        t_arg = self.new(rows, torch.int32)
        arrivals = None
        if self.has_draft:
            arrivals = torch.empty(self.batch, dtype=torch.int32, device=self.device)
        per = chunks_per_program(rows + more, self.chunks)
        found = Swept(t_max, t_sum, t_arg, d_max, d_sum, arrivals)
        sweep[(rows + more, triton.cdiv(self.chunks, per))](
            *self.logits, *self.cuts, self._counts, self._temperature, *found, *self.sizes, rows,
            PER=per, BOTH=both, SKIP_GREEDY_SUM=not drafting, **self._shared,
        )  # fmt: skip
        return found

    def new(self, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Room for a number of every chunk of so many rows."""
        return torch.empty((rows, self.chunks), dtype=dtype, device=self.device)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Room for tokens, num_accepted and status."""
        out = torch.empty((self.batch, self.length + 1), dtype=torch.int64, device=self.device)
        num_accepted = torch.empty(self.batch, dtype=torch.int64, device=self.device)
        return out, num_accepted, torch.empty(self.batch, dtype=torch.int32, device=self.device)


def _run(rows: VerifyRows, lse: Tensor | None, top: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Two launches. lse, top [B]: room for what `sample_draft` returns, when tokens are drafted."""
    results = rows.results()
    if rows.batch == 0:
        return results
    swept = rows.sweep(drafting=lse is not None)
    per = chunks_per_program(rows.batch, rows.chunks) if rows.has_draft else 1
    programs = triton.cdiv(rows.chunks, per) if rows.has_draft else 1
    mass = rows.new(rows.batch) if rows.has_draft else None
    resolve[(rows.batch, programs)](
        *rows.logits, *rows.cuts, *rows.inputs, *swept, mass, lse, top, *results, *rows.sizes, PER=per,
        PURPOSE=RESAMPLE if lse is None else PROPOSE, **rows.constants,
    )  # fmt: skip
    return results


def shared_constants(vocab: int, packed: bool, has_counts: bool) -> dict[str, int]:
    """What every kernel of a verification is compiled for."""
    width = chunk_width(vocab)
    return {
        "HAS_COUNTS": has_counts,
        "PACKED": packed,
        "CHUNK": width,
        "num_warps": 8 if width == 4096 else 4,
        # A fused multiply-add rounds once instead of twice, and which sums the compiler fuses depends on the
        # layout, which differs with the number of drafted tokens. Verdicts must not.
        "enable_fp_fusion": False,
    }


def cut_arguments(cuts: Cuts | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if cuts is None else (cuts.value.contiguous(), cuts.last.contiguous())


def strides(logits: Tensor) -> tuple[int, ...]:
    """Strides from sequence to sequence (0 where rows are packed), row to row, and entry to entry."""
    return (0, *logits.stride()) if logits.dim() == 2 else logits.stride()


def starts(target: Tensor, counts: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Where rows are packed: each sequence's first row in the target's and in the draft's logits."""
    if target.dim() == 3 or counts is None:
        return None, None
    draft = counts.cumsum(0) - counts
    return draft + torch.arange(counts.shape[0], device=counts.device), draft
