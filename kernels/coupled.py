"""Coupled sampling in Triton: two kernels, and no waiting for the host.

    sweep_coupled  reads the logits once: of every chunk the best of logits/temperature + noise, and which
    choose         per sequence: each position's best, and how many drafted tokens are the same

The noise is computed where it is used, from (seed, position, token), and never stored. Drawing a draft token
is verifying a chain of length 0. `reference_coupled.py` is the specification. The tokens must be the same, so
that the noise and the sums are float64 as there: in float32 the two largest sums of a row would be taken for
one another about once in a hundred thousand tokens, and a seed would give another answer than on a CPU.

The two logarithms and the division per token cost more than reading the logits does; on a GPU with few units
for float64 (all but those for data centres) they take many times as long as chain verification.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .coupled_kernels import choose, sweep_coupled
from .cuts import Cuts
from .verify import Drawn, chunk_width, chunks_per_program, cut_arguments, shared_constants, starts, strides


def verify_coupled(
    target_logits: Tensor,
    draft_tokens: Tensor,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    cuts: Cuts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `moedraft.kernels.verify_coupled`; target_logits [B, K+1, V] or packed [rows, V]."""
    with torch.cuda.device_of(target_logits):  # type: ignore[no-untyped-call]
        return _run(target_logits, cuts, draft_tokens, num_draft, temperature, seed, position, None)


def sample_coupled(
    logits: Tensor, temperature: Tensor | float, seed: Tensor, position: Tensor, cuts: Cuts | None = None
) -> Drawn:
    """See `moedraft.kernels.sample_coupled`. logits [B, V]."""
    nothing = torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    lse, top = (torch.empty(logits.shape[0], device=logits.device) for _ in range(2))
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        tokens, _, _ = _run(logits[:, None], cuts, nothing, None, temperature, seed, position, (lse, top))
    return tokens[:, 0], lse, top


def _run(
    logits: Tensor,
    cuts: Cuts | None,
    tokens: Tensor,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    wanted: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Two launches. wanted, [B] each: room for log-sum-exps and masses, when tokens are drafted."""
    batch, length = tokens.shape
    out = torch.empty((batch, length + 1), dtype=torch.int64, device=logits.device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=logits.device)
    status = torch.empty(batch, dtype=torch.int32, device=logits.device)
    if batch == 0:
        return out, num_accepted, status
    if not isinstance(temperature, Tensor):  # the reference divides by the number as it is given
        temperature = torch.full((batch,), temperature, dtype=torch.float64, device=logits.device)
    counts = None if num_draft is None else num_draft.contiguous()
    vocab, rows = logits.shape[-1], batch * (length + 1)
    chunks = triton.cdiv(vocab, chunk_width(vocab))
    shared = shared_constants(vocab, logits.dim() == 2, counts is not None)
    per = chunks_per_program(rows, chunks)
    found = _room(rows, chunks, wanted is not None, logits.device)
    sweep_coupled[(rows, triton.cdiv(chunks, per))](
        logits, *strides(logits), starts(logits, counts)[0], *cut_arguments(cuts), counts,
        temperature.contiguous(), seed.contiguous(), position.contiguous(), *found, vocab, chunks, length,
        PER=per, WANT_LSE=wanted is not None, **shared,
    )  # fmt: skip
    choose[(batch,)](
        tokens.contiguous(), counts, *found, *(wanted or (None, None)), out, num_accepted, status,
        vocab, chunks, length, WANT_LSE=wanted is not None, HAS_COUNTS=counts is not None,
        KP=max(2, triton.next_power_of_2(length + 1)), NCP=max(2, triton.next_power_of_2(chunks)),
    )  # fmt: skip
    return out, num_accepted, status


def _room(rows: int, chunks: int, want_lse: bool, device: torch.device) -> tuple[Tensor | None, ...]:
    """For each chunk: its best sum and the token; and, for the log-sum-exp, its maximum and its sum."""
    shape = (rows, chunks)
    best = torch.empty(shape, dtype=torch.float64, device=device)
    token = torch.empty(shape, dtype=torch.int32, device=device)
    if not want_lse:
        return best, token, None, None
    return best, token, torch.empty(shape, device=device), torch.empty(shape, device=device)
