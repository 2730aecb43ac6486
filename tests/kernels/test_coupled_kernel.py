"""Fused coupled sampling: the noise and the tokens of the reference, whatever the batch.

On a CPU through Triton's interpreter, with few rows; on a GPU the same tests take many.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from chain_cases import Chain, chi_square, chi_square_limit, make_chain, pack, same
from law_cases import VOCAB, tables

from moedraft import kernels
from moedraft.kernels import (
    coupled,
    coupled_kernels,
    philox,
    reference_coupled,
    sample_coupled,
    verify,
    verify_coupled,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value|All-NaN:RuntimeWarning")
TEMPERATURES = [1.0, 0.7, 0.0, 1.6]
CASES = [
    {"length": 0, "vocab": 5},
    {"length": 1, "vocab": 1},
    {"length": 3, "vocab": 127},
    {"length": 7, "vocab": 30},
    {"length": 2, "vocab": 1101, "dtype": torch.bfloat16},
    {"length": 2, "vocab": 4097, "dtype": torch.float16},
]


def both(chain: Chain, **changes: object) -> bool:
    """Whether the fused kernels and the reference return the same."""
    found, expected = (
        chain.run(backend, verify_coupled, **changes)  # type: ignore[arg-type]
        for backend in ("triton", "reference")
    )
    return same(found, expected)


def coupled_chain(length: int, vocab: int, device: str, batch: int = 8, **how: object) -> Chain:
    """A chain whose tokens were drawn with the noise that verification uses."""
    chain = make_chain(batch, length, vocab, device=device, temperature=TEMPERATURES, spread=0.2, **how)  # type: ignore[arg-type]
    for j in range(length):
        drawn, _, _ = sample_coupled(
            chain.draft[:, j],
            chain.temperature,
            chain.seed,
            chain.position + j,
            "reference",  # type: ignore[index]
        )
        chain.tokens[:, j] = drawn
    return chain


@triton.jit
def _noise(seed, position, out, SIZE: tl.constexpr):  # noqa: N803
    row, chunk = tl.program_id(0), tl.program_id(1)
    noise = coupled_kernels.gumbel(tl.load(seed + row), tl.load(position + row), chunk * SIZE, SIZE)
    tl.store(out + (row * tl.num_programs(1) + chunk) * SIZE + tl.arange(0, SIZE), noise)


def test_the_noise_is_the_references(device: str) -> None:
    gen = torch.Generator().manual_seed(4)
    seed = torch.randint(-(2**63), 2**63 - 1, (8,), generator=gen).to(device)
    position = torch.randint(0, 2**40, (8,), generator=gen).to(device)
    out = torch.empty(8, 3 * 64, dtype=torch.float64, device=device)
    _noise[(8, 3)](seed, position, out, SIZE=64)
    assert torch.allclose(out, philox.gumbel(seed, position, 3 * 64), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_equal_the_references(case: dict[str, object], device: str) -> None:
    chain = coupled_chain(device=device, batch=4096 if device == "cuda" else 8, **case)  # type: ignore[arg-type]
    assert both(chain)
    count = chain.run("triton", verify_coupled)[1]
    if case["length"] and case["vocab"] != 1:
        assert 0 < int(count.sum()) < count.numel() * int(str(case["length"]))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_drafts_equal_the_references(case: dict[str, object], device: str) -> None:
    logits, temperatures, *noise = first_rows(coupled_chain(device=device, **case))  # type: ignore[arg-type]
    for temperature in (temperatures, 0.7, 0.0):  # 0.7 is another number in float64 than in float32
        (tokens, lse, top), (expected, exact, likeliest) = (
            sample_coupled(logits, temperature, *noise, backend) for backend in ("triton", "reference")
        )
        assert torch.equal(tokens, expected)
        assert torch.allclose(lse, exact, rtol=1e-6, atol=2e-6)
        assert torch.allclose(top, likeliest, rtol=1e-5)
        assert (tokens.dtype, lse.dtype) == (torch.int64, torch.float32)


def first_rows(chain: Chain) -> tuple[torch.Tensor, ...]:
    """The target's first rows, and with what they are drawn from."""
    return chain.target[:, 0], chain.temperature, chain.seed, chain.position


def test_the_production_chunk(device: str) -> None:
    assert verify.chunk_width(33_000) == 4096
    chain = coupled_chain(1, 33_000, device, batch=3)
    assert both(chain)
    drawn, _, _ = sample_coupled(*first_rows(chain), backend="triton")
    assert torch.equal(drawn, chain.run("reference", verify_coupled)[0][:, 0])


def test_one_temperature_and_float64_logits(device: str) -> None:
    chain = coupled_chain(2, 127, device)
    for temperature in (0.7, 0.0, 1e-5, 1e-3):
        assert both(chain, temperature=temperature)
    chain.target = chain.target.double() + 1e-12 * torch.rand_like(chain.target).double()
    assert both(chain)
    chain.target[..., 1:] = chain.target[..., :1]  # nothing but noise
    assert both(chain)


