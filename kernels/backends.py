"""Which of the two versions of a function runs: the one in PyTorch or the one in Triton."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

from torch import Tensor

Backend = Literal["auto", "reference", "triton"]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def use_triton(backend: str, logits: Tensor) -> bool:
    """Raises ValueError for a backend that is unknown or does not fit the logits' device."""
    if backend not in ("auto", "reference", "triton"):
        raise ValueError(f'backend must be "auto", "reference" or "triton", not {backend!r}.')
    if backend == "triton" and not HAS_TRITON:
        raise ValueError('backend="triton" needs the package triton; install moedraft[triton].')
    if backend == "triton" and not logits.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError('backend="triton" needs tensors on a CUDA device.')
    return backend == "triton" or (backend == "auto" and logits.is_cuda and HAS_TRITON)


def check_devices(logits: Tensor, **given: object) -> None:
    """Raises ValueError for a tensor that lies elsewhere than the logits; a kernel would read wild memory."""
    for name, part in given.items():
        if isinstance(part, Tensor) and part.device != logits.device:
            raise ValueError(f"{name} must be where the logits are, on {logits.device}, not {part.device}.")
