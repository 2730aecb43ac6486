"""The fused verification: the reference's tokens, whatever the batch, reading no more than it says."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from chain_cases import Chain, make_chain
from torch import Tensor

from moedraft import kernels
from moedraft.kernels import backends, primitives, reference, verify
from moedraft.kernels import verify_kernels as kernel

CASES = [
    {"length": 3, "vocab": 127},
    {"length": 2, "vocab": 1000, "lse": True},
    {"length": 4, "vocab": 300, "one_hot": True},
    {"length": 2, "vocab": 1000, "dtype": torch.bfloat16, "lse": True},
    {"length": 2, "vocab": 4097, "dtype": torch.float16},
]


def boundary_distance(chain: Chain, row: int, fused: Tensor, plain: Tensor) -> float:
    """How near, in probability, a differing row's draw lay to the border between the two tokens."""
    j = int((fused[row] != plain[row]).nonzero()[0])
    temperature = float(chain.temperature[row])
    probs = torch.softmax(chain.target[row, j].double() / temperature, -1)
    low, high = sorted((int(fused[row, j]), int(plain[row, j])))
    return float(probs[low + 1 : high].sum()) if low >= 0 else 1.0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_equal_the_references(case: dict[str, object], device: str) -> None:
    case = dict(case)
    with_lse, one_hot = case.pop("lse", False), case.pop("one_hot", False)
    batch = 4096 if device == "cuda" else 12
    chain = make_chain(batch, device=device, temperature=[1.0, 0.0, 0.7, 1.6], **case)
    chain.lse = chain.extra["lse"] if with_lse else None
    chain.draft = None if one_hot else chain.draft
    fused, plain = chain.run("triton"), chain.run("reference")
    differing = (fused[0] != plain[0]).any(dim=1).nonzero().flatten().tolist()
    # an inverse CDF rounds differently at the border between two tokens: about one draw in a million
    assert len(differing) <= (2 if device == "cuda" else 0)
    for row in differing:
        assert boundary_distance(chain, row, fused[0], plain[0]) < 1e-5
    assert torch.equal(fused[2], plain[2])
    assert int(fused[1].sum()) > 0
    assert int((fused[1] < case["length"]).sum()) > 0  # type: ignore[operator]


def test_the_production_chunk(device: str) -> None:
    """Nine chunks, the last one not full: with the draft's statistics, its lse, and a certain draft."""
    assert verify.chunk_width(33_000) == 4096
    chain = make_chain(3, 2, 33_000, device=device, temperature=[1.0, 0.8, 0.0], spread=1.0)
    for changes in ({}, {"draft_lse": chain.extra["lse"]}, {"draft_logits": None}):
        fused, plain = (chain.run(backend, **changes) for backend in ("triton", "reference"))  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))


