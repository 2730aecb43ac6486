"""An optimiser that keeps, beside the weights of an adapter, their average over its last steps.

Steps on a dozen records each move a small adapter to and fro; the average over some dozens of them guesses
better than the weights at any one step (Polyak and Juditsky 1992). Training goes on from the weights
themselves. The averages are kept in the optimiser's state: whatever becomes of that becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

AVERAGE = "average"  # in the optimiser's state of each parameter
DECAY = 0.97  # of what the average was, at each step
FEW = 10  # steps that a new adapter's average soon forgets, since the first ones tell nothing
SHORT = 8  # first steps of an adapter that was trained before: what Adam knows of it is not much yet


class AveragingAdamW(torch.optim.AdamW):
    """AdamW for one adapter. settled: the adapter was trained before, so its average begins where it is."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, settled: bool, weight_decay: float) -> None:
        super().__init__(parameters, weight_decay=weight_decay, fused=True)
        self.settled = settled

    @property
    def rate(self) -> float:
        """What the learning rate of the next step is to be multiplied by."""
        done = max((float(state["step"]) for _, state in self._moved()), default=0.0)
        return min(1.0, (done + 1) / SHORT) if self.settled else 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, and the weights as they are then go into their averages."""
        assert closure is None, "a step has its gradients already"
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() if self.settled and not self.state.get(p) else p for p in parameters]
        super().step()
        for parameter, first in zip(parameters, before, strict=True):
            state = self.state[parameter]
            if AVERAGE not in state:
                state[AVERAGE] = first.detach().clone()
            done = float(state["step"])
            decay = DECAY if self.settled else min(DECAY, (1 + done) / (FEW + done))
            state[AVERAGE].lerp_(parameter, 1 - decay)

    def exchange(self) -> None:
        """Put the averages in the place of the weights, and these where the averages were."""
        for parameter, state in self._moved():
            parameter.data, state[AVERAGE] = state[AVERAGE], parameter.data

    def _moved(self) -> list[tuple[nn.Parameter, dict[str, torch.Tensor]]]:
        """The parameters that have made a step, and what is known of them."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return [(p, self.state[p]) for p in parameters if self.state.get(p)]


@contextmanager
def averaged(optimisers: Iterable[AveragingAdamW]) -> Iterator[None]:
    """Within it the weights are their averages, and nothing may learn; afterwards they are what they were."""
    chosen = list(optimisers)
    for optimiser in chosen:
        optimiser.exchange()
    try:
        yield
    finally:
        for optimiser in chosen:
            optimiser.exchange()
