"""Ways to run a small model on a CPU faster, and the one question whether they are used.

A step of a small model on a CPU costs little arithmetic: calling operations, reading weights and tending
memory decide. What is in this package exists only for that, gives the results of plainer code up to rounding,
and each module's docstring names that plainer code. The setting `cpu_fast_paths` turns all of it off.

| module | what it does |
|---|---|
| `products` | keeps weights in layouts that oneDNN multiplies faster |
| `lean` | runs a Llama-like model with fewer operations than transformers does |
| `groups` | drafts a batch of several experts expert by expert |
| `threads` | runs a small model on one thread |
| `memory` | keeps the C library and Python's garbage collector from slowing down a server |
"""

from __future__ import annotations

from typing import Protocol

import torch

SMALL = 50_000_000  # parameters: up to here reading the weights costs little, and second copies fit in memory


class Model(Protocol):
    """What the decision depends on; `LanguageModel` has it."""

    cpu_fast_paths: bool
    num_parameters: int

    @property
    def device(self) -> torch.device: ...


def allows(model: Model) -> bool:
    """Whether `model` may use what helps models of any size: it runs on a CPU and the setting is on."""
    return model.cpu_fast_paths and model.device.type == "cpu"


def suits(model: Model) -> bool:
    """Whether `model` may use what helps small models only: it is allowed to, and it is small."""
    return allows(model) and model.num_parameters <= SMALL
