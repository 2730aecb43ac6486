"""Adaptive speculative decoding: LoRA draft experts that learn from the traffic they serve.

import moedraft
with moedraft.load(target="mini", draft="mini") as engine:
    [answer] = engine.generate("What is a list comprehension?", moedraft.SamplingParams(max_tokens=64))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moedraft.core import (
    InvalidRequest,
    MoedraftError,
    RequestOutput,
    SamplingParams,
    StorageError,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from moedraft.engine.engine import Engine
    from moedraft.system.build import load

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "InvalidRequest",
    "MoedraftError",
    "RequestOutput",
    "SamplingParams",
    "StorageError",
    "UnsupportedModel",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    """`Engine` and `load` pull in torch and transformers, so they come when they are asked for."""
    if name == "load":
        from moedraft.system.build import load

        return load
    if name == "Engine":
        from moedraft.engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'moedraft' has no attribute {name!r}")
