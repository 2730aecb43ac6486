"""Averages of weights: near to all late steps, exchanged for the weights and back."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from moedraft.distill.averages import AVERAGE, DECAY, FEW, SHORT, AveragingAdamW, averaged


def stepped(
    steps: int, seed: int = 0, *, settled: bool = False
) -> tuple[nn.Parameter, AveragingAdamW, list[torch.Tensor]]:
    """A parameter that was pulled to and fro, its optimiser, and where it was before and after each step."""
    noise = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimiser = AveragingAdamW([parameter], settled=settled)
    seen = [parameter.detach().clone()]
    for _ in range(steps):
        parameter.grad = parameter.detach() - 1 + 3 * torch.randn(3, 2, generator=noise)
        optimiser.param_groups[0]["lr"] = 0.1
        optimiser.step()
        seen.append(parameter.detach().clone())
    return parameter, optimiser, seen


def test_the_average_of_a_new_adapter_soon_forgets_its_first_steps() -> None:
    parameter, optimiser, (_, *seen) = stepped(6)
    expected = seen[0]
    for number, weights in enumerate(seen, start=1):
        decay = min(DECAY, (1 + number) / (FEW + number))
        expected = decay * expected + (1 - decay) * weights
    torch.testing.assert_close(optimiser.state[parameter][AVERAGE], expected)


def test_the_average_of_one_that_was_trained_before_begins_where_it_is() -> None:
    parameter, optimiser, (expected, *seen) = stepped(6, settled=True)
    for number, weights in enumerate(seen, start=1):
        decay = min(DECAY, (FEW + number) / (2 * FEW - 1 + number))
        expected = decay * expected + (1 - decay) * weights
    torch.testing.assert_close(optimiser.state[parameter][AVERAGE], expected)


def test_an_update_after_a_start_shows_in_its_average() -> None:
    """Else each update of a trainer that is started anew would publish hardly anything of what it learned."""
    parameter = nn.Parameter(torch.zeros(4))
    optimiser = AveragingAdamW([parameter], settled=True)
    for _ in range(16):
        parameter.grad = -torch.ones(4)
        optimiser.param_groups[0]["lr"] = 0.1 * optimiser.rate
        optimiser.step()
    with averaged([optimiser]):
        moved = parameter.detach().clone()
    assert (moved > 0.6 * parameter.detach()).all()


def test_its_first_steps_are_short() -> None:
    rates = [stepped(number, settled=True)[1].rate for number in (0, 1, SHORT - 1, 50)]
    assert rates == [1 / SHORT, 2 / SHORT, 1.0, 1.0]
    assert stepped(0)[1].rate == 1.0


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
    parameter, optimiser, _ = stepped(0)
    optimiser.step()  # without a gradient
    with averaged([optimiser]):
        assert torch.equal(parameter, torch.zeros(3, 2))
    assert not optimiser.state
