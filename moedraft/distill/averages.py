"""An optimiser that keeps, beside the weights of an adapter, their average over its last steps.

Steps on a dozen records each move a small adapter to and fro; the average over some dozens of steps guesses
better than the weights at any one step (Polyak and Juditsky 1992). Training goes on from the weights
themselves. The averages are part of the optimiser's state, and are kept and dropped with it.

What is published may also be weaker than what was learned, which is a step back towards the draft base, as in
WiSE-FT (Wortsman et al., arXiv 2109.01903).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

AVERAGE = "average"  # in the optimiser's state of each parameter
DECAY = 0.97  # weight of the old average at each step
FEW = 10  # a new adapter's average forgets its first steps, about this many, which tell little
SHORT = 8  # warm-up steps of an adapter that was trained before, until Adam's statistics are of use


class AveragingAdamW(torch.optim.AdamW):
    """AdamW for one adapter.

    settled: the adapter was trained before, so its average begins where it is. It forgets that within a dozen
    steps, so that what a trainer learns right after its start is to be seen in that update's candidate.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, settled: bool) -> None:
        super().__init__(parameters, weight_decay=0.0, fused=True)
        self.settled = settled

    @property
    def rate(self) -> float:
        """What the learning rate of the next step is to be multiplied by."""
        done = max((float(state["step"]) for _, state in self._moved()), default=0.0)
        return min(1.0, (done + 1) / SHORT) if self.settled else 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step, and then update the averages with the new weights."""
        assert closure is None, "a step has its gradients already"
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() if self.settled and not self.state.get(p) else p for p in parameters]
        super().step()
        for parameter, first in zip(parameters, before, strict=True):
            state = self.state[parameter]
            if AVERAGE not in state:
                state[AVERAGE] = first.detach().clone()
            done = float(state["step"])
            done += FEW - 1 if self.settled else 0  # as if it had made some steps already
            decay = min(DECAY, (1 + done) / (FEW + done))
            state[AVERAGE].lerp_(parameter, 1 - decay)

    def exchange(self) -> None:
        """Swap the weights with their averages."""
        for parameter, state in self._moved():
            parameter.data, state[AVERAGE] = state[AVERAGE], parameter.data

    def _moved(self) -> list[tuple[nn.Parameter, dict[str, torch.Tensor]]]:
        """The parameters that have made a step, with their optimiser states."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return [(p, self.state[p]) for p in parameters if self.state.get(p)]


@contextmanager
def averaged(optimisers: Iterable[AveragingAdamW]) -> Iterator[None]:
    """Use the averages as weights within the block, where nothing may learn; then restore the weights."""
    chosen = list(optimisers)
    for optimiser in chosen:
        optimiser.exchange()
    try:
        yield
    finally:
        for optimiser in chosen:
            optimiser.exchange()


@contextmanager
def weakened(factors: Iterable[nn.Parameter], strength: float) -> Iterator[None]:
    """Use `strength` times these factors B of low-rank terms within the block, where nothing may learn."""
    whole = [(factor, factor.data) for factor in factors] if strength != 1 else []
    try:
        for factor, data in whole:
            factor.data = strength * data
        yield
    finally:
        for factor, data in whole:
            factor.data = data
