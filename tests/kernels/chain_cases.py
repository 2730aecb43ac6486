"""Inputs for verification tests, an oracle that follows the text of the algorithm, and the χ² limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import philox


@dataclass
class Chain:
    """Arguments of one verification; tokens are drawn from the draft as the engine would draw them."""

    target: Tensor
    tokens: Tensor
    draft: Tensor | None
    temperature: Tensor
    seed: Tensor
    position: Tensor
    lse: Tensor | None = None
    num_draft: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    def run(
        self,
        backend: str,
        verify: Callable[..., tuple[Tensor, Tensor, Tensor]] = kernels.verify_chain,
        **changes: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        arguments = {
            "draft_lse": self.lse,
            "num_draft": self.num_draft,
            "temperature": self.temperature,
            "seed": self.seed,
            "position": self.position,
            **changes,
        }
        draft = arguments.pop("draft_logits", self.draft)
        target = arguments.pop("target_logits", self.target)
        tokens = arguments.pop("draft_tokens", self.tokens)
        return verify(target, tokens, draft, backend=backend, **arguments)


def make_chain(
    batch: int,
    length: int,
    vocab: int,
    *,
    device: str = "cpu",
    temperature: float | list[float] = 1.0,
    spread: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Chain:
    """`spread` is the noise that separates the draft's logits from the target's."""
    gen = torch.Generator().manual_seed(seed)
    target = torch.randn(batch, length + 1, vocab, generator=gen) * 2
    draft = (target[:, :length] + spread * torch.randn(batch, length, vocab, generator=gen)).to(dtype)
    values = [temperature] * batch if isinstance(temperature, float) else temperature
    temperatures = torch.tensor([values[i % len(values)] for i in range(batch)])
    seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=gen)
    position = torch.randint(0, 2**34, (batch,), generator=gen)
    drawn = [
        kernels.sample_draft(draft[:, j], temperatures, seeds, position + j, backend="reference")
        for j in range(length)
    ]
    tokens = (
        torch.stack([token for token, _, _ in drawn], 1)
        if drawn
        else torch.empty(batch, 0, dtype=torch.int64)
    )
    lse = torch.stack([lse for _, lse, _ in drawn], 1) if drawn else torch.empty(batch, 0)
    values_on = [t.to(device) for t in (target.to(dtype), tokens, draft, temperatures, seeds, position, lse)]
    return Chain(*values_on[:6], extra={"lse": values_on[6]})


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(left, right, strict=True))


def oracle(chain: Chain, row: int) -> tuple[list[int], int]:
    """One row, token by token, in float64 with Python's own arithmetic, as the definition reads."""
    temperature = float(chain.temperature[row])
    target = chain.target[row].double().cpu()
    length = chain.tokens.shape[1] if chain.num_draft is None else int(chain.num_draft[row])
    seed, position = (t[row : row + 1].cpu().numpy() for t in (chain.seed, chain.position))
    emitted: list[int] = []
    for j in range(length + 1):
        if temperature <= kernels.GREEDY_BELOW:
            best = int(target[j].argmax())
            emitted.append(best)
            if j == length or best != int(chain.tokens[row, j]):
                return emitted, j
            continue
        target_probs = torch.softmax(target[j] / temperature, -1)
        weights = target_probs
        if j < length:
            token = int(chain.tokens[row, j])
            draft_probs = torch.zeros_like(target_probs)
            draft_probs[token] = 1
            if chain.draft is not None:
                draft_probs = torch.softmax(chain.draft[row, j].double().cpu() / temperature, -1)
            u = float(philox.uniform_numpy(seed, position + j, philox.ACCEPT)[0])
            if u * float(draft_probs[token]) < float(target_probs[token]):
                emitted.append(token)
                continue
            residual = (target_probs - draft_probs).clamp(min=0)
            weights = residual if float(residual.sum()) > 0 else target_probs
        u = float(philox.uniform_numpy(seed, position + j, philox.RESAMPLE)[0])
        running = np.cumsum(weights.numpy())
        emitted.append(int(np.searchsorted(running, u * running[-1], side="right")))
        return emitted, j
    raise AssertionError("the last row always ends the chain")


def pack(chain: Chain, counts: Tensor) -> tuple[Tensor, Tensor | None]:
    """Padded logits as packed rows: of each sequence only those that count."""
    target = torch.cat([chain.target[i, : int(c) + 1] for i, c in enumerate(counts)])
    if chain.draft is None:
        return target, None
    return target, torch.cat([chain.draft[i, : int(c)] for i, c in enumerate(counts)])


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, int]:
    """Pearson's statistic of observed counts against probabilities, and its degrees of freedom."""
    expected = probs.double() * counts.sum()
    assert float(expected.min()) > 5
    return float(((counts.double() - expected) ** 2 / expected).sum()), counts.numel() - 1


def chi_square_limit(freedom: int, z: float = 4.75) -> float:
    """The quantile a sound sampler passes once in a million (Wilson and Hilferty, 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
