"""What top-k, top-p and min-p leave of rows of logits, in eight bytes a row."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .backends import check_devices

Given = TypeVar("Given", Tensor, Tensor | None)
NO_LAST = 2**31 - 1  # all of the tokens that equal the value are left


class Cuts(NamedTuple):
    """Left are the logits above `value`, and of those equal to it the ones of the tokens up to `last`."""

    value: Tensor  # float32 [...], one for each row of logits [..., V]; −inf where nothing is excluded
    last: Tensor  # int32 [...]

    def without(self, rows: list[int], width: int) -> Cuts:
        """A copy of [B, K] as [B, width] that excludes nothing of these rows, nor of what was not there."""
        more = (0, width - self.value.shape[1])
        value = torch.nn.functional.pad(self.value, more, value=-torch.inf)
        last = torch.nn.functional.pad(self.last, more, value=NO_LAST)
        value[rows], last[rows] = -torch.inf, NO_LAST
        return Cuts(value, last)


def apply_cuts(logits: Given, cuts: Cuts | None) -> Given:
    """Logits [..., V] with −inf for what is excluded; a NaN is not."""
    if cuts is None or logits is None:
        return logits
    vocab = logits.shape[-1]
    rows, value, last = logits.detach().reshape(-1, vocab), cuts.value.flatten(), cuts.last.flatten()
    wide = rows.float()
    drop = wide < value[:, None]
    if rows.device.type == "cpu":  # few rows exclude some of their equal logits only
        some = (last < vocab - 1).nonzero()[:, 0]
        if len(some):
            drop[some] |= _late(wide[some], value[some], last[some])
    else:
        drop |= _late(wide, value, last)
    return rows.masked_fill(drop, -torch.inf).view(logits.shape)


def _late(rows: Tensor, value: Tensor, last: Tensor) -> Tensor:
    index = torch.arange(rows.shape[1], device=rows.device, dtype=torch.int32)
    return (rows == value[:, None]) & (index > last[:, None])


def check_cuts(logits: Tensor | None, cuts: Cuts | None, name: str) -> None:
    """Check shapes and types."""
    if cuts is None:
        return
    if logits is None:
        raise ValueError(f"{name} come with logits.")
    if not cuts.value.shape == cuts.last.shape == logits.shape[:-1]:
        raise ValueError(f"{name} {list(cuts.value.shape)} must have an entry for each row of the logits.")
    if (cuts.value.dtype, cuts.last.dtype) != (torch.float32, torch.int32):
        raise ValueError(f"{name} must be float32 and int32, not {cuts.value.dtype} and {cuts.last.dtype}.")
    check_devices(logits, **{f"{name}.value": cuts.value, f"{name}.last": cuts.last})


def check_limits(logits: Tensor, limits: dict[str, Tensor | None]) -> None:
    """Limits [B] of sequences whose logits are [B, V] or [B, T, V]."""
    if logits.dim() not in (2, 3) or not logits.is_floating_point() or logits.shape[-1] == 0:
        raise ValueError(
            f"logits must be floating [B, V] or [B, T, V], not {logits.dtype} {list(logits.shape)}."
        )
    for name, limit in limits.items():
        if limit is None:
            continue
        wanted = "int64" if name == "top_k" else "floating"
        if not isinstance(limit, Tensor):
            raise ValueError(f"{name} must be a tensor, {wanted} [{logits.shape[0]}], not {limit!r}.")
        fits = limit.dtype == torch.int64 if name == "top_k" else limit.is_floating_point()
        if not fits or limit.shape != logits.shape[:1]:
            shown = f"{limit.dtype} {list(limit.shape)}"
            raise ValueError(f"{name} must be {wanted} [{logits.shape[0]}], not {shown}.")
    check_devices(logits, **limits)
