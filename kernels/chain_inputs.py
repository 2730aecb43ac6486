"""What a verification is given: shapes and types checked, packed rows laid out as a batch."""

from __future__ import annotations

import torch
from torch import Tensor


def check_chain(
    target: Tensor,
    tokens: Tensor,
    draft: Tensor | None,
    lse: Tensor | None,
    num_draft: Tensor | None,
    packed: bool,
) -> None:
    """Check shapes and types. Values are not read, because the host would have to wait for the device."""
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"draft_tokens must be int64 [B, K], not {tokens.dtype} {list(tokens.shape)}.")
    batch, length = tokens.shape
    if target.dim() not in (2, 3) or not target.is_floating_point() or target.shape[-1] == 0:
        raise ValueError(
            f"target_logits must be floating [B, K+1, V], not {target.dtype} {list(target.shape)}."
        )
    if packed and num_draft is None:
        raise ValueError("Packed target_logits [rows, V] need num_draft.")
    if not packed and target.shape[:2] != (batch, length + 1):
        raise ValueError(f"target_logits {list(target.shape)} must be [{batch}, {length + 1}, V] here.")
    if draft is not None and (draft.dim() != target.dim() or draft.shape[-1] != target.shape[-1]):
        raise ValueError(f"draft_logits {list(draft.shape)} do not fit target_logits {list(target.shape)}.")
    if draft is not None and not packed and draft.shape[:2] != (batch, length):
        raise ValueError(f"draft_logits {list(draft.shape)} must be [{batch}, {length}, V] here.")
    if lse is not None and (draft is None or lse.shape != tokens.shape):
        raise ValueError("draft_lse must be [B, K], and comes with draft_logits.")
    if num_draft is not None and num_draft.shape != (batch,):
        raise ValueError(f"num_draft must be [{batch}], not {list(num_draft.shape)}.")


def check_draft(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating [B, V], not {logits.dtype} {list(logits.shape)}.")


def padded(
    target: Tensor, tokens: Tensor, draft: Tensor | None, num_draft: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Packed logits as [B, K+1, V] and [B, K, V]."""
    assert num_draft is not None
    length = tokens.shape[1]
    drafted = None if draft is None else _unpack(draft, num_draft, length)
    return _unpack(target, num_draft + 1, length + 1), drafted


def _unpack(rows: Tensor, counts: Tensor, width: int) -> Tensor:
    """[Σ counts, V] → [B, width, V]. Positions behind a count hold other rows and are never used."""
    starts = counts.cumsum(0) - counts
    index = starts[:, None] + torch.arange(width, device=rows.device)
    if rows.shape[0] == 0:
        return rows.new_zeros(*index.shape, rows.shape[1])
    return rows[index.clamp(max=rows.shape[0] - 1)]
