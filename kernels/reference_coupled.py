"""Coupled sampling in plain PyTorch: draft and target choose their tokens with the same random numbers.

The token at a position is the argmax of logits/temperature + Gumbel noise, which is distributed as the
softmax; the noise is a function of (seed, position, token) alone. The draft guesses with the noise that the
target will choose with, and a guess is right where both choose the same token. What is emitted is always the
target's own choice: a seed fixes the answer, whatever the draft, its version and its length. Daliri et al.,
"Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978: drafts are
accepted with a probability of at least (1 − D)/(1 + D), with D the total variation distance, where a chain
accepts 1 − D, and no rule that is told nothing of the other side can promise more. Knows logits, tokens and
seeds only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .philox import gumbel
from .reference import Verdict, computed, drafted_rows, greedy_rows, verify_greedy


def verify_coupled(
    target_logits: Tensor,
    draft_tokens: Tensor,
    num_draft: Tensor | None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
) -> Verdict:
    """See `moedraft.kernels.verify_coupled`; the logits here are padded, [B, K+1, V]."""
    drafted = drafted_rows(draft_tokens, num_draft)
    if greedy_rows(temperature) is not True:
        steps = torch.arange(drafted.shape[1], device=position.device)
        where = position[:, None] + steps
        target_logits = noisy(target_logits, temperature, seed[:, None].expand_as(where), where)
    return verify_greedy(target_logits, drafted)


def sample_coupled(
    logits: Tensor, temperature: Tensor | float, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `moedraft.kernels.sample_coupled`. logits [B, V]."""
    greedy = greedy_rows(temperature)
    chosen = logits if greedy is True else noisy(logits, temperature, seed, position)
    value, tokens = chosen.max(dim=-1)
    scaled = computed(logits)
    if greedy is not True:
        scaled = scaled / _divisors(temperature, logits).to(scaled.dtype)
    lse = torch.logsumexp(scaled, dim=-1).to(torch.float32)
    top = (scaled.amax(dim=-1) - lse).exp_().to(torch.float32)
    valid = value.isfinite()
    return tokens.where(valid, 0), lse.where(valid, torch.nan), top.where(valid, torch.nan)


def noisy(logits: Tensor, temperature: Tensor | float, seed: Tensor, position: Tensor) -> Tensor:
    """logits [B, ..., V] → what tokens are chosen by, float64; of greedy rows the logits.

    seed, position [B, ...]. The noise is finite, so that −inf, NaN and +inf stay what they are.
    """
    noise = gumbel(seed, position, logits.shape[-1])
    greedy = greedy_rows(temperature)
    if isinstance(greedy, Tensor):
        noise = noise.masked_fill(greedy.view(-1, *[1] * (logits.dim() - 1)), 0)
    return noise.add_(logits.double() / _divisors(temperature, logits))


def _divisors(temperature: Tensor | float, logits: Tensor) -> Tensor:
    """Temperatures float64 [B, 1, ...], 1 for greedy rows."""
    if not isinstance(temperature, Tensor):
        # not torch.tensor, which would copy a number from the host and wait for the device
        return torch.full((), temperature, dtype=torch.float64, device=logits.device)
    greedy = greedy_rows(temperature)
    wide = temperature.double()
    if isinstance(greedy, Tensor):
        wide = wide.masked_fill(greedy, 1.0)
    return wide.view(-1, *[1] * (logits.dim() - 1))
