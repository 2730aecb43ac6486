"""What stands for CUDA's events, graphs and generator in tests of the kernel benchmark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Event:
    """A CUDA event that asks the processor's clock."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1e3


class Graph:
    """Runs nothing when it is replayed."""

    def replay(self) -> None:
        return None


class Refusing(TorchFunctionMode):
    """Refuses what makes the host wait for the device, as a capture does."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        copied = function is torch.tensor and "device" in (kwargs or {})
        if copied or function in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu):
            raise RuntimeError("operation not permitted when stream is capturing")
        return function(*args, **(kwargs or {}))


class Device:
    """What a failed capture leaves: the default generator raises, whoever asks it, until a new process."""

    def __init__(self) -> None:
        self.broken = False
        self.randn = torch.randn

    @contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        try:
            with Refusing():
                yield
        except RuntimeError:
            self.broken = True
            raise

    def guarded(self, *size: Any, generator: torch.Generator | None = None, **rest: Any) -> torch.Tensor:
        if self.broken and generator is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        return self.randn(*size, generator=generator, **rest)
