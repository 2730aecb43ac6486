"""What a verification is given: shapes and types checked, packed rows laid out as a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import check_devices


def check_chain(
    target: Tensor,
    tokens: Tensor,
    draft: Tensor | None,
    lse: Tensor | None,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
) -> None:
    """Check shapes and types. Values are not read, because the host would have to wait for the device."""
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"draft_tokens must be int64 [B, K], not {tokens.dtype} {list(tokens.shape)}.")
    batch, length = tokens.shape
    _check_target(target, batch, length, num_draft)
    if draft is not None:
        _check_draft_logits(draft, target, batch, length)
    if lse is not None and (draft is None or lse.shape != tokens.shape or not lse.is_floating_point()):
        raise ValueError("draft_lse must be floating [B, K], and comes with draft_logits.")
    _check_rows(batch, temperature, seed, position)
    check_devices(
        target, draft_tokens=tokens, draft_logits=draft, draft_lse=lse, num_draft=num_draft,
        temperature=temperature, seed=seed, position=position,
    )  # fmt: skip


def check_draft(logits: Tensor, temperature: Tensor | float, seed: Tensor, position: Tensor) -> None:
    """The same of what one token a row is drawn from."""
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating [B, V], not {logits.dtype} {list(logits.shape)}.")
    _check_rows(logits.shape[0], temperature, seed, position)
    check_devices(logits, temperature=temperature, seed=seed, position=position)


def _check_target(target: Tensor, batch: int, length: int, num_draft: Tensor | None) -> None:
    if target.dim() not in (2, 3) or not target.is_floating_point() or target.shape[-1] == 0:
        raise ValueError(
            f"target_logits must be floating [B, K+1, V], not {target.dtype} {list(target.shape)}."
        )
    if target.dim() == 2 and num_draft is None:
        raise ValueError("Packed target_logits [rows, V] need num_draft.")
    if target.dim() == 3 and target.shape[:2] != (batch, length + 1):
        raise ValueError(f"target_logits {list(target.shape)} must be [{batch}, {length + 1}, V] here.")
    if target.dim() == 2 and not batch <= target.shape[0] <= batch * (length + 1):
        raise ValueError(f"Packed target_logits {list(target.shape)} do not hold 1 to K+1 rows a sequence.")
    if num_draft is None:
        return
    integer = not num_draft.is_floating_point() and num_draft.dtype != torch.bool
    if not integer or num_draft.shape != (batch,):
        raise ValueError(
            f"num_draft must be of integers [{batch}], not {num_draft.dtype} {list(num_draft.shape)}."
        )


def _check_draft_logits(draft: Tensor, target: Tensor, batch: int, length: int) -> None:
    fits = draft.dim() == target.dim() and draft.shape[-1] == target.shape[-1]
    if not fits or not draft.is_floating_point():
        raise ValueError(
            f"draft_logits {draft.dtype} {list(draft.shape)} do not fit target_logits {list(target.shape)}."
        )
    if draft.dim() == 3 and draft.shape[:2] != (batch, length):
        raise ValueError(f"draft_logits {list(draft.shape)} must be [{batch}, {length}, V] here.")
    if draft.dim() == 2 and draft.shape[0] != target.shape[0] - batch:
        raise ValueError(
            f"Packed draft_logits must have {target.shape[0] - batch} rows, one a sequence fewer than "
            f"target_logits, not {draft.shape[0]}."
        )


def _check_rows(batch: int, temperature: Tensor | float, seed: Tensor, position: Tensor) -> None:
    """Of a shorter tensor a kernel would read what lies behind it, and a position's high bits need int64."""
    for name, given in (("seed", seed), ("position", position)):
        if given.dtype != torch.int64 or given.shape != (batch,):
            raise ValueError(f"{name} must be int64 [{batch}], not {given.dtype} {list(given.shape)}.")
    if not isinstance(temperature, Tensor):
        return
    if not temperature.is_floating_point() or temperature.shape != (batch,):
        shown = f"{temperature.dtype} {list(temperature.shape)}"
        raise ValueError(f"temperature must be a number or floating [{batch}], not {shown}.")


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
