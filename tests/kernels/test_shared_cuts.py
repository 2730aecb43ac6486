"""Cuts of long rows, which several programs share: the reference's set, whoever adds, in few launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_cases import same
from cut_cases import LIMITS, all_limits, assert_mass_met, assert_same, limits_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moedraft.kernels import Cuts, cut_sample, find_cuts, fused_cut, reference_cut, team_kernels

INF = float("inf")
# A logit far below the largest, divided by a temperature, is -inf; only the interpreter says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
VOCAB = 8200  # three chunks, of which the last has eight entries
Readings = list[list[int]]


def rows_of(count: int, spread: float = 2.0, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(count, VOCAB, generator=gen) * spread).to(dtype)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    """For each reading how every row stands after it; 0 where its cut is known. Counters are zero again."""
    found: Readings = []
    kernel = team_kernels.narrow

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                kernel[grid](*arguments, **constants)
                room = fused_cut.Room(arguments[8], *arguments[8:16])
                found.append(room.stages.tolist())
                assert not room.tables.any()
                assert not room.arrivals.any()

            return launch

    monkeypatch.setattr(fused_cut, "narrow", Watched())
    return found


@pytest.mark.parametrize("spread", [0.01, 2.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_set_is_the_references(
    dtype: torch.dtype, spread: float, device: str, readings: Readings
) -> None:
    logits = rows_of(len(LIMITS), spread, dtype).to(device)
    assert_same(logits, **all_limits(device, 0.9))
    assert any(readings[0])
    if dtype == torch.bfloat16 and spread > 1:
        assert not any(readings[1])  # one reading, and one for ties


def test_rows_that_hold_no_numbers_and_rows_that_nobody_filters(device: str, readings: Readings) -> None:
    logits = rows_of(5).to(device)
    logits[0, 4100], logits[1, 9], logits[2], logits[3] = torch.nan, INF, -INF, logits[4]
    for limits in ({"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}, {"min_p": 0.01}):
        rest = limits_of(5, device, **limits)
        rest["temperature"][3] = 0.0
        assert_same(logits, **rest)
    assert not any(row for reading in readings for row in reading[:4])
    for limits in ({"top_k": 0}, {"top_k": VOCAB}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert_same(logits, **limits_of(5, device, **limits))
    top_k, mass = torch.tensor([3], device=device), torch.tensor([0.0], device=device)
    assert_same(logits[4:], temperature=torch.ones(1, device=device), top_k=top_k, top_p=mass)


@pytest.mark.parametrize("kind", ["equal", "two values", "steps", "mostly out", "signed zeros", "extremes"])
def test_ties_and_rows_of_few_values(kind: str, device: str) -> None:
    gen = torch.Generator().manual_seed(2)

    def choice(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (VOCAB,), generator=gen)]

    row = {
        "equal": torch.zeros(VOCAB),
        "two values": choice(0.0, 1.0),
        "steps": choice(*map(float, range(9))),
        "mostly out": torch.full((VOCAB,), -INF).index_fill(0, torch.tensor([5, 4097, 8199]), 1.0),
        "signed zeros": choice(0.0, -0.0, 1e-45, -1e-45, 1e-6, -3.0),
        "extremes": choice(3.0e38, -3.3e38, -3.0e38, 0.0),
    }[kind].to(device)
    some = {name: limit[[0, 1, 3, 5, 7, 8]] for name, limit in all_limits(device).items()}
    assert_same(row.expand(6, VOCAB), **some)
    assert_same(row.expand(6, VOCAB).bfloat16(), **some)


def test_what_a_sample_hides_is_found_too(device: str, readings: Readings) -> None:
    """All that is likely lies where no sample is taken, or all of it where one is."""
    piece = torch.arange(VOCAB) // cut_sample.PIECE.value
    seen = piece % cut_sample.SPARSE.value == 0
    logits = torch.stack(
        [torch.where(seen, -4.0, 3.0), torch.where(seen, 3.0, -4.0), torch.where(seen, 9.0, -1.0)]
    )
    logits = (logits + rows_of(3, 0.5, torch.float32)).to(device)
    for dtype in (torch.bfloat16, torch.float32):
        for limits in ({"top_p": 0.9}, {"top_k": 300}, {"top_k": 700, "top_p": 0.6}, {"top_p": 0.99}):
            assert_same(logits.to(dtype), **limits_of(3, device, **limits))
    assert any(any(reading) for reading in readings[1::3])  # a second look was needed


@pytest.mark.parametrize("most", [0, 1])
def test_what_is_not_found_in_time_one_program_finds(
    most: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_cut, "READINGS", most)
    assert_same(rows_of(len(LIMITS)).to(device), **all_limits(device))


def test_neither_programs_nor_rows_change_a_bit(
    device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """One chunk for each program, all for one, another one that arrives last; alone or beside other rows."""
    limits = {name: limit[1:6] for name, limit in all_limits(device).items()}
    logits = rows_of(5, dtype=torch.float32).to(device)

    def found(per: int) -> Cuts:
        monkeypatch.setattr(fused_cut, "chunks_per_program", lambda rows, chunks: per)
        return find_cuts(logits, **limits, backend="triton")  # type: ignore[arg-type]

    expected = found(1)
    assert same(found(2), expected)
    assert same(found(4), expected)
    one = {name: limit[3:4] for name, limit in limits.items()}
    alone = find_cuts(logits[3:4], **one, backend="triton")
    assert same(alone, tuple(part[3:4] for part in expected))
    if device == "cpu":
        request.getfixturevalue("backwards")
        assert same(found(1), expected)


def test_sequences_of_several_positions_that_do_not_lie_together(device: str) -> None:
    wide = torch.randn(VOCAB, 3, 2, generator=torch.Generator().manual_seed(3)).mul(3).to(device)
    logits = wide.permute(2, 1, 0)
    limits = limits_of(2, device, top_p=0.9)
    limits["temperature"][1] = 0.5
    assert_same(logits, **limits)


def test_a_top_p_of_nearly_one_is_met_to_a_millionth(device: str) -> None:
    logits = rows_of(2, 6.0, torch.float32).to(device)
    assert_mass_met(logits)


@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 3), (torch.float16, 3), (torch.float32, 6)])
def test_the_launches_and_no_reference(
    dtype: torch.dtype, times: int, device: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the reference ran")

    monkeypatch.setattr(reference_cut, "find_cuts", refuse)
    find_cuts(rows_of(2, dtype=dtype).to(device), **limits_of(2, device, top_p=0.5), backend="triton")
    assert launched == ["survey", "aim", *["narrow"] * times, "cut"]
    with pytest.raises(AssertionError, match="the reference ran"):
        find_cuts(rows_of(2).to(device), **limits_of(2, device, top_p=0.5), backend="reference")


def test_rows_of_any_length_are_shared_or_not(device: str, launched: list[str]) -> None:
    for vocab in (fused_cut.LONG, fused_cut.LONG + 1):
        launched.clear()
        logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)).to(device)
        assert_same(logits, **limits_of(1, device, top_k=40, top_p=0.8))
        assert ("survey" in launched) == (vocab > fused_cut.LONG)


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are made in it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "empty" in str(function) or "zeros" in str(function):
            self.bytes += result.untyped_storage().nbytes()
        return result


def test_less_than_a_mebibyte_for_sixty_four_sequences(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five positions, with as many logits as large models have: what is allocated is counted."""

    class Nothing:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *_, **__: None

    for name in ("survey", "aim", "narrow", "cut"):
        monkeypatch.setattr(fused_cut, name, Nothing())
    logits = torch.empty((64, 5, 1), dtype=torch.bfloat16, device=device).expand(64, 5, 151_936)
    limits = limits_of(64, device, top_k=50, top_p=0.9, min_p=0.01)
    with Allocations() as made:
        find_cuts(logits, **limits, backend="triton")
    room = fused_cut.Room.of(320, 38, torch.device("meta"))
    expected = sum(part.numel() * part.element_size() for part in room) + 320 * 8
    assert made.bytes == expected < 0.85 * 2**20


def test_control_a_table_that_is_not_emptied_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the readings count in must be zero before each."""
    if device == "cuda":
        pytest.skip("compiled kernels are not changed here")
    kernel = team_kernels.aim

    class Forgetful:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **constants: Any) -> None:
                kernel[grid](*arguments, **constants)
                arguments[10].fill_(3)

            return launch

    monkeypatch.setattr(fused_cut, "aim", Forgetful())
    with pytest.raises(AssertionError):
        assert_same(rows_of(1).to(device), **limits_of(1, device, top_k=40))
