"""The weights of an adapter, averaged over the last steps of its training.

Steps on a dozen records each move a small adapter to and fro; the average over some dozens of them guesses
better than the weights at any one step (Polyak and Juditsky 1992). Training goes on from the weights
themselves. The averages are kept beside the optimiser's own moments, so that whatever becomes of those
becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

AVERAGE = "average"  # in the optimiser's state of each parameter
DECAY = 0.97  # of what the average was, at each step …
FEW = 10  # … and less at an adapter's first steps, of which the earliest tell nothing


@torch.no_grad()
def follow(optimiser: torch.optim.Optimizer) -> None:
    """Take the weights as they are after a step of this optimiser into their averages."""
    for known in _states(optimiser):
        parameter, state = known
        if AVERAGE not in state:
            state[AVERAGE] = parameter.detach().clone()
        done = float(state["step"])
        decay = min(DECAY, (1 + done) / (FEW + done))
        state[AVERAGE].lerp_(parameter, 1 - decay)


@contextmanager
def averaged(optimisers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Within it the weights are their averages, and nothing may learn; afterwards they are what they were."""
    chosen = [pair for optimiser in optimisers for pair in _states(optimiser) if AVERAGE in pair[1]]
    _exchange(chosen)
    try:
        yield
    finally:
        _exchange(chosen)


def _states(
    optimiser: torch.optim.Optimizer,
) -> list[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """The parameters that have made a step, and what the optimiser knows of them."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    return [(p, optimiser.state[p]) for p in parameters if optimiser.state.get(p)]


def _exchange(chosen: list[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]) -> None:
    for parameter, state in chosen:
        parameter.data, state[AVERAGE] = state[AVERAGE], parameter.data
