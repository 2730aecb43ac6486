"""Ways to run a model on a CPU faster, and the question whether they are used for a model.

There a step of a small model costs little arithmetic: calling operations, reading weights and managing
memory take the time. What is in this package exists only for CPUs and gives the results of plainer code up to
rounding; each module's docstring names that plainer code. The setting `cpu_fast_paths` turns all of it off.

| module | what it does |
|---|---|
| `products` | keeps weights in layouts that oneDNN or FBGEMM multiplies faster |
| `lean` | runs a small Llama-like model with fewer operations than transformers does |
| `steady` | runs a larger Llama-like model, rounded to fewer bytes where that is exact |
| `steady.attention` | adds in an order that does not depend on what is computed together |
| `steady.independence` | finds out whether that is so for a whole model on the CPU at hand |
| `feature_layer` | runs a feature drafter |
| `compiled` | small operations, compiled by Numba, for `steady` and `feature_layer` |
| `optional` | what to do where Numba is missing |
| `huge_pages` | puts weights into large memory pages, which are read faster |
| `groups` | drafts a batch of several experts expert by expert |
| `threads` | runs a small model on one thread, and what works beside the engine as well |
| `memory` | keeps the C library and Python's garbage collector from slowing down a server |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

SMALL = 50_000_000  # parameters: up to here reading the weights costs little, and second copies fit in memory


class SizedModel(Protocol):
    """What the decision depends on; `LanguageModel` has it."""

    cpu_fast_paths: bool
    num_parameters: int

    @property
    def device(self) -> torch.device: ...


def allows(model: SizedModel) -> bool:
    """Whether `model` may use what helps models of any size: it runs on a CPU and the setting is on."""
    return model.cpu_fast_paths and model.device.type == "cpu"


def suits(model: SizedModel) -> bool:
    """Whether `model` may use what helps small models only: it is allowed to, and it is small."""
    return allows(model) and model.num_parameters <= SMALL
