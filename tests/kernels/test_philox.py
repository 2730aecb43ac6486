"""Philox: known answers, the same bits in every implementation, uniforms strictly inside (0, 1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from moedraft.kernels import philox
from moedraft.kernels.primitives import uniform as fused_uniform


def words(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox 4x32-10 in Python's integers, written from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right & 0xFFFFFFFF, (left >> 32) ^ c[3] ^ k[1], left & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_published_answers_come_out(counter: tuple[int, ...], key: tuple[int, int], expected: str) -> None:
    """The vectors that come with Random123, which hold the implementation below to the standard."""
    assert " ".join(f"{word:08x}" for word in words(counter, key)) == expected


def inputs(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    seed = torch.randint(-(2**63), 2**63 - 1, (count,), generator=gen)
    position = torch.randint(0, 2**40, (count,), generator=gen)
    return seed, position, torch.randint(1, 4, (count,), generator=gen)


def test_numpy_and_torch_give_the_standard_bits() -> None:
    seed, position, purpose = inputs(100)
    expected = [
        words((p & 0xFFFFFFFF, p >> 32, c, 0), (s & 0xFFFFFFFF, (s >> 32) & 0xFFFFFFFF))
        for s, p, c in zip(seed.tolist(), position.tolist(), purpose.tolist(), strict=True)
    ]
    by_numpy = np.stack(philox.philox_numpy(seed.numpy(), position.numpy(), purpose.numpy())).T
    by_torch = torch.stack(philox.philox_torch(seed, position, purpose), 1)
    assert by_numpy.tolist() == expected
    assert by_torch.tolist() == expected


@triton.jit
def _uniforms(seed, position, out, PURPOSE: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    row = tl.program_id(0)
    lanes = tl.arange(0, SIZE)
    tl.store(
        out + row * SIZE + lanes, fused_uniform(tl.load(seed + row), tl.load(position + row) + lanes, PURPOSE)
    )


@pytest.mark.parametrize("purpose", [philox.PROPOSE, philox.ACCEPT, philox.RESAMPLE])
def test_triton_gives_the_same_uniforms(purpose: int, device: str) -> None:
    seed, position, _ = inputs(20)
    out = torch.zeros(20, 4, dtype=torch.float64, device=device)
    _uniforms[(20,)](seed.to(device), position.to(device), out, PURPOSE=purpose, SIZE=4)
    expected = philox.uniform(seed[:, None], position[:, None] + torch.arange(4), purpose)
    assert torch.equal(out.cpu(), expected)


def test_torch_and_numpy_uniforms_agree() -> None:
    seed, position, _ = inputs(50)
    accept, resample = philox.chain_uniforms(seed, position, 3)
    for j in range(4):
        step = (position + j).numpy()
        by_numpy = philox.uniform_numpy(seed.numpy(), step, philox.RESAMPLE)
        assert resample[:, j].tolist() == by_numpy.tolist()
        if j < 3:
            assert accept[:, j].tolist() == philox.uniform_numpy(seed.numpy(), step, philox.ACCEPT).tolist()
    low, high = philox.philox_torch(seed, position, philox.PROPOSE)[:2]
    by_torch = (((low >> 9) * 2**23 + (high >> 9)).double() + 0.5) * 2.0**-46
    assert torch.equal(philox.uniform(seed, position, philox.PROPOSE), by_torch)


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_the_interval_is_open(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    extreme = np.array([word], dtype=np.uint64)
    monkeypatch.setattr(philox, "philox_numpy", lambda *_: (extreme,) * 4)
    u = float(philox.uniform_numpy(extreme, extreme, 1)[0])
    assert 0 < u < 1
    assert u * 1e30 < 1e30  # stays below a total after multiplication


def test_purposes_are_independent_and_uniform() -> None:
    count = 200_000
    seed, position = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    streams = [philox.uniform(seed, position, purpose) for purpose in (1, 2, 3)]
    for u in streams:
        gap = (u.sort().values - (torch.arange(count) + 0.5) / count).abs().max()
        assert float(gap) < 2.6 / count**0.5  # Kolmogorov: exceeded once in 300 000
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(3)
    assert float(correlations.abs().max()) < 5 / count**0.5
    same = torch.corrcoef(torch.stack((streams[0], philox.uniform(seed, position, 1))))
    assert float(same[0, 1]) > 0.99  # the check can fail: one purpose twice is one stream