def test_ties_go_to_the_lowest_index(device: str) -> None:
    chain = make_chain(3, 1, 600, device=device, temperature=0.0)
    chain.target[:, 0, [300, 520]] = 50.0
    assert chain.run("triton", verify_coupled)[0][:, 0].tolist() == [300] * 3
    assert both(chain)


def test_control_other_noise_shows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda":
        pytest.skip("compiled kernels keep what they call")
    real = coupled_kernels.gumbel.fn
    monkeypatch.setattr(coupled_kernels, "gumbel", lambda *given: -real(*given))
    assert not both(coupled_chain(2, 40, device))


def test_ragged_and_packed_rows(device: str) -> None:
    chain = coupled_chain(3, 300, device, batch=10)
    counts = torch.tensor([3, 0, 2, 1, 3, 2, 0, 3, 1, 2], device=device)
    expected = chain.run("reference", verify_coupled, num_draft=counts)
    assert same(chain.run("triton", verify_coupled, num_draft=counts), expected)
    target, draft = pack(chain, counts)
    packed = {"target_logits": target, "draft_logits": draft, "num_draft": counts.to(torch.int32)}
    assert same(chain.run("triton", verify_coupled, **packed), expected)
    for row, count in enumerate(counts.tolist()):  # what lies behind the end is not looked at
        chain.target[row, count + 1 :] = float("nan")
        chain.tokens[row, count:] = 10**9
    assert same(chain.run("triton", verify_coupled, num_draft=counts), expected)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("position", [0, 2])
def test_broken_rows(value: str, position: int, device: str) -> None:
    chain = coupled_chain(2, 300, device, batch=6)
    if value == "-inf":
        chain.target[::2, position] = float(value)
    else:
        chain.target[::2, position, 280] = float(value)
    assert both(chain)
    tokens, lse, _ = sample_coupled(
        chain.target[:, position], chain.temperature, chain.seed, chain.position, "triton"
    )
    assert tokens[::2].tolist() == [0] * 3
    assert lse.isnan().tolist() == [True, False] * 3
    if position == 0:
        assert chain.run("triton", verify_coupled)[2].tolist() == [kernels.TARGET_INVALID, 0] * 3


def test_filters_and_strides(device: str) -> None:
    chain = coupled_chain(2, 300, device)
    chain.target[..., ::3] = -torch.inf
    chain.target[..., 64:] = -torch.inf  # whole chunks of nothing
    assert both(chain)
    tokens = chain.run("triton", verify_coupled)[0]
    assert bool(((tokens % 3 != 0) | (tokens < 0)).all())
    turned = chain.target.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not turned.is_contiguous()
    assert both(chain, target_logits=turned)


def test_a_row_does_not_depend_on_its_batch_or_the_grid(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = coupled_chain(2, 1101, device, batch=5)
    expected = chain.run("triton", verify_coupled)
    fields = ("target", "tokens", "draft", "temperature", "seed", "position")
    order = torch.tensor([3, 1, 0, 4, 2], device=device)
    mixed = Chain(*(getattr(chain, name)[order] for name in fields)).run("triton", verify_coupled)
    assert same(mixed, tuple(part[order] for part in expected))
    for per in (2, 4):
        monkeypatch.setattr(coupled, "chunks_per_program", lambda rows, chunks, per=per: per)
        assert same(chain.run("triton", verify_coupled), expected)
    empty = Chain(*(getattr(chain, name)[:0] for name in fields))
    assert [tuple(part.shape) for part in empty.run("triton", verify_coupled)] == [(0, 3), (0,), (0,)]


def test_two_launches_and_no_reference(
    device: str, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    chain = make_chain(3, 2, 40, device=device, temperature=TEMPERATURES)

    def refuse(*_: object) -> None:
        raise AssertionError("the reference ran")

    monkeypatch.setattr(reference_coupled, "verify_coupled", refuse)
    monkeypatch.setattr(reference_coupled, "sample_coupled", refuse)
    chain.run("triton", verify_coupled)
    sample_coupled(*first_rows(chain), backend="triton")
    assert launched == ["sweep_coupled", "choose"] * 2
    with pytest.raises(AssertionError, match="the reference ran"):
        chain.run("reference", verify_coupled)  # the trap works


def test_it_follows_the_target(device: str) -> None:
    batch = 200_000 if device == "cuda" else 160
    logits = tables(device)[0][0]
    seed = torch.arange(batch, device=device)
    tokens, _, _ = sample_coupled(logits.expand(batch, VOCAB), 1.0, seed, seed * 0 + 9, "triton")
    probs = torch.softmax(logits.double().cpu(), -1)
    order = probs.argsort()
    groups = order.reshape(4, 4) if device == "cpu" else order.reshape(16, 1)  # enough expected in every cell
    observed = torch.bincount(tokens.cpu(), minlength=VOCAB)
    statistic, freedom = chi_square(observed[groups].sum(1), probs[groups].sum(1))
    assert statistic < chi_square_limit(freedom)
