"""Averages of weights: near to all late steps, exchanged for the weights and back."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from moedraft.distill.joint.averages import AVERAGE, DECAY, averaged, follow


def stepped(steps: int, seed: int = 0) -> tuple[nn.Parameter, torch.optim.Optimizer, list[torch.Tensor]]:
    """A parameter that was pulled to and fro, its optimiser, and where it was after each step."""
    noise = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimiser = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    seen = []
    for _ in range(steps):
        parameter.grad = parameter.detach() - 1 + 3 * torch.randn(3, 2, generator=noise)
        optimiser.step()
        follow(optimiser)
        seen.append(parameter.detach().clone())
    return parameter, optimiser, seen


def test_the_average_is_weighted_as_it_says() -> None:
    parameter, optimiser, seen = stepped(6)
    expected = seen[0]
    for number, weights in enumerate(seen, start=1):
        decay = min(DECAY, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * weights
    torch.testing.assert_close(optimiser.state[parameter][AVERAGE], expected)


def test_it_is_nearer_to_where_the_weights_belong_than_they_are() -> None:
    errors = []
    for seed in range(20):
        parameter, optimiser, _ = stepped(200, seed)
        with averaged([optimiser]):
            average = parameter.detach().clone()
        errors.append([float((one - 1).square().mean()) for one in (parameter.detach(), average)])
    steps, averages = torch.tensor(errors).mean(0).tolist()
    assert averages < 0.8 * steps


def test_afterwards_the_weights_are_what_they_were() -> None:
    parameter, optimiser, seen = stepped(5)
    kept = optimiser.state[parameter][AVERAGE].clone()
    with suppress(KeyboardInterrupt), averaged([optimiser]):
        assert torch.equal(parameter, kept)
        raise KeyboardInterrupt
    assert torch.equal(parameter, seen[-1])
    assert torch.equal(optimiser.state[parameter][AVERAGE], kept)


def test_what_has_made_no_step_stays() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    optimiser = torch.optim.AdamW([parameter])
    follow(optimiser)
    with averaged([optimiser]):
        assert torch.equal(parameter, torch.ones(2, 2))
    assert not optimiser.state
