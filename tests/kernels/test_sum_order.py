"""A row's numbers are the same to the last bit however many tokens were drafted: large vocabularies.

With 131 072 and 262 144 entries the chunks are 32 and 64, which layouts of some chain lengths divide evenly
and those of others do not. That the compiler keeps the order too is seen in `test_kernels_compile.py`, and
that it lays out all other sums alike in `test_sum_layouts.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from chain_cases import Chain, make_chain, same
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import verify
from moedraft.kernels.primitives import combine

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
VOCABS = [131_072, 262_144]
Verdict = tuple[Tensor, Tensor, Tensor]


@triton.jit
def _combined(maxima, sums, tops, totals, ROWS: tl.constexpr, CHUNKS: tl.constexpr):  # noqa: N803
    rows, chunks = tl.arange(0, ROWS), tl.arange(0, CHUNKS)
    cells = rows[:, None] * CHUNKS + chunks[None, :]
    _, top, total = combine(tl.load(maxima + cells), tl.load(sums + cells), ROWS, CHUNKS)
    tl.store(tops + rows, top)
    tl.store(totals + rows, total)


def statistics(maxima: Tensor, sums: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Of the first `rows` rows [rows, chunks], combined in a block of so many."""
    top, total = torch.empty(2, rows, device=maxima.device)
    options = {"enable_fp_fusion": False} if maxima.is_cuda else {}
    _combined[(1,)](maxima[:rows], sums[:rows], top, total, ROWS=rows, CHUNKS=maxima.shape[1], **options)
    return top, total


def pairwise(values: Tensor) -> Tensor:
    """Sums of [N, chunks], neighbours first."""
    while values.shape[1] > 1:
        values = values[:, ::2] + values[:, 1::2]
    return values[:, 0]


@pytest.mark.parametrize("vocab", VOCABS)
def test_chunks_are_added_in_one_order_whatever_the_rows(vocab: int, device: str) -> None:
    chunks = vocab // verify.chunk_width(vocab)
    assert chunks == triton.next_power_of_2(chunks)
    gen = torch.Generator().manual_seed(vocab)
    maxima = (torch.randn(32, chunks, generator=gen) * 3).to(device)
    sums = (torch.rand(32, chunks, generator=gen) * 900 + 1).to(device)
    top, total = statistics(maxima, sums, 32)
    for rows in (2, 4, 8, 16):  # positions of a chain, padded
        found = statistics(maxima, sums, rows)
        assert torch.equal(found[0], top[:rows])
        assert torch.equal(found[1], total[:rows])
    if device == "cpu":
        terms = sums * torch.from_numpy(np.exp((maxima - top[:, None]).numpy()))
        assert torch.equal(pairwise(terms), total)
        in_turn = torch.stack([sum(row[1:], row[0]) for row in terms])
        assert not torch.equal(in_turn, total)  # the control: another order gives other bits


def padded(chain: Chain, length: int) -> int:
    """For how many rows `resolve` and `judge` are compiled where so many tokens are drafted."""
    target, tokens = chain.target[:, : length + 1], chain.tokens[:, :length]
    place = chain.position
    rows = verify.VerifyRows(target, tokens, None, None, None, 1.0, place, place, None, None)
    return rows.constants["KP"]


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, 15])
@pytest.mark.parametrize("rule", [kernels.verify_chain, kernels.verify_block])
def test_a_chain_goes_as_its_beginning_does(rule: Callable[..., Verdict], length: int, device: str) -> None:
    """With one drafted token and with one of many that could be, in kernels for different numbers of rows.

    By chain what is emitted first is the same also where all of the many were drafted; block looks ahead.
    """
    chain = make_chain(1, length, VOCABS[0], device=device, spread=0.3, dtype=torch.bfloat16)
    assert padded(chain, length) > padded(chain, 1)
    changes = {
        "target_logits": chain.target[:, :2],
        "draft_tokens": chain.tokens[:, :1],
        "draft_logits": chain.draft[:, :1],  # type: ignore[index]
    }
    short = chain.run("triton", rule, **changes)
    assert same(short, chain.run("reference", rule, **changes))
    one = chain.run("triton", rule, num_draft=torch.ones_like(chain.seed))
    assert same((one[0][:, :2], *one[1:]), short)
    if rule is kernels.verify_chain:
        whole = chain.run("triton", rule)
        assert same(whole, chain.run("reference", rule))
        assert torch.equal(short[1], whole[1].clamp(max=1))
        assert torch.equal(short[0][:, 0], whole[0][:, 0])
