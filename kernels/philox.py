"""Counter-based random numbers: Philox 4x32-10, the key a request's seed, the counter (position, purpose).

There is no state: every number is a function of (seed, position, purpose) alone, so one seed gives one answer
in any batch. NumPy (for CPU tensors), torch (on any device) and `triton.language.philox` (in the fused
kernels) give the same bits. Knows nothing of tokens or logits.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 4.2.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

# the counter's third word: each purpose has random numbers of its own
PROPOSE, ACCEPT, RESAMPLE, ROUND, COUPLED, CANDIDATE = 1, 2, 3, 4, 5, 6
ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_SCALE = 2.0**-46

# NumPy layout: [2, streams] uint64 holding the even (c0, c2) or the odd (c1, c3) words of the state.
_NP_MULTIPLIERS = np.array(_MULTIPLIERS, dtype=np.uint64)[:, None]
_NP_LOW, _NP_9, _NP_23, _NP_32 = (np.uint64(value) for value in (_LOW, 9, 23, 32))
_NP_KEY_SCHEDULE = np.array([[r * step for step in _KEY_STEPS] for r in range(ROUNDS)], dtype=np.uint64)[
    :, :, None
]


def uniform(seed: Tensor, position: Tensor, purpose: Tensor | int) -> Tensor:
    """float64 in the open interval (0, 1), 46 random bits: ((w0 >> 9)·2^23 + (w1 >> 9) + ½)·2^-46.

    seed, position, purpose: int64, broadcast against one another; key = seed (its 64 bits), counter =
    (position low, position high, purpose, 0). Adding ½ excludes 0 and 1. With 46 bits instead of 52,
    u·total is below total however it is rounded, so that an inverse CDF cannot run past its last entry.
    """
    if seed.device.type == "cpu":
        stream = purpose.numpy() if isinstance(purpose, Tensor) else purpose
        return torch.from_numpy(uniform_numpy(seed.numpy(), position.numpy(), stream))
    words = philox_torch(seed, position, purpose)
    return ((words[0] >> 9) * 2**23 + (words[1] >> 9)).to(torch.float64).add_(0.5).mul_(_SCALE)


def chain_uniforms(seed: Tensor, position: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Accept uniforms [B, K] and resample uniforms [B, K+1] for position + 0 … K, in one call of Philox."""
    if seed.device.type == "cpu":
        purpose, offset = _chain_counters(length)
        u = torch.from_numpy(
            uniform_numpy(seed.numpy()[:, None], position.numpy()[:, None] + offset, purpose)
        )
    else:
        steps = torch.arange(2 * length + 1, device=seed.device)
        accept = steps < length
        counter = position[:, None] + torch.where(accept, steps, steps - length)
        u = uniform(seed[:, None], counter, torch.where(accept, ACCEPT, RESAMPLE))
    return u[:, :length], u[:, length:]


def round_seeds(seed: Tensor, position: Tensor) -> Tensor:
    """A seed int64 [B] for one round alone, from a request's seed and the position at which the round begins.

    Chain verification needs none: it never looks at a random number of a position that a later round emits,
    nor does anything that it decides depend on a token that it throws away. Block verification does both, so
    each of its rounds must have random numbers of its own, for drafting too.
    """
    if seed.device.type == "cpu":
        high, low = (
            torch.from_numpy(word.astype(np.int64))
            for word in philox_numpy(seed.numpy(), position.numpy(), ROUND)[:2]
        )
    else:
        high, low = philox_torch(seed, position, ROUND)[:2]
    return (high << 32) | low


@functools.lru_cache(maxsize=64)
def _chain_counters(length: int) -> tuple[np.ndarray, np.ndarray]:
    steps = np.arange(2 * length + 1)
    return np.where(steps < length, ACCEPT, RESAMPLE), np.where(steps < length, steps, steps - length)


def uniform_numpy(seed: np.ndarray, position: np.ndarray, purpose: np.ndarray | int) -> np.ndarray:
    """`uniform` for NumPy int64 arrays, which is much faster than torch for a handful of numbers."""
    word0, word1, _, _ = philox_numpy(seed, position, purpose)
    mantissa = ((word0 >> _NP_9) << _NP_23) + (word1 >> _NP_9)
    result: np.ndarray = (mantissa.astype(np.float64) + 0.5) * _SCALE
    return result


def philox_numpy(seed: np.ndarray, position: np.ndarray, purpose: np.ndarray | int) -> tuple[np.ndarray, ...]:
    """The four 32-bit output words as uint64 arrays, in few NumPy calls, since calls are what costs time."""
    shape = np.broadcast(seed, position, purpose).shape
    words = np.empty((6, *shape), dtype=np.uint64)  # c0, c2, c1, c3, key 0, key 1
    words[0], words[1], words[2] = position, purpose, position >> 32
    words[3], words[4], words[5] = 0, seed, seed >> 32
    words &= _NP_LOW
    words = words.reshape(6, -1)
    low, shift, multipliers = _constants(words.shape[1])
    even, odd = words[:2], words[2:4]
    for key in (words[4:] + _NP_KEY_SCHEDULE) & _NP_LOW:  # [2, streams] a round
        product = even * multipliers
        even = (product >> shift)[::-1] ^ odd ^ key
        odd = (product & low)[::-1]
    return tuple(word.reshape(shape) for word in (even[0], odd[0], even[1], odd[1]))


@functools.lru_cache(maxsize=64)
def _constants(count: int) -> tuple[np.ndarray, ...]:
    """Constants in the shape of the state: at these sizes broadcasting would double the time."""
    return (
        np.full((2, count), _NP_LOW),
        np.full((2, count), _NP_32),
        np.repeat(_NP_MULTIPLIERS, count, axis=1),
    )


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise, float64 [..., V], of seed and position [...]: a function of them and the token.

    −log(−log u) with u = (word + ½)·2^-32. Token t has word t mod 4 of the counter
    (position, COUPLED, t div 4).
    """
    quarter = torch.arange((vocab + 3) // 4, device=seed.device)
    words = philox_torch(seed[..., None], position[..., None], COUPLED, quarter)
    u = torch.stack(words, dim=-1).flatten(-2)[..., :vocab].double().add_(0.5).mul_(2.0**-32)
    return u.log_().neg_().log_().neg_()


def philox_torch(
    seed: Tensor, position: Tensor, purpose: Tensor | int, last: Tensor | int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four output words as int64 tensors in [0, 2^32), on any device and without synchronising.

    last: the counter's fourth word.
    """
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1 = position & _LOW, (position >> 32) & _LOW
    zero = (seed + position) * 0 + last * 0
    c0, c1, c2, c3 = zero + c0, zero + c1, zero + purpose, zero + last
    for _ in range(ROUNDS):
        # 32 x 32 -> 64 bits; int64 wraps, which leaves the low and the (masked) high word right
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((odd >> 32) & _LOW) ^ c1 ^ key0, ((even >> 32) & _LOW) ^ c3 ^ key1
        c1, c3 = odd & _LOW, even & _LOW
        key0, key1 = (key0 + _KEY_STEPS[0]) & _LOW, (key1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3
