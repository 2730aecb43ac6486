"""Filtering by thresholds keeps exactly what a full sort keeps, ties included, without sorting whole rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from filter_reference import filtered_by_sorting, kept
from hypothesis import given, settings
from hypothesis import strategies as st

from moedraft.core import SamplingParams
from moedraft.kernels import reference_cut
from moedraft.kernels.cuts import NO_LAST
from moedraft.sampling import SamplingBatch, filter_logits

FILTERS = {
    "top_k": SamplingParams(0.8, top_k=7),
    "top_p": SamplingParams(1.0, top_p=0.9),
    "min_p": SamplingParams(1.2, min_p=0.05),
    "top_k and top_p": SamplingParams(1.3, top_k=40, top_p=0.8),
    "top_k and min_p": SamplingParams(0.7, top_k=9, min_p=0.2),
    "top_p and min_p": SamplingParams(1.0, top_p=0.95, min_p=0.02),
    "all": SamplingParams(0.9, top_k=30, top_p=0.9, min_p=0.01),
    "none": SamplingParams(1.0),
    "greedy": SamplingParams(0.0, top_k=3, top_p=0.5),
    "one token": SamplingParams(1.0, top_k=1),
    "hardly any mass": SamplingParams(1.0, top_p=1e-6),
    "nearly all mass": SamplingParams(1.0, top_p=0.999999),
    "more than all": SamplingParams(1.0, top_k=2**30, top_p=0.7),
    "the likeliest": SamplingParams(2.0, min_p=1.0),
}


def batch_of(params: list[SamplingParams]) -> SamplingBatch:
    return SamplingBatch.of(params, [0] * len(params), torch.device("cpu"))


def assert_same(logits: torch.Tensor, params: list[SamplingParams]) -> None:
    assert torch.equal(
        filter_logits(logits, batch_of(params)).nan_to_num(nan=7.0),
        filtered_by_sorting(logits, params).nan_to_num(nan=7.0),
    )


@pytest.mark.parametrize("vocab", [1, 5, 300, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # half precision has many ties
@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_alone(name: str, dtype: torch.dtype, vocab: int) -> None:
    gen = torch.Generator().manual_seed(vocab)
    for spread in (0.01, 1.0, 6.0):
        logits = (torch.randn(6, 3, vocab, generator=gen) * spread).to(dtype)
        assert_same(logits, [FILTERS[name]] * 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_filters_in_one_batch(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(1)
    logits = (torch.randn(len(FILTERS), 2, 3000, generator=gen) * 3).to(dtype)
    assert_same(logits, list(FILTERS.values()))
    assert_same(logits[:, 0], list(FILTERS.values()))


@pytest.mark.parametrize("kind", ["equal", "two values", "steps", "mostly out", "broken"])
@pytest.mark.parametrize("name", FILTERS)
def test_ties_and_rows_that_hold_no_numbers(name: str, kind: str) -> None:
    vocab = 2500
    gen = torch.Generator().manual_seed(2)
    rows = {
        "equal": torch.zeros(4, vocab),
        "two values": torch.randint(0, 2, (4, vocab), generator=gen).float(),
        "steps": torch.randint(0, 9, (4, vocab), generator=gen).float(),
        "mostly out": torch.full((4, vocab), -torch.inf).index_fill(1, torch.tensor([5, 2000]), 1.0),
        "broken": torch.randn(4, vocab, generator=gen),
    }[kind]
    if kind == "broken":
        rows[0, 3], rows[1, 9], rows[2] = torch.nan, torch.inf, -torch.inf
    assert_same(rows, [FILTERS[name]] * 4)


def test_every_pair_of_few_values() -> None:
    """All rows of six tokens with three values, under filters that cut in the middle of ties."""
    rows = torch.tensor(list(itertools.product([0.0, 1.0, 2.5], repeat=6)))
    for top_k, top_p, min_p in itertools.product([0, 1, 2, 4], [0.3, 0.6, 1.0], [0.0, 0.3]):
        params = SamplingParams(1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        assert_same(rows, [params] * len(rows))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([-torch.inf, -3.0, -0.5, 0.0, 0.5, 0.500001, 2.0, 9.0]), min_size=1, max_size=40
    ),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 45),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_any_row(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    assert_same(torch.tensor([row]), [SamplingParams(temperature, top_k=top_k, top_p=top_p, min_p=min_p)])


def test_few_candidates_are_looked_at_first_and_more_only_where_they_do_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = reference_cut.largest, list[tuple[int, int]]()

    def largest(rows: torch.Tensor, count: int) -> torch.Tensor:
        asked.append((len(rows), count))
        return real(rows, count)

    monkeypatch.setattr(reference_cut, "largest", largest)
    gen = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 1, 20_000, generator=gen) * torch.tensor([9.0, 9.0, 0.1, 9.0]).view(4, 1, 1)
    assert_same(logits, [SamplingParams(1.0, top_p=0.9)] * 4)
    assert asked == [(4, 256), (1, 2048), (1, 16384), (1, 20_000)]
    asked.clear()
    assert_same(logits, [SamplingParams(1.0, top_k=1000, top_p=0.9)] * 4)
    assert asked == [(4, 2000)]


def test_the_reference_is_what_was_there_before() -> None:
    """Top-k and top-p by the plain formula: softmax, running sum; apart from what rounding decides."""
    gen = torch.Generator().manual_seed(4)
    row = torch.randn(2000, generator=gen) * 2
    ordered, order = row.sort(descending=True, stable=True)
    before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)
    plain = torch.zeros(2000, dtype=torch.bool).scatter(0, order, before < 0.9)
    difference = (plain != kept(row, SamplingParams(1.0, top_p=0.9))).sum()
    assert int(difference) <= 1


def test_a_batch_without_filters_is_given_back() -> None:
    logits = torch.randn(2, 9)
    assert filter_logits(logits, batch_of([SamplingParams(1.0)] * 2)) is logits
    assert filter_logits(logits, batch_of([SamplingParams(0.0, top_k=2)] * 2)) is logits
    empty = torch.empty(2, 0, 9)
    assert filter_logits(empty, batch_of([SamplingParams(1.0, top_k=2)] * 2)) is empty


def test_control_ties_that_are_not_counted_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        reference_cut, "last_ties", lambda rows, cut: torch.full((len(rows),), NO_LAST, dtype=torch.int32)
    )
    rows = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    with pytest.raises(AssertionError):
        assert_same(rows, [SamplingParams(1.0, top_p=0.5)])