def test_only_the_fused_path_ran_in_two_launches(
    device: str, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    chain = make_chain(2, 2, 40, device=device)
    chain.lse = chain.extra["lse"]

    def refuse(*_: object) -> None:
        raise AssertionError("the reference ran")

    monkeypatch.setattr(reference, "verify_chain", refuse)
    monkeypatch.setattr(reference, "sample_draft", refuse)
    chain.run("triton")
    chain.run("triton", draft_lse=None)
    kernels.sample_draft(chain.draft[:, 0], 1.0, chain.seed, chain.position, backend="triton")
    assert launched == ["sweep", "resolve"] * 3
    with pytest.raises(AssertionError, match="the reference ran"):
        chain.run("reference")  # the trap works


def test_filters_of_short_rows_are_found_and_heeded_in_three_launches(
    device: str, launched: list[str]
) -> None:
    chain = make_chain(2, 2, 40, device=device)
    top_p = torch.full((2,), 0.8, device=device)
    cuts = kernels.find_cuts(
        chain.target, temperature=torch.ones(2, device=device), top_p=top_p, backend="triton"
    )
    fused, plain = (chain.run(backend, target_cuts=cuts) for backend in ("triton", "reference"))
    assert launched == ["cut", "sweep", "resolve"]
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value|All-NaN:RuntimeWarning")
def test_draft_lse_leaves_one_draft_row_to_read(device: str) -> None:
    chain = make_chain(6, 3, 1000, device=device)
    chain.lse = chain.extra["lse"]
    expected = chain.run("triton")
    index = chain.tokens.clamp(min=0)[..., None]
    kept = chain.draft.gather(-1, index)
    rejected = (torch.arange(3, device=device) == expected[1][:, None])[..., None]
    assert bool(rejected.any())
    chain.draft = torch.where(rejected, chain.draft, float("nan")).scatter(-1, index, kept)
    assert all(torch.equal(a, b) for a, b in zip(chain.run("triton"), expected, strict=True))
    chain.draft = torch.where(rejected, float("nan"), chain.draft).scatter(-1, index, kept)
    assert bool(chain.run("triton")[2].any())  # the rejected ones are read


@pytest.mark.parametrize("per", [1, 2, 4])
def test_results_do_not_depend_on_the_grid(per: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(2, 2, 1000, device=device)
    expected = chain.run("triton")
    lse = kernels.sample_draft(chain.draft[:, 0], 1.0, chain.seed, chain.position, backend="triton")[1]
    monkeypatch.setattr(verify, "chunks_per_program", lambda rows, chunks: per)
    assert all(torch.equal(a, b) for a, b in zip(chain.run("triton"), expected, strict=True))
    again = kernels.sample_draft(chain.draft[:, 0], 1.0, chain.seed, chain.position, backend="triton")[1]
    assert torch.equal(lse, again)


def test_results_do_not_depend_on_which_program_is_last(
    device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(6, 2, 5000, device=device, temperature=[1.0, 1.4, 0.0])
    chain.lse = chain.extra["lse"]
    expected = chain.run("triton")
    assert bool((expected[1] < 2).any())
    order: list[int] = []
    real = kernel.arrives_last.fn

    def seen(arrivals: object, expected: object) -> object:
        order.append(kernel.tl.program_id(1).handle.data.item())
        return real(arrivals, expected)

    request.getfixturevalue("backwards")
    monkeypatch.setattr(kernel, "arrives_last", seen)
    assert all(torch.equal(a, b) for a, b in zip(chain.run("triton"), expected, strict=True))
    assert order[:5] == [4, 3, 2, 1, 0]  # five chunks: the first of a row arrives last


def test_the_grid_table_covers_every_chunk() -> None:
    for vocab in (1, 255, 1024, 1025, 32768, 151_936, 262_144):
        chunks = triton.cdiv(vocab, verify.chunk_width(vocab))
        assert chunks * verify.chunk_width(vocab) >= vocab
        for rows in (1, 5, 320, 1280):
            per = verify.chunks_per_program(rows, chunks)
            assert triton.cdiv(chunks, per) * per >= chunks


@triton.jit
def _offsets(out, stride_b, stride_k, b, j, NARROW: tl.constexpr):  # noqa: N803
    first, second = tl.load(b), tl.load(j)
    if NARROW:
        offset = primitives.row_offset(None, first, second, stride_b, stride_k, False, tl.int32)
    else:
        offset = primitives.row_offset(None, first, second, stride_b, stride_k, False)
    tl.store(out, offset.to(tl.int64))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_row_offsets_are_64_bit(device: str) -> None:
    """The address of row (3, 2) in [4, 5, V] where V takes B·K·V past 2^31, from the kernels' own helper."""
    stride_b, stride_k = 5 * 151_936_000, 151_936_000
    expected = 3 * stride_b + 2 * stride_k
    assert expected > 2**31
    b, j = (torch.tensor([value], dtype=torch.int32, device=device) for value in (3, 2))
    found = []
    for narrow in (False, True):
        out = torch.zeros(1, dtype=torch.int64, device=device)
        _offsets[(1,)](out, stride_b, stride_k, b, j, NARROW=narrow)
        found.append(int(out))
    assert found[0] == expected
    assert found[1] != expected  # the control: 32-bit offsets wrap at this shape
    assert kernel.row_offset is primitives.row_offset


def test_triton_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = make_chain(1, 1, 8)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="CUDA"):
        chain.run("triton")
    assert chain.run("auto")[0].shape == (1, 2)  # CPU tensors go to the reference
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="install"):
        chain.run("triton")
