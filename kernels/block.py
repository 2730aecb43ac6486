"""Block verification in Triton: two kernels, and no waiting for the host.

    sweep  chain verification's: maximum and sum of every chunk, of the target and, if needed, of the draft
    judge  the kept shares, and the mass of each position's residual in each chunk. The program that is the
           last of a sequence to have stored its part chooses the longest accepted prefix and draws the token
           after it, as chain verification does

A draft that is certain has residuals whose mass is known without reading: then one program per sequence does
all of it. Where a share is zero, as after a token that the target excludes, nothing is read any more.
`reference_block.py` is the specification, and the results must be the same.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import verify
from .block_kernels import judge
from .cuts import Cuts
from .verify import VerifyRows, chunks_per_program


def verify_block(
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
    """See `moedraft.kernels.verify_block`; target_logits [B, K+1, V] or packed [rows, V]."""
    drafts = (draft_tokens, draft_logits, draft_lse, num_draft)
    if draft_tokens.shape[1] == 0:
        return verify.verify_chain(target_logits, *drafts, temperature, seed, position, target_cuts)
    with torch.cuda.device_of(target_logits):  # type: ignore[no-untyped-call]
        return _run(VerifyRows(target_logits, *drafts, temperature, seed, position, target_cuts, draft_cuts))


def _run(rows: VerifyRows) -> tuple[Tensor, Tensor, Tensor]:
    results = rows.results()
    if rows.batch == 0:
        return results
    swept = rows.sweep(drafting=False)
    positions = rows.batch * rows.length
    per = chunks_per_program(positions, rows.chunks) if rows.has_draft else 1
    programs = (triton.cdiv(rows.chunks, per), rows.length) if rows.has_draft else (1, 1)
    mass = rows.new(positions) if rows.has_draft else None
    judge[(rows.batch, *programs)](
        *rows.logits, *rows.cuts, *rows.inputs, *swept, mass, *results, *rows.sizes, PER=per,
        **rows.constants,
    )  # fmt: skip
    return results
