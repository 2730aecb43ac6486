"""On which device and in which precision a model runs."""

from __future__ import annotations

import torch

from moedraft.core import InvalidRequest


def pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequest(f"device {device!r} is not usable here: {str(error).splitlines()[0]}") from error
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """float32 on a CPU, where half precision is slower and greedy ties matter; else the checkpoint's own."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen
