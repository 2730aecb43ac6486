"""What filters leave of a row, found without sorting: the reference's set, ties included; and its use."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from chain_cases import Chain, make_chain, pack, same
from cut_cases import LIMITS, all_limits, assert_mass_met, assert_same, limits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import Cuts, apply_cuts, cut_kernels, find_cuts, fused_cut, reference_cut

INF = float("inf")
RULES = [kernels.verify_chain, kernels.verify_block, kernels.verify_coupled]
Verdict = tuple[Tensor, Tensor, Tensor]


@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (300, 0.01), (700, 6.0), (2500, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_set_is_the_references(dtype: torch.dtype, vocab: int, spread: float, device: str) -> None:
    gen = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(LIMITS), vocab, generator=gen) * spread).to(device, dtype)
    assert_same(logits, **all_limits(device, 0.8 + spread / 10))


@pytest.mark.parametrize("kind", ["equal", "two values", "steps", "mostly out", "broken", "signed zeros"])
def test_ties_and_rows_that_hold_no_numbers(kind: str, device: str) -> None:
    vocab, gen = 300, torch.Generator().manual_seed(2)
    rows = {
        "equal": torch.zeros(3, vocab),
        "two values": torch.randint(0, 2, (3, vocab), generator=gen).float(),
        "steps": torch.randint(0, 9, (3, vocab), generator=gen).float(),
        "mostly out": torch.full((3, vocab), -INF).index_fill(1, torch.tensor([5, 280]), 1.0),
        "broken": torch.randn(3, vocab, generator=gen),
        "signed zeros": torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-6, -3.0])[
            torch.randint(0, 6, (3, vocab), generator=gen)
        ],
    }[kind]
    if kind == "broken":
        rows[0, 3], rows[1, 9], rows[2] = torch.nan, INF, -INF
    for row in rows.to(device):
        assert_same(row.expand(len(LIMITS), vocab), **all_limits(device))


def test_every_row_of_few_values(device: str) -> None:
    """Rows of five tokens with three values, under filters that cut in the middle of ties."""
    rows = torch.tensor(list(itertools.product([0.0, 1.0, 2.5], repeat=5)))[::41].to(device)
    for top_k, top_p, min_p in itertools.product([0, 2], [0.3, 0.6], [0.0, 0.3]):
        assert_same(rows, **limits_of(len(rows), device, top_k=top_k, top_p=top_p, min_p=min_p))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from([-INF, -3.0, -0.5, 0.0, 0.5, 0.500001, 2.0, 9.0]), min_size=1, max_size=40),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 45),
    st.sampled_from([0.01, 0.2, 0.47, 0.8, 0.99, 1.0]),
    st.floats(0.0, 1.0),
)
def test_any_row(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    limits = limits_of(1, device, temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_same(torch.tensor([row], device=device), **limits)


def test_sequences_of_one_batch_ask_for_different_things(device: str) -> None:
    limits = {
        "temperature": torch.tensor([1.0, 0.0, 0.7, 1.5], device=device),
        "top_k": torch.tensor([0, 3, 20, 0], device=device),
        "top_p": torch.tensor([0.9, 0.5, 1.0, 1.0], device=device),
        "min_p": torch.tensor([0.0, 0.3, 0.0, 0.1], device=device),
    }
    logits = torch.randn(4, 3, 900, generator=torch.Generator().manual_seed(1)).mul(3).to(device)
    assert_same(logits, **limits)
    assert_same(logits[:, 1], **limits)
    cuts = find_cuts(logits, **limits, backend="triton")
    assert cuts.value[1].tolist() == [-INF] * 3  # greedy
    one = {name: limit[2:3] for name, limit in limits.items()}
    alone = find_cuts(logits[2:3, 1:2], **one, backend="triton")
    assert same(alone, tuple(part[2:3, 1:2] for part in cuts))  # to the last bit, in any batch


def test_rows_that_are_not_contiguous_and_a_real_chunk(device: str) -> None:
    wide = (
        torch.randn(33_000, 2, generator=torch.Generator().manual_seed(3)).mul(3).to(device, torch.bfloat16)
    )
    assert_same(wide.T, **limits_of(2, device, top_p=0.9))
    assert fused_cut.WIDEST < 33_000


def test_a_contiguous_row_of_many_chunks(device: str) -> None:
    """In the variants that real vocabularies run, though not copied ahead by the interpreter."""
    logits = torch.randn(1, 33_008, generator=torch.Generator().manual_seed(3)).mul(3).to(device)
    assert fused_cut.tile(33_008) == fused_cut.tile(151_936)
    assert fused_cut.LONG < 33_008
    assert_same(logits.bfloat16(), **limits_of(1, device, top_k=900, top_p=0.9, min_p=1e-4))


def test_a_top_p_of_nearly_one_is_met_to_a_millionth(device: str) -> None:
    """Where the mass left out is as small as a rounding error, no more than that may be wrong."""
    logits = (torch.randn(2, 5000, generator=torch.Generator().manual_seed(4)) * 6).to(device)
    assert_mass_met(logits)


HARD = {
    "two far clusters": torch.cat((torch.full((50,), 1e38), torch.full((500,), -1e38))),
    "around zero": torch.randn(3000, generator=torch.Generator().manual_seed(5)) * 1e-3,
    "all exponents": torch.logspace(-44, 38, 2000) * torch.tensor([1.0, -1.0]).repeat(1000),
    "steep": torch.arange(2000) * -0.5,
}


@pytest.mark.parametrize("name", HARD)
def test_hard_rows_are_found_too(name: str, device: str) -> None:
    row = HARD[name][None].to(device)
    for limits in ({"top_p": 0.5}, {"top_k": 300}, {"top_k": 900, "top_p": 0.9}):
        assert_same(row, **limits_of(1, device, 2.0, **limits))


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 4), (torch.float32, 7)])
def test_a_row_is_read_a_few_times(
    dtype: torch.dtype, most: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the reading for the largest logit; the last is for the ties."""
    if device == "cuda":
        pytest.skip("what a compiled kernel reads is not counted")
    readings: list[int] = []
    real = cut_kernels.measure

    def counted(*arguments: Any) -> Any:
        readings.append(1)
        return real(*arguments)

    monkeypatch.setattr(cut_kernels, "measure", counted)
    for seed in range(3):
        logits = (torch.randn(1, 4000, generator=torch.Generator().manual_seed(seed)) * 3 + 2).to(dtype)
        readings.clear()
        find_cuts(logits, **limits_of(1, device, top_p=0.95), backend="triton")
        assert 2 <= len(readings) <= most
        readings.clear()
        find_cuts(logits, **limits_of(1, device, min_p=0.1), backend="triton")
        assert not readings


def filtered_chain(device: str, dtype: torch.dtype = torch.float32) -> tuple[Chain, Chain, Cuts, Cuts]:
    """A chain with filtered logits, the same with those before the filter, and what leads to the first."""
    raw = make_chain(4, 3, 300, device=device, temperature=[1.0, 0.0, 0.7, 1.6], dtype=dtype)
    limits = {
        "temperature": raw.temperature,
        "top_p": torch.tensor([0.6, 0.9, 1.0, 0.8], device=device),
        "top_k": torch.tensor([0, 0, 5, 40], device=device),
    }
    assert raw.draft is not None
    target, draft = (find_cuts(logits, **limits, backend="reference") for logits in (raw.target, raw.draft))
    filtered = replace(raw, target=apply_cuts(raw.target, target), draft=apply_cuts(raw.draft, draft))
    drawn = [
        kernels.sample_draft(filtered.draft[:, j], raw.temperature, raw.seed, raw.position + j, "reference")  # type: ignore[index]
        for j in range(3)
    ]
    tokens, lse = torch.stack([one[0] for one in drawn], 1), torch.stack([one[1] for one in drawn], 1)
    filtered.tokens = raw.tokens = tokens
    filtered.extra = raw.extra = {"lse": lse}
    return filtered, raw, target, draft


@pytest.mark.parametrize(("dtype", "with_lse"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("verify", RULES)
def test_verification_heeds_cuts(
    verify: Callable[..., Verdict], with_lse: bool, dtype: torch.dtype, backend: str, device: str
) -> None:
    """To the last bit what it makes of logits that were filtered before."""
    filtered, raw, target, draft = filtered_chain(device, dtype)
    if with_lse:
        filtered.lse = raw.lse = raw.extra["lse"]
    cuts = {"target_cuts": target, "draft_cuts": draft}
    expected = filtered.run(backend, verify)
    assert same(raw.run(backend, verify, **cuts), expected)
    assert not same(raw.run(backend, verify), expected)  # the control


@pytest.mark.parametrize("verify", RULES)
def test_packed_rows_and_certain_drafts_heed_cuts(
    verify: Callable[..., Verdict], backend: str, device: str
) -> None:
    filtered, raw, target, draft = filtered_chain(device)
    counts = torch.tensor([3, 0, 2, 1], device=device)
    for certain in (False, True):
        expected = filtered.run(
            backend, verify, num_draft=counts, **({"draft_logits": None} if certain else {})
        )
        packed, drafts = pack(raw, counts)
        rows = torch.arange(4, device=device) <= counts[:, None]
        cuts = {"target_cuts": Cuts(target.value[rows], target.last[rows])}
        if not certain:
            drawn = torch.arange(3, device=device) < counts[:, None]
            cuts["draft_cuts"] = Cuts(draft.value[drawn], draft.last[drawn])
        changes = {"target_logits": packed, "draft_logits": None if certain else drafts, "num_draft": counts}
        assert same(raw.run(backend, verify, **changes, **cuts), expected)


@pytest.mark.parametrize("sample", [kernels.sample_draft, kernels.sample_coupled])
def test_drawing_heeds_cuts(sample: Callable[..., Verdict], backend: str, device: str) -> None:
    filtered, raw, target, _ = filtered_chain(device)
    cuts = Cuts(target.value[:, 0], target.last[:, 0])
    arguments = (raw.temperature, raw.seed, raw.position)
    found = sample(raw.target[:, 0], *arguments, backend=backend, cuts=cuts)
    assert same(found, sample(filtered.target[:, 0], *arguments, backend=backend))
    safe = torch.where(raw.temperature > 0, raw.temperature, 1.0)[:, None]
    probs = (filtered.target[:, 0] / safe).softmax(-1)
    assert torch.allclose(found[2], probs.amax(-1), rtol=1e-5)
    assert not torch.equal(found[1], sample(raw.target[:, 0], *arguments, backend=backend)[1])  # the control


def test_only_the_fused_path_ran_for_short_rows_in_one_launch(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, ...]] = []
    kernel = fused_cut.cut

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return kernel[grid]

    def refuse(*_: object) -> None:
        raise AssertionError("the reference ran")

    monkeypatch.setattr(fused_cut, "cut", Counted())
    monkeypatch.setattr(reference_cut, "find_cuts", refuse)
    logits = torch.randn(2, 3, 100, device=device)
    cuts = find_cuts(logits, **limits_of(2, device, top_p=0.5), backend="triton")
    assert grids == [(6,)]
    assert [part.element_size() * part.numel() for part in cuts] == [24, 24]
    with pytest.raises(AssertionError, match="the reference ran"):
        find_cuts(logits, **limits_of(2, device, top_p=0.5), backend="reference")


def test_an_empty_batch_and_bad_arguments(backend: str, device: str) -> None:
    empty = find_cuts(torch.empty(0, 3, 9, device=device), **limits_of(0, device), backend=backend)  # type: ignore[arg-type]
    assert [tuple(part.shape) for part in empty] == [(0, 3)] * 2
    logits = torch.randn(2, 3, 9, device=device)
    right = limits_of(2, device, top_k=2, top_p=0.5)
    bad: list[tuple[dict[str, object], str]] = [
        (
            {"top_k": torch.zeros(3, dtype=torch.int64, device=device)},
            r"top_k must be int64 \[2\], not .*\[3\]",
        ),
        (
            {"top_k": torch.zeros(2, dtype=torch.int32, device=device)},
            r"top_k must be int64 \[2\], not torch.int32",
        ),
        ({"top_k": 3}, "top_k must be a tensor, int64"),
        ({"top_p": torch.zeros(2, dtype=torch.int64, device=device)}, "top_p must be floating"),
        ({"temperature": 1.0}, r"temperature must be a tensor, floating \[2\], not 1.0"),
        ({"top_p": torch.ones(2, device="meta")}, "top_p must be where the logits are"),
    ]
    for changes, message in bad:
        with pytest.raises(ValueError, match=message):
            find_cuts(logits, **{**right, **changes}, backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be floating"):
        find_cuts(logits.long(), **limits_of(2, device), backend=backend)  # type: ignore[arg-type]
    chain = make_chain(2, 2, 9, device=device)
    cuts = find_cuts(chain.target, **limits_of(2, device, top_k=2), backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"draft_cuts .* an entry for each row"):
        chain.run(backend, draft_cuts=cuts)
    with pytest.raises(ValueError, match="draft_cuts come with logits"):
        chain.run(backend, draft_logits=None, draft_cuts=cuts)
    with pytest.raises(ValueError, match="float32 and int32"):
        chain.run(backend, target_cuts=Cuts(cuts.value, cuts.last.long()))
    with pytest.raises(ValueError, match=r"target_cuts\.last must be where the logits are"):
        chain.run(backend, target_cuts=Cuts(cuts.value, cuts.last.to("meta")))
